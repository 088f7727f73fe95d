"""The layers of a ViT-S/16 block as single launches, against dense: one table for one CUDA device.

``python recipes/fused_linear_table.py --out recipes/results/fused_linear_h200.csv``

Times by CUDA graphs over rotating inputs larger than the L2 cache, all candidates of a layer in one shuffled run, after
a check against float64. ``layer`` is a ButterflyLinear (for q, k and v a SplitLinear) as it stands in a model, with
the backend that it chooses by itself. ``copy`` moves the same bytes as the layer. ``bound_us`` is what a large copy
and a large matrix product, measured in the same run, allow for x, y and the candidate's weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import recipe
import torch
from torch import nn

from flysurgery.bench import MODES, Record
from flysurgery.factors import factors_to_dense
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.ops import BACKENDS, Problem, explain, ks_linear
from flysurgery.patterns import Architecture, gonon, monarch

LAYERS: dict[str, tuple[Architecture, int]] = {
    "square": (gonon(384, 384), 1),
    "qkv": (gonon(384, 384), 3),
    "up": (gonon(1536, 384), 1),
    "down": (gonon(384, 1536), 1),
    "monarch square": (monarch(384, 384), 1),
    "monarch up": (monarch(1536, 384), 1),
    "monarch down": (monarch(384, 1536), 1),
}
RIVALS = ("bmm", "einsum")


@dataclass(frozen=True)
class Row:
    """One candidate of one layer in one mode."""

    layer: str
    architecture: str
    linears: int
    mode: str
    rows: int
    candidate: str
    backend: str | None
    times: recipe.Times
    ratio_to_dense: float | None
    judged: recipe.Judged


def build(architecture: Architecture, linears: int, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, nn.Linear]:
    """A layer with random weights, and the dense one that it equals."""
    parts = [ButterflyLinear(architecture, device=device, dtype=dtype) for _ in range(linears)]
    # Weights that do not train, made outside inference mode, are packed once; others at each call, so that changes are seen.
    for part in parts:
        part.requires_grad_(False)
    layer = parts[0] if linears == 1 else SplitLinear(dict(zip("qkv", parts, strict=False)))
    dense = nn.Linear(architecture.in_features, linears * architecture.out_features, device=device, dtype=dtype)
    weights = [factors_to_dense([factor.double() for factor in part.factors]) for part in parts]
    dense.load_state_dict({"weight": torch.cat(weights).to(dtype), "bias": torch.cat([p.bias for p in parts if p.bias is not None])})
    return layer, dense


def candidates(layer: nn.Module, dense: nn.Linear) -> dict[str, recipe.Run]:
    """What is timed, by name. Rivals multiply the linears one after the other, with their weights prepared."""
    parts = [part for part in layer.modules() if isinstance(part, ButterflyLinear)]
    found: dict[str, recipe.Run] = {"dense": dense, "layer": layer}
    for name in RIVALS:
        bound = [BACKENDS[name].bind(tuple(part.factors), part.bias) for part in parts]
        found[name] = lambda x, bound=bound: bound[0](x) if len(bound) == 1 else torch.cat([run(x) for run in bound], dim=-1)
    return found


def measure(table: recipe.Table, mode: str, layer: str, rows: int) -> list[Row]:
    """Check and time one layer in one mode."""
    architecture, linears = LAYERS[layer]
    dtype = MODES[mode]
    converted, dense = build(architecture, linears, dtype, table.device)
    x = torch.randn(rows, architecture.in_features, device=table.device, dtype=dtype)
    parts = [part for part in converted.modules() if isinstance(part, ButterflyLinear)]
    with torch.no_grad():
        truths = [ks_linear(x.double(), [f.double() for f in p.factors], None if p.bias is None else p.bias.double()) for p in parts]
    bytes_moved = (x.numel() + linears * rows * architecture.out_features) * x.element_size()
    runs = candidates(converted, dense)
    works = dict.fromkeys(runs, recipe.work_of(bytes_moved, [factor for part in parts for factor in part.factors], rows))
    works["dense"] = recipe.work_of(bytes_moved, [dense.weight], rows)
    found = table.measure(mode, runs, x, torch.cat(truths, dim=-1), works, worst=16) | {"copy": table.copy(mode, bytes_moved)}
    choice = explain(Problem(architecture, rows, dtype, table.device.type, bias=True, allow_tf32=mode == "tf32")).choice
    head = layer, str(architecture), linears, mode, rows
    return [Row(*head, name, choice if name == "layer" else None, *recipe.cells(each, found["dense"])) for name, each in found.items()]


def draw(records: Sequence[Record], plot: Path) -> None:
    """Bars for each layer, a picture for each mode."""
    recipe.draw(plot, records, group=("layer",))


def main() -> None:
    """Measure, print and write."""
    parser = recipe.arguments(__doc__, modes="all", seconds=0.5)
    recipe.add_rows(parser, 196)
    table = recipe.table_of(parser)
    cases = [{"mode": mode, "layer": layer, "rows": table.rows(196)} for mode in table.modes for layer in table.few(LAYERS)]
    table.make(Row, cases, measure, draw)


if __name__ == "__main__":
    recipe.main(main)
