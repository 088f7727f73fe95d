"""A layer norm and q, k and v behind it in one launch, against two launches and the dense pair: one table for one CUDA device.

``python recipes/norm_linear_table.py --out recipes/results/norm_linear_h200.csv``

Width 384, as in a ViT-S/16. Times by CUDA graphs over rotating inputs larger than the L2 cache, all candidates in one shuffled run,
after a check against float64. ``two launches`` is the norm's kernel and the fused kernel of the three linears. ``ratio_to_compiled`` is
against ``torch.compile`` of the dense pair. ``copy`` moves the same bytes. ``bound_us`` is what a large copy and a large matrix product,
measured in the same run, allow for x, y and the candidate's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import recipe
import torch
from torch import Tensor, nn

from flysurgery.bench import MODES, Record, in_mode, time_interleaved
from flysurgery.factors import factors_to_dense
from flysurgery.ops import FusedFactors, Norm, composed, ks_linear_group, norm_linear
from flysurgery.patterns import Architecture, gonon, monarch

WIDTH = 384
LINEARS = 3
ARCHITECTURES = {"gonon": gonon(WIDTH, WIDTH), "monarch": monarch(WIDTH, WIDTH)}


@dataclass(frozen=True)
class Row:
    """One candidate. ``error`` is relative to float64, in the Frobenius norm."""

    architecture: str
    mode: str
    rows: int
    candidate: str
    error: float
    median_us: float
    iqr_us: float
    ratio_to_dense: float
    ratio_to_compiled: float
    judged: recipe.Judged


def build(architecture: Architecture, dtype: torch.dtype) -> tuple[Norm, list[FusedFactors], nn.Sequential]:
    """Random weights, and the dense norm and linear that they equal."""

    def drawn(*shape: int, deviation: float, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, device="cuda") * deviation + mean).to(dtype)

    norm = Norm(drawn(WIDTH, deviation=0.2, mean=1.0), drawn(WIDTH, deviation=0.2), 1e-6)
    group = [
        FusedFactors(tuple(drawn(*p.factor_shape, deviation=p.c**-0.5) for p in architecture), drawn(WIDTH, deviation=0.1))
        for _ in range(LINEARS)
    ]
    dense = nn.Sequential(nn.LayerNorm(WIDTH, norm.eps), nn.Linear(WIDTH, LINEARS * WIDTH)).to("cuda", dtype).requires_grad_(False)
    weights = [factors_to_dense([factor.double() for factor in member.factors]).to(dtype) for member in group]
    biases = [member.bias for member in group if member.bias is not None]
    dense.load_state_dict({"0.weight": norm.weight, "0.bias": norm.bias, "1.weight": torch.cat(weights), "1.bias": torch.cat(biases)})
    return norm, group, dense


def measure(name: str, mode: str, rows: int) -> list[Row]:
    """Check and time one architecture in one mode."""
    torch.manual_seed(0)
    norm, group, dense = build(ARCHITECTURES[name], MODES[mode])
    x = torch.randn(rows, WIDTH, device="cuda", dtype=MODES[mode])
    torch.compiler.reset()
    compiled = torch.compile(dense)

    def two_launches(x: Tensor) -> Tensor:
        normed = torch.ops.flysurgery.layer_norm(x, norm.weight, norm.bias, norm.eps)
        return ks_linear_group(normed, [member.factors for member in group], [member.bias for member in group])

    def double(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.double()

    wide = [FusedFactors(tuple(factor.double() for factor in member.factors), double(member.bias)) for member in group]
    with torch.inference_mode():
        truth = composed.norm_linear(x.double(), Norm(double(norm.weight), double(norm.bias), norm.eps), wide)
        runs: dict[str, Callable[[Tensor], Tensor]] = {
            "fused": lambda x: norm_linear(x, norm, group),
            "two launches": two_launches,
            "dense": dense,
            "dense again": dense,
            "dense compiled": compiled,
        }
        errors = {key: float((run(x) - truth).norm() / truth.norm()) for key, run in runs.items()}
        if not errors["fused"] < 2 * errors["two launches"]:
            raise SystemExit(f"{name} {mode}: the fused kernel is wrong, relative error {errors['fused']:.2g}")
        timings = time_interleaved(runs, x, rounds=15)
        middle = torch.empty((x.nbytes + LINEARS * x.nbytes) // 2, dtype=torch.uint8, device="cuda")
        errors["copy"], timings["copy"] = 0.0, time_interleaved({"copy": torch.clone}, middle, rounds=15)["copy"]
    base, rival = timings["dense"].median_ms, timings["dense compiled"].median_ms
    matrix = dense.get_parameter("1.weight")
    factors = [factor for member in group for factor in member.factors]
    weights = {"fused": factors, "two launches": factors, "copy": []}
    works = {key: recipe.work_of((1 + LINEARS) * x.nbytes, weights.get(key, [matrix]), rows) for key in timings}
    judged = recipe.judge(mode, timings, works)
    found: list[Row] = []
    for key, t in timings.items():
        times = 1e3 * t.median_ms, 1e3 * t.iqr_ms, t.median_ms / base, t.median_ms / rival
        found.append(Row(name, mode, rows, key, errors[key], *times, judged[key]))
    return found


def draw(records: Sequence[Record], plot: Path) -> None:
    """Bars for each architecture, a picture for each mode."""
    recipe.draw(plot, records, group=("architecture",))


def main() -> None:
    """Measure, print and write."""
    options = recipe.on_cuda(recipe.table_arguments(__doc__, rows=25216, modes=tuple(MODES)))
    found: list[Row] = []
    for mode in options.modes:
        for name in ARCHITECTURES:
            with in_mode(mode):
                rows = measure(name, mode, options.rows)
            found += rows
            times = ", ".join(f"{row.candidate} {row.median_us:.1f}" for row in rows)
            print(f"{mode} {name}: {times} us; fused / compiled dense {rows[0].ratio_to_compiled:.3f}", flush=True)
            recipe.keep(options, found)
    if options.plot is not None:
        draw(recipe.records_of(found), options.plot)


if __name__ == "__main__":
    recipe.main(main)
