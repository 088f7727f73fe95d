"""The layers of a ViT-S/16 block as single launches, against dense: one table for one CUDA device.

``python recipes/fused_linear_table.py --out recipes/results/fused_linear_h200.csv``

Times by CUDA graphs over rotating inputs larger than the L2 cache, all candidates of a layer in one shuffled run, after
a check against float64. ``layer`` is a ButterflyLinear (for q, k and v a SplitLinear) as it stands in a model, with
the backend that it chooses by itself. ``copy`` moves the same bytes as the layer. ``bound_us`` is what a large copy
and a large matrix product, measured in the same run, allow for x, y and the candidate's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import recipe
import torch
from torch import Tensor, nn

from flysurgery.bench import MODES, Record, Timing, Work, in_mode, time_interleaved
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
    """One candidate of one layer in one mode. ``error`` is relative to float64, in the Frobenius norm."""

    layer: str
    architecture: str
    linears: int
    mode: str
    rows: int
    candidate: str
    backend: str | None
    error: float
    median_us: float
    iqr_us: float
    ratio_to_dense: float
    judged: recipe.Judged


def build(architecture: Architecture, linears: int, dtype: torch.dtype) -> tuple[nn.Module, nn.Linear]:
    """A layer with random weights, and the dense one that it equals."""
    parts = [ButterflyLinear(architecture, device="cuda", dtype=dtype) for _ in range(linears)]
    # Weights that do not train, made outside inference mode, are packed once; others at each call, so that changes are seen.
    for part in parts:
        part.requires_grad_(False)
    layer = parts[0] if linears == 1 else SplitLinear(dict(zip("qkv", parts, strict=False)))
    dense = nn.Linear(architecture.in_features, linears * architecture.out_features, device="cuda", dtype=dtype)
    weights = [factors_to_dense([factor.double() for factor in part.factors]) for part in parts]
    dense.load_state_dict({"weight": torch.cat(weights).to(dtype), "bias": torch.cat([p.bias for p in parts if p.bias is not None])})
    return layer, dense


def candidates(layer: nn.Module, dense: nn.Linear) -> dict[str, Callable[[Tensor], Tensor]]:
    """What is timed, by name. Rivals multiply the linears one after the other, with their weights prepared."""
    parts = [part for part in layer.modules() if isinstance(part, ButterflyLinear)]
    found: dict[str, Callable[[Tensor], Tensor]] = {"dense": dense, "dense again": dense, "layer": layer}
    for name in RIVALS:
        bound = [BACKENDS[name].bind(tuple(part.factors), part.bias) for part in parts]
        found[name] = lambda x, bound=bound: bound[0](x) if len(bound) == 1 else torch.cat([run(x) for run in bound], dim=-1)
    return found


def measure(name: str, mode: str, rows: int) -> Iterator[Row]:
    """Check and time one layer in one mode."""
    architecture, linears = LAYERS[name]
    dtype = MODES[mode]
    torch.manual_seed(0)
    layer, dense = build(architecture, linears, dtype)
    with torch.inference_mode():
        x = torch.randn(rows, architecture.in_features, device="cuda", dtype=dtype)
        parts = [part for part in layer.modules() if isinstance(part, ButterflyLinear)]
        truth = torch.cat(
            [ks_linear(x.double(), [f.double() for f in p.factors], None if p.bias is None else p.bias.double()) for p in parts], dim=-1
        )
        runs = candidates(layer, dense)
        errors = {key: float((run(x).double() - truth).norm() / truth.norm()) for key, run in runs.items()}
        wrong = [key for key, error in errors.items() if not error < 16 * errors["dense"]]
        if wrong:
            raise SystemExit(f"{name}, {mode}: {wrong[0]} is wrong, relative error {errors[wrong[0]]:.2g}")
        timings = time_interleaved(runs, x, rounds=25)
        bytes_moved = (x.numel() + truth.numel()) * x.element_size()
        middle = torch.empty(bytes_moved // 2, dtype=torch.uint8, device="cuda")
        errors["copy"], timings["copy"] = 0.0, time_interleaved({"copy": torch.clone}, middle, rounds=25)["copy"]
    work = recipe.work_of(bytes_moved, [factor for part in parts for factor in part.factors], rows)
    dense_work = recipe.work_of(bytes_moved, [dense.weight], rows)
    works = dict.fromkeys(runs, work) | {"dense": dense_work, "dense again": dense_work, "copy": Work(bytes_moved, 0)}
    judged = recipe.judge(mode, timings, works)
    choice = explain(Problem(architecture, rows, dtype, "cuda", bias=True, allow_tf32=mode == "tf32")).choice
    for key, timing in timings.items():
        yield _row(name, mode, rows, key, choice if key == "layer" else None, errors[key], timing, timings["dense"], judged[key])


def _row(
    name: str, mode: str, rows: int, key: str, backend: str | None, error: float, timing: Timing, dense: Timing, judged: recipe.Judged
) -> Row:
    architecture, linears = LAYERS[name]
    times = 1e3 * timing.median_ms, 1e3 * timing.iqr_ms, timing.median_ms / dense.median_ms
    return Row(name, str(architecture), linears, mode, rows, key, backend, error, *times, judged)


def draw(records: Sequence[Record], plot: Path) -> None:
    """Bars for each layer, a picture for each mode."""
    recipe.draw(plot, records, group=("layer",))


def main() -> None:
    """Measure, print and write."""
    options = recipe.on_cuda(recipe.table_arguments(__doc__, rows=25088, modes=tuple(MODES)))
    found: list[Row] = []
    for mode in options.modes:
        for name in LAYERS:
            with in_mode(mode):
                rows = list(measure(name, mode, options.rows))
            found += rows
            by_name = {row.candidate: row for row in rows}
            own, dense = by_name["layer"], by_name["dense"]
            rivals = ", ".join(f"{key} {by_name[key].median_us:.1f}" for key in (*RIVALS, "copy"))
            print(
                f"{mode} {name:15s} {own.backend} {own.median_us:6.1f} us, dense {dense.median_us:6.1f}, ratio {own.ratio_to_dense:.3f}, "
                f"bound {own.judged.bound_us:.1f} ({own.judged.share_of_bound:.0%}), "
                f"error {own.error:.1e} (dense {dense.error:.1e}); {rivals}",
                flush=True,
            )
            recipe.keep(options, found)
    if options.plot is not None:
        draw(recipe.records_of(found), options.plot)


if __name__ == "__main__":
    recipe.main(main)
