"""A group with its fused module, and the decision whether to use it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flysurgery.inference import clock
from flysurgery.inference.fused_modules import Step
from flysurgery.surgery import Reason

Shapes = tuple[tuple[int, ...], ...]


@dataclass
class Candidate:
    """One group: its kind, the name of its last linear, its fused module, and the shapes of its inputs.

    ``reason`` says why the group is left as it is; None where it is fused. ``launches`` names what its launches compute.
    """

    group: str
    fqn: str
    step: Step
    shapes: Shapes
    reason: Reason | None = None
    plain_ms: float | None = None
    fused_ms: float | None = None
    launches: tuple[str, ...] = ()


def decide(candidate: Candidate, dtype: torch.dtype, device: torch.device, measured: dict[object, tuple[float, float]]) -> None:
    """Decide whether the candidate is fused: whether a kernel takes it and, on a real device, whether it is faster.

    ``measured`` keeps the milliseconds of equal groups.
    """
    with torch.no_grad():
        # No data is needed: the answer follows from shapes, dtypes and the device.
        inputs = [torch.empty(shape, dtype=dtype, device=device) for shape in candidate.shapes]
        way = candidate.step.way(*inputs)
        candidate.launches = () if isinstance(way, str) else way.launches()
        if isinstance(way, str):
            candidate.reason = Reason("no-kernel", way)
        elif device.type != "meta":
            key = (candidate.group, candidate.step.likeness(), candidate.shapes, dtype)
            if key not in measured:
                measured[key] = _measure(candidate.step, candidate.shapes, dtype, device)
            candidate.plain_ms, candidate.fused_ms = measured[key]
            if candidate.fused_ms >= candidate.plain_ms:
                candidate.reason = Reason(
                    "slower", f"fused it takes {candidate.fused_ms:.3g} ms here, by its own modules {candidate.plain_ms:.3g} ms"
                )
    candidate.step.enabled = candidate.reason is None


def random_inputs(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Tensors to time a group with, the same ones in every call."""
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype, device=device) for shape in shapes]


def _measure(step: Step, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    inputs = random_inputs(shapes, dtype, device)
    plain_ms, fused_ms = clock.medians_ms((step.plain, step.fused), inputs)
    return plain_ms, fused_ms
