"""What each technique of the fused kernel is worth: taken out one at a time, all else as tuned.

``python recipes/fused_ablation.py --out recipes/results/fused_ablation_h200.csv``

For each layer and mode the configuration of the shipped or tuned table, and beside it the same with one thing changed. All of
a layer in one shuffled run by CUDA graphs over rotating inputs larger than the L2 cache, after a check against float64. A
change that the kernel does not offer there, as it would not fit or is what stands already, is left out. ``bound_us`` is what a large copy
and a large matrix product, measured in the same run, allow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import recipe
import torch
from torch import Tensor

from flysurgery.bench import Record, time_interleaved
from flysurgery.ops import ks_linear
from flysurgery.ops.cuda.cubins import find_cubin
from flysurgery.ops.cuda.fused import FusedLinear
from flysurgery.ops.cuda.fused_configs import fits
from flysurgery.ops.cuda.kernel import device_arch
from flysurgery.ops.cuda.modes import dtype_of
from flysurgery.ops.cuda.obstacles import shared_limit_of
from flysurgery.ops.cuda.product import FUSED
from flysurgery.ops.cuda.single import SingleFactor
from flysurgery.ops.cuda.table import tuned_config
from flysurgery.ops.cuda.tiling import FusedConfig, Tiling, tiling
from flysurgery.patterns import Architecture, gonon, monarch

LAYERS = {
    "square": gonon(384, 384),
    "up": gonon(1536, 384),
    "down": gonon(384, 1536),
    "monarch square": monarch(384, 384),
}


@dataclass(frozen=True)
class Row:
    """One variant of one layer in one mode."""

    layer: str
    architecture: str
    mode: str
    rows: int
    change: str
    config: str
    error: float
    median_us: float
    iqr_us: float
    ratio_to_tuned: float
    judged: recipe.Judged


def variants(tile: Tiling, tuned: FusedConfig, limit: int) -> dict[str, FusedConfig]:
    """The tuned configuration, and those with one thing changed that fit."""
    panels = sum(tile.panel_counts(tuned))
    found = {
        "mma.sync in place of wgmma": replace(tuned, wgmma=False),
        "one batch of x ahead": replace(tuned, stages=2),
        "one step a batch": replace(tuned, batch=1),
        "two slots in the ring": replace(tuned, slots=2),
        "weights resident": replace(tuned, slots=panels),
        "weights streamed through four slots": replace(tuned, slots=min(4, panels - 1)),
        "narrow panels": replace(tuned, panel_columns=8 * tuned.run),
        "all classes in a panel": replace(tuned, panel_classes=tile.second.d),
        "one class a panel": replace(tuned, panel_classes=1),
        "vectors of 8 bytes": replace(tuned, run=tile.runs[-1]),
        "intermediate in registers": replace(tuned, u_shared=0),
        "intermediate in shared memory": replace(tuned, u_shared=1),
        "two warpgroups": replace(tuned, warps=8),
        "one warpgroup": replace(tuned, warps=4),
    }
    return {"tuned": tuned} | {key: config for key, config in found.items() if config != tuned and fits(tile, config, limit, wgmma=True)}


def prepare(job: tuple[Tiling, FusedConfig, str]) -> None:
    """Compile into the cache, in a process of its own."""
    tile, config, arch = job
    find_cubin("fused_linear.cu", {**tile.defines(config), "ACTIVATION": 0, "RESIDUAL": 0, "SCALED": 0}, arch=arch, name="fused_linear")


def two_launches(architecture: Architecture, mode: str, factors: list[Tensor], bias: Tensor) -> Callable[[Tensor], Tensor]:
    """The same product without fusion."""
    kernels = [SingleFactor(pattern, mode, shared_limit=shared_limit_of(0)) for pattern in architecture]
    images = [kernel.pack(factor) for kernel, factor in zip(kernels, factors, strict=True)]
    return lambda x: kernels[0].run(kernels[1].run(x, images[1]), images[0], bias)


def measure(name: str, mode: str, rows: int, found: dict[str, FusedConfig]) -> list[Row]:
    """Check and time all variants of a layer."""
    architecture, dtype = LAYERS[name], dtype_of(mode)
    torch.manual_seed(0)
    factors = [torch.randn(p.factor_shape, device="cuda").div(p.c**0.5).to(dtype) for p in architecture]
    bias = torch.randn(architecture.out_features, device="cuda").to(dtype)
    x = torch.randn(rows, architecture.in_features, device="cuda").to(dtype)
    truth = ks_linear(x.double(), [factor.double() for factor in factors], bias.double())
    runs: dict[str, Callable[[Tensor], Tensor]] = {}
    for change, config in found.items():
        layer = FusedLinear(architecture, mode, config=config, device_index=0)
        image = layer.pack([(factors[0], factors[1])])
        runs[change] = lambda x, layer=layer, image=image: layer.run(x, image, bias)
    runs["two launches"] = two_launches(architecture, mode, factors, bias)
    if mode == "fp32":
        runs["two launches, FFMA in place of pairs"] = two_launches(architecture, "exact", factors, bias)
    runs["tuned again"] = runs["tuned"]
    errors = {change: float((run(x).double() - truth).norm() / truth.norm()) for change, run in runs.items()}
    wrong = [change for change, error in errors.items() if not error < 4 * errors["tuned"]]
    if wrong:
        raise SystemExit(f"{name}, {mode}, {wrong[0]}: relative error {errors[wrong[0]]:.2g}, tuned {errors['tuned']:.2g}")
    timings = time_interleaved(runs, x, rounds=15)
    fixed = (name, str(architecture), mode, rows)
    work = recipe.work_of(x.nbytes + truth.numel() * x.element_size(), factors, rows)
    judged = recipe.judge(mode, timings, dict.fromkeys(runs, work), "tuned")
    result: list[Row] = []
    for change, t in timings.items():
        times = 1e3 * t.median_ms, 1e3 * t.iqr_ms, t.median_ms / timings["tuned"].median_ms
        result.append(Row(*fixed, change, str(found.get(change, "")), errors[change], *times, judged[change]))
    return result


def draw(records: Sequence[Record], plot: Path) -> None:
    """Bars for each layer, a picture for each mode."""
    recipe.draw(plot, records, group=("layer",), ratio="ratio_to_tuned", series="change")


def main() -> None:
    """Compile, measure, print and write."""
    options = recipe.on_cuda(recipe.table_arguments(__doc__, rows=25088, modes=("fp16", "fp32")))
    if device_arch(0) != "sm_90a":
        raise SystemExit("this table takes the kernel of sm_90a apart, and there is no such device")
    torch.backends.cuda.matmul.allow_tf32 = False
    limit, cells = shared_limit_of(0), {}
    for name, architecture in LAYERS.items():
        for mode in options.modes:
            tile = tiling(architecture, mode)
            fields = tuned_config(FUSED, architecture, mode, 1, 0, options.rows)
            if isinstance(tile, Tiling) and fields is not None:
                cells[name, mode] = tile, variants(tile, FusedConfig(**fields), limit)
    jobs = [(tile, config, device_arch(0)) for tile, found in cells.values() for config in found.values()]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        list(pool.map(prepare, jobs))
    rows: list[Row] = []
    for (name, mode), (_, found) in cells.items():
        measured = measure(name, mode, options.rows, found)
        rows += measured
        for row in measured:
            print(
                f"{name:15s} {mode} {row.change:40s} {row.median_us:7.1f} us, {row.ratio_to_tuned:.2f} times tuned, error {row.error:.1e}",
                flush=True,
            )
        recipe.keep(options, rows)
    if options.plot is not None:
        draw(recipe.records_of(rows), options.plot)


if __name__ == "__main__":
    recipe.main(main)
