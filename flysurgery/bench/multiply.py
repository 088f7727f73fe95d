"""How long one layer's multiplication takes with each backend, against the dense layer of the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flysurgery.bench.timing import Timing, time_interleaved
from flysurgery.errors import PatternError
from flysurgery.factors import factors_to_dense
from flysurgery.layers import ButterflyLinear
from flysurgery.ops import BACKENDS, Problem, explain, ks_linear
from flysurgery.patterns import Architecture, named

BASELINE = "linear"
"""The candidate that stands for the dense layer, an ``nn.Linear``."""

WORST_ERROR = 16.0
"""A result whose rms error exceeds that of the baseline by more than this factor is wrong, and gets no time."""


@dataclass(frozen=True)
class MultiplyRow:
    """One candidate on one layer. Times are None where ``status`` is not "ok" but the reason.

    ``candidate`` is ``linear`` (an nn.Linear), a backend with its weights prepared, of which ``dense`` does the same as ``linear``
    and so shows the noise of the run, or ``layer``: a ButterflyLinear as it stands in a model, with the backend
    that it chose in ``backend``. ``error`` is the rms error against float64, divided by the rms of the result.
    """

    arch: str
    layer: str
    architecture: str
    out_features: int
    in_features: int
    density: float
    rows: int
    dtype: str
    device_type: str
    candidate: str
    backend: str | None
    status: str
    error: float | None
    median_ms: float | None
    iqr_ms: float | None
    ratio_to_dense: float | None


def layer_sizes(width: int) -> dict[str, tuple[int, int]]:
    """Sizes (out, in) of the linears of a transformer block: q, k, v and output; the two of the FFN."""
    return {"square": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}


def bench_multiply(
    arch: str,
    *,
    width: int = 384,
    rows: int = 3152,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    rounds: int = 30,
    seed: int = 0,
) -> Iterator[MultiplyRow]:
    """Measure every backend on the layers of a transformer block of the given width, layer by layer.

    ``rows`` counts tokens; the default is 16 images at 197. Random weights. The dense layer is the product of the same factors.

    Raises:
        OptionError: there is no architecture of that name.
        PatternError: it does not exist at this width for any of the layers.
    """
    missing: list[str] = []
    for layer, (out_features, in_features) in layer_sizes(width).items():
        try:
            architecture = named(arch, out_features, in_features)
        except PatternError as error:
            missing.append(str(error))
            continue
        yield from _layer_rows(arch, layer, architecture, rows, dtype, torch.device(device), rounds, seed)
    if len(missing) == 3:
        raise PatternError(f"no layer of width {width} has an architecture '{arch}': {missing[0]}")


@torch.inference_mode()
def _layer_rows(
    arch: str, name: str, architecture: Architecture, rows: int, dtype: torch.dtype, device: torch.device, rounds: int, seed: int
) -> list[MultiplyRow]:
    torch.manual_seed(seed)
    with torch.inference_mode(False):  # a model's parameters are no inference tensors, whose packed weights could not be kept
        layer = ButterflyLinear(architecture, device=device, dtype=dtype).requires_grad_(False)
    x = torch.randn(rows, architecture.in_features, device=device, dtype=dtype)
    problem = Problem(architecture, rows, dtype, device.type, bias=True)
    backends = {"layer": explain(problem).choice} | {backend: backend for backend in BACKENDS}
    candidates = _candidates(layer, problem)
    errors, statuses = _check(candidates, layer, x)
    statuses |= {backend: reason for backend in BACKENDS if (reason := BACKENDS[backend].can_run(problem)) is not None}
    timings = time_interleaved({key: run for key, run in candidates.items() if statuses[key] == "ok"}, x, rounds=rounds, seed=seed)
    return [
        MultiplyRow(
            arch=arch,
            layer=name,
            architecture=str(architecture),
            out_features=architecture.out_features,
            in_features=architecture.in_features,
            density=architecture.density,
            rows=rows,
            dtype=str(dtype).removeprefix("torch."),
            device_type=device.type,
            candidate=candidate,
            backend=backends.get(candidate),
            status=statuses[candidate],
            error=errors.get(candidate),
            **_times(timings.get(candidate), timings[BASELINE]),
        )
        for candidate in (BASELINE, "layer", *BACKENDS)
    ]


def _candidates(layer: ButterflyLinear, problem: Problem) -> dict[str, Callable[[Tensor], Tensor]]:
    factors = tuple(layer.factors)
    dense = nn.Linear(layer.in_features, layer.out_features, device="meta")
    dense.load_state_dict({"weight": factors_to_dense(factors), "bias": layer.bias}, assign=True)
    candidates: dict[str, Callable[[Tensor], Tensor]] = {BASELINE: dense, "layer": layer}
    for name, backend in BACKENDS.items():
        if backend.can_run(problem) is None:
            candidates[name] = backend.bind(factors, layer.bias)
    return candidates


def _check(candidates: dict[str, Callable[[Tensor], Tensor]], layer: ButterflyLinear, x: Tensor) -> tuple[dict[str, float], dict[str, str]]:
    """Each candidate's relative rms error, and "ok" or what is wrong with it."""
    wide = [factor.double() for factor in layer.factors]
    bias = None if layer.bias is None else layer.bias.double()
    truth = ks_linear(x.double(), wide, bias, backend="einsum")
    size = truth.square().mean().sqrt()
    errors = {name: float((run(x).double() - truth).square().mean().sqrt() / size) for name, run in candidates.items()}
    allowed = WORST_ERROR * errors[BASELINE]
    statuses = {name: "ok" if error <= allowed else f"wrong: relative error {error:.2g}" for name, error in errors.items()}
    return errors, statuses


def _times(timing: Timing | None, baseline: Timing) -> dict[str, float | None]:
    if timing is None:
        return {"median_ms": None, "iqr_ms": None, "ratio_to_dense": None}
    return {"median_ms": timing.median_ms, "iqr_ms": timing.iqr_ms, "ratio_to_dense": timing.median_ms / baseline.median_ms}
