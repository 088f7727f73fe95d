"""Times of a butterfly layer and its rivals, all in one run and in one precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flysurgery.bench.ceilings import Ceilings, Work
from flysurgery.bench.measuring import AGAIN, Measured, Protocol, checked_rows, measure
from flysurgery.bench.modes import in_mode
from flysurgery.bench.rivals import DENSITIES, Rival, rivals
from flysurgery.patterns import named

CHECKED_ROWS = 256


@dataclass(frozen=True)
class RivalRow:
    """One way to make a layer cheaper. ``density`` is the share of the dense weights that it keeps."""

    layer: str
    arch: str
    out_features: int
    in_features: int
    rows: int
    mode: str
    device_type: str
    candidate: str
    density: float
    note: str
    measured: Measured


def bench_rivals(
    arch: str,
    layer: str,
    out_features: int,
    in_features: int,
    rows: int,
    mode: str,
    device: torch.device,
    ceilings: Ceilings,
    protocol: Protocol,
    *,
    densities: tuple[float, ...] = DENSITIES,
) -> list[RivalRow]:
    """Measure one layer with bias: dense, the butterfly of the family ``arch``, and what else there is."""
    torch.manual_seed(protocol.seed)
    with in_mode(mode) as dtype, torch.no_grad():
        found = {_name(each): each for each in rivals(named(arch, out_features, in_features), device, dtype, densities=densities)}
        x = torch.randn(rows, in_features, device=device, dtype=dtype)
        checked = checked_rows(rows, CHECKED_ROWS)
        wide = x[checked].double()
        measured = measure(
            {name: each.run for name, each in found.items() if each.run is not None},
            x,
            {name: each.exact(wide) for name, each in found.items() if each.exact is not None},
            rows=checked,
            refused={name: each.reason for name, each in found.items() if each.run is None},
            allowed={name: each.allowed for name, each in found.items()},
            works={name: _work(each, out_features, in_features, rows, x.element_size()) for name, each in found.items()},
            ceilings=ceilings,
            protocol=protocol,
        )
    head = (layer, arch, out_features, in_features, rows, mode, device.type)
    result = []
    for name, each in found.items():
        result.append(RivalRow(*head, each.name, each.density, each.note, measured[name]))
        if name + AGAIN in measured:
            result.append(RivalRow(*head, each.name + AGAIN, each.density, each.note, measured[name + AGAIN]))
    return result


def _name(rival: Rival) -> str:
    return "dense" if rival.name == "dense" else f"{rival.name} {rival.density:.4f}"


def _work(rival: Rival, out_features: int, in_features: int, rows: int, size: int) -> Work:
    weights = round(rival.density * out_features * in_features)
    return Work(size * (rows * (out_features + in_features) + weights + out_features), 2 * rows * weights)
