"""A layer norm and q, k and v behind it in one launch, against two launches and the dense pair: one table for one CUDA device.

``python recipes/norm_linear_table.py --out recipes/results/norm_linear_h200.csv``

Width 384, as in a ViT-S/16. Times by CUDA graphs over rotating inputs larger than the L2 cache, all candidates in one shuffled run,
after a check against float64. ``two launches`` is the norm's kernel and the fused kernel of the three linears. ``ratio_to_compiled`` is
against ``torch.compile`` of the dense pair. ``copy`` moves the same bytes. ``bound_us`` is what a large copy and a large matrix product,
measured in the same run, allow for x, y and the candidate's weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import recipe
import torch
from torch import Tensor, nn

from flysurgery.bench import MODES, Record
from flysurgery.factors import factors_to_dense
from flysurgery.ops import FusedFactors, Norm, composed, ks_linear_group, norm_linear
from flysurgery.patterns import Architecture, gonon, monarch

WIDTH = 384
LINEARS = 3
ARCHITECTURES = {"gonon": gonon(WIDTH, WIDTH), "monarch": monarch(WIDTH, WIDTH)}


@dataclass(frozen=True)
class Row:
    """One candidate of one architecture in one mode."""

    architecture: str
    mode: str
    rows: int
    candidate: str
    times: recipe.Times
    ratio_to_dense: float | None
    ratio_to_compiled: float | None
    judged: recipe.Judged


def build(architecture: Architecture, dtype: torch.dtype, device: torch.device) -> tuple[Norm, list[FusedFactors], nn.Sequential]:
    """Random weights, and the dense norm and linear that they equal."""

    def drawn(*shape: int, deviation: float, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, device=device) * deviation + mean).to(dtype)

    norm = Norm(drawn(WIDTH, deviation=0.2, mean=1.0), drawn(WIDTH, deviation=0.2), 1e-6)
    group = [
        FusedFactors(tuple(drawn(*p.factor_shape, deviation=p.c**-0.5) for p in architecture), drawn(WIDTH, deviation=0.1))
        for _ in range(LINEARS)
    ]
    dense = nn.Sequential(nn.LayerNorm(WIDTH, norm.eps), nn.Linear(WIDTH, LINEARS * WIDTH)).to(device, dtype).requires_grad_(False)
    weights = [factors_to_dense([factor.double() for factor in member.factors]).to(dtype) for member in group]
    biases = [member.bias for member in group if member.bias is not None]
    dense.load_state_dict({"0.weight": norm.weight, "0.bias": norm.bias, "1.weight": torch.cat(weights), "1.bias": torch.cat(biases)})
    return norm, group, dense


def measure(table: recipe.Table, architecture: str, mode: str, rows: int) -> list[Row]:
    """Check and time one architecture in one mode."""
    norm, group, dense = build(ARCHITECTURES[architecture], MODES[mode], table.device)
    x = torch.randn(rows, WIDTH, device=table.device, dtype=MODES[mode])

    def two_launches(x: Tensor) -> Tensor:
        normed = torch.ops.flysurgery.layer_norm(x, norm.weight, norm.bias, norm.eps)
        return ks_linear_group(normed, [member.factors for member in group], [member.bias for member in group])

    def double(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.double()

    wide = [FusedFactors(tuple(factor.double() for factor in member.factors), double(member.bias)) for member in group]
    truth = composed.norm_linear(x.double(), Norm(double(norm.weight), double(norm.bias), norm.eps), wide)
    runs = {
        "fused": table.kernel(lambda x: norm_linear(x, norm, group)),
        "two launches": table.kernel(two_launches),
        "dense": dense,
        "dense compiled": table.compiled(dense),
    }
    bytes_moved = (1 + LINEARS) * x.nbytes
    work = recipe.work_of(bytes_moved, [factor for member in group for factor in member.factors], rows)
    dense_work = recipe.work_of(bytes_moved, [dense.get_parameter("1.weight")], rows)
    works = {key: dense_work if "dense" in key else work for key in runs}
    found = table.measure(mode, runs, x, truth, works) | {"copy": table.copy(mode, bytes_moved)}
    bases = found["dense"], found["dense compiled"]
    return [Row(architecture, mode, rows, name, *recipe.cells(each, *bases)) for name, each in found.items()]


def draw(records: Sequence[Record], plot: Path) -> None:
    """Bars for each architecture, a picture for each mode."""
    recipe.draw(plot, records, group=("architecture",))


def main() -> None:
    """Measure, print and write."""
    parser = recipe.arguments(__doc__, modes="all", seconds=0.5)
    recipe.add_rows(parser, 197)
    table = recipe.table_of(parser)
    cases = [{"architecture": name, "mode": mode, "rows": table.rows(197)} for mode in table.modes for name in ARCHITECTURES]
    table.make(Row, cases, measure, draw)


if __name__ == "__main__":
    recipe.main(main)
