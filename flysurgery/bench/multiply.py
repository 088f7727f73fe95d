"""How long one layer's multiplication takes with each backend, against the dense layer of the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flysurgery.bench.ceilings import Ceilings, Work, measure_ceilings
from flysurgery.bench.measuring import AGAIN, DEFAULT_PROTOCOL, Measured, Protocol, checked_rows, launch_on, measure
from flysurgery.bench.modes import in_mode
from flysurgery.bench.variants import dense_linear
from flysurgery.errors import PatternError
from flysurgery.layers import ButterflyLinear
from flysurgery.ops import BACKENDS, Problem, explain, ks_linear
from flysurgery.patterns import Architecture, named

BASELINE = "linear"
"""The candidate that stands for the dense layer, an ``nn.Linear``."""

CHECKED_ROWS = 4096
"""Rows at either end that are held against float64."""


@dataclass(frozen=True)
class MultiplyRow:
    """One candidate on one layer.

    ``candidate`` is ``linear`` (an nn.Linear), ``linear again`` (the same, which shows the noise of the run), a backend with its
    weights prepared, or ``layer``: a ButterflyLinear as it stands in a model, with the backend that it chose in ``backend``.
    """

    arch: str
    layer: str
    architecture: str
    out_features: int
    in_features: int
    density: float
    rows: int
    mode: str
    device_type: str
    candidate: str
    backend: str | None
    measured: Measured


def layer_sizes(width: int) -> dict[str, tuple[int, int]]:
    """Sizes (out, in) of the linears of a transformer block: q, k, v and output; the two of the FFN."""
    return {"square": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}


def bench_multiply(
    arch: str,
    *,
    width: int = 384,
    rows: int = 3152,
    mode: str = "fp32",
    device: torch.device | str = "cpu",
    protocol: Protocol = DEFAULT_PROTOCOL,
    quick: bool = False,
    done: Callable[[Mapping[str, object]], bool] = lambda key: False,
) -> Iterator[list[MultiplyRow]]:
    """Measure every backend on the layers of a transformer block of the given width, layer by layer.

    ``rows`` counts tokens; the default is 16 images at 197. Random weights. The dense layer is the product of the same factors. ``done``
    is told what identifies a layer, and leaves it out.

    Raises:
        OptionError: there is no architecture of that name.
        PatternError: it does not exist at this width for any of the layers.
    """
    missing: list[str] = []
    ceilings: Ceilings | None = None
    device = torch.device(device)
    for layer, (out_features, in_features) in layer_sizes(width).items():
        try:
            architecture = named(arch, out_features, in_features)
        except PatternError as error:
            missing.append(str(error))
            continue
        key = {"arch": arch, "layer": layer, "architecture": architecture, "rows": rows, "mode": mode, "device_type": device.type}
        if done(key | {"candidate": BASELINE, "launch": launch_on(device, protocol)}):
            continue
        ceilings = ceilings or measure_ceilings(mode, device, quick=quick)
        yield _layer_rows(arch, layer, architecture, rows, mode, device, protocol, ceilings)
    if len(missing) == 3:
        raise PatternError(f"no layer of width {width} has an architecture '{arch}': {missing[0]}")


def _layer_rows(
    arch: str, name: str, architecture: Architecture, rows: int, mode: str, device: torch.device, protocol: Protocol, ceilings: Ceilings
) -> list[MultiplyRow]:
    torch.manual_seed(protocol.seed)
    with in_mode(mode) as dtype:
        # outside inference mode: a model's parameters are no inference tensors, whose packed weights could not be kept
        layer = ButterflyLinear(architecture, device=device, dtype=dtype).requires_grad_(False)
        with torch.inference_mode():
            x = torch.randn(rows, architecture.in_features, device=device, dtype=dtype)
            problem = Problem(architecture, rows, dtype, device.type, bias=True, allow_tf32=device.type == "cuda" and mode == "tf32")
            refused = {each: reason for each in BACKENDS if (reason := BACKENDS[each].can_run(problem)) is not None}
            checked = checked_rows(rows, CHECKED_ROWS)
            works = _works(architecture, x)
            found = measure(
                _candidates(layer, problem),
                x,
                _truth(layer, x[checked]),
                baseline=BASELINE,
                rows=checked,
                refused=refused,
                works={each: works[each in (BASELINE, "dense")] for each in (BASELINE, "layer", *BACKENDS)},
                ceilings=ceilings,
                protocol=protocol,
            )
    backends = {"layer": explain(problem).choice} | {each: each for each in BACKENDS}
    shape = (str(architecture), *architecture.shape, architecture.density, rows, mode, device.type)
    order = [each for each in (BASELINE, BASELINE + AGAIN, "layer", *BACKENDS) if each in found]
    return [MultiplyRow(arch, name, *shape, each, backends.get(each), found[each]) for each in order]


def _candidates(layer: ButterflyLinear, problem: Problem) -> dict[str, Callable[[Tensor], Tensor]]:
    factors = tuple(layer.factors)
    candidates: dict[str, nn.Module | Callable[[Tensor], Tensor]] = {BASELINE: dense_linear(layer), "layer": layer}
    for name, backend in BACKENDS.items():
        if backend.can_run(problem) is None:
            candidates[name] = backend.bind(factors, layer.bias)
    return candidates


def _truth(layer: ButterflyLinear, x: Tensor) -> Tensor:
    wide = [factor.double() for factor in layer.factors]
    return ks_linear(x.double(), wide, None if layer.bias is None else layer.bias.double(), backend="einsum")


def _works(architecture: Architecture, x: Tensor) -> dict[bool, Work]:
    """What the multiplication must spend, dense (True) and by factors."""
    rows, size = x.shape[0], x.element_size()
    ends = rows * (architecture.in_features + architecture.out_features) + architecture.out_features
    dense = architecture.in_features * architecture.out_features
    return {
        True: Work(size * (ends + dense), 2 * rows * dense),
        False: Work(size * (ends + architecture.num_parameters), rows * architecture.flops_per_row),
    }
