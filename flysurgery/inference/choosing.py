"""A plan whose choices are made by measured times, and that leaves the whole model no slower than dense."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flysurgery.calibration import Data
from flysurgery.errors import FlysurgeryError, InferenceError, OptionError, PlanError
from flysurgery.inference import clock
from flysurgery.inference.measuring import Progress, first_line, measure_groups, random_variant
from flysurgery.inference.optimize import MEASURED_IMAGES, optimize
from flysurgery.inference.whole import MOST_COPIES
from flysurgery.surgery import ExampleInput, Measurement, Plan, Reason, TimedGroup, Tradeoff, allocate
from flysurgery.walker import shadow


@dataclass(frozen=True)
class Setting:
    """What a converted model is to be fast at: ``batch`` samples a forward (None: 64 on CUDA, else one) in ``dtype`` (None: the model's).

    With ``optimized`` it will be optimized, and is held against optimized dense too.
    """

    batch: int | None = None
    dtype: torch.dtype | None = None
    optimized: bool = False


def choose_measured(
    plan: Plan,
    model: nn.Module,
    setting: Setting,
    *,
    budget: float | None = None,
    max_error: float | None = None,
    calibrate: Data | None = None,
    samples: int | None = None,
    progress: Progress | None = None,
) -> tuple[Plan, Tradeoff | None, Measurement]:
    """``plan`` with choices among dense, low rank and the named architectures, made by times on the device where ``model`` is.

    Each group of layers, as ``measure_groups`` has it, gets the choice of least error among those that are faster than dense by more
    than the noise; ``budget`` and ``max_error`` bound the milliseconds and the error instead, as ``allocate`` has it. Then the whole
    model is timed, dense and converted with random weights; while it is slower than dense, the kind of group that gained the least goes
    back to dense. There is no trade-off where that happened. The model is only read.

    Raises:
        PlanError: nothing is faster than dense.
        OptionError: a model that does not take one tensor, and what ``allocate`` raises it for.
        InferenceError: the model cannot be run in this setting, for want of memory or of an operator in its dtype.
    """
    device = next(model.parameters()).device
    dense = copy.deepcopy(model).eval().requires_grad_(False)
    dense = dense if setting.dtype is None else dense.to(setting.dtype)
    example = _example(plan, setting, device, next(p.dtype for p in dense.parameters() if p.is_floating_point()))
    with _in_one_sentence(example):
        with torch.no_grad():
            dense(example)
        groups = measure_groups(plan, dense, example, fused=setting.optimized, progress=progress)
    chosen, tradeoff = allocate(
        plan, model, budget=budget, max_error=max_error, times=groups, calibrate=calibrate, samples=samples, progress=progress
    )
    with _in_one_sentence(example):
        kept, dense_ms, optimized_ms, converted_ms = _not_slower(chosen, dense, example, groups, optimized=setting.optimized)
    returned = tuple(layer.fqn for layer in chosen.replaced if layer.fqn not in {each.fqn for each in kept.replaced})
    measurement = Measurement(
        device=str(device) if device.type != "cuda" else torch.cuda.get_device_name(device),
        dtype=_name(example.dtype),
        batch=len(example),
        groups=tuple(groups),
        chosen=tuple(group.in_plan(kept).name for group in groups),
        dense_ms=dense_ms,
        dense_optimized_ms=optimized_ms,
        converted_ms=converted_ms,
        returned=returned,
    )
    return kept, None if returned else tradeoff, measurement


def _not_slower(
    plan: Plan, dense: nn.Module, example: Tensor, groups: Sequence[TimedGroup], *, optimized: bool
) -> tuple[Plan, float, float | None, float]:
    """The plan without the groups that make the whole model slower than dense; milliseconds of dense, optimized dense and converted."""
    references = [dense]
    if optimized:
        references.append(shadow(dense))
        optimize(references[1], example)
    while True:
        converted = random_variant(plan, dense)
        if optimized:
            optimize(converted, example)
        with torch.no_grad():
            *reference_ms, converted_ms = clock.medians_ms([*references, converted], (example,), most_copies=MOST_COPIES)
        if converted_ms <= min(reference_ms):
            return plan, reference_ms[0], reference_ms[1] if optimized else None, converted_ms
        text = f"with it the whole model takes {converted_ms:.3g} ms here, dense {min(reference_ms):.3g} ms"
        remaining = [group for group in groups if group.in_plan(plan) is not group.dense]
        least = min(remaining, key=lambda group: group.dense.ms - group.in_plan(plan).ms)
        back = [group for group in remaining if (group.choices, group.in_plan(plan).name) == (least.choices, least.in_plan(plan).name)]
        plan = plan.keeping({fqn: Reason("slower-model", text) for group in back for fqn in group.fqns})
        if not plan.replaced:
            raise PlanError(f"nothing would be replaced: {text}, at {len(example)} samples in {_name(example.dtype)}; leave it dense")


@contextmanager
def _in_one_sentence(example: Tensor) -> Iterator[None]:
    """Turn what PyTorch says of memory, dtypes and launches into an ``InferenceError``."""
    try:
        yield
    except FlysurgeryError:
        raise
    except RuntimeError as error:
        what = f"{len(example)} samples in {_name(example.dtype)} on {example.device}"
        raise InferenceError(f"measuring with {what} failed: {first_line(error)}; try another batch, dtype or device") from error


def _example(plan: Plan, setting: Setting, device: torch.device, dtype: torch.dtype) -> Tensor:
    first = plan.example[0] if plan.example is not None and len(plan.example) == 1 else None
    if not isinstance(first, ExampleInput) or not getattr(torch, first.dtype).is_floating_point:
        raise OptionError("measuring takes a model whose only input is one tensor of images or the like; choose by a budget of weights")
    batch = setting.batch or (MEASURED_IMAGES if device.type == "cuda" else 1)
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn((batch, *first.shape[1:]), generator=generator, device=device, dtype=dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
