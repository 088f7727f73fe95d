"""What each technique of the fused kernel is worth: taken out one at a time, all else as tuned.

``python recipes/fused_ablation.py --out recipes/results/fused_ablation_h200.csv``

For each layer and mode the configuration of the shipped or tuned table, and beside it the same with one thing changed. All of
a layer in one shuffled run by CUDA graphs over rotating inputs larger than the L2 cache, after a check against float64. A
change that the kernel does not offer there, as it would not fit or is what stands already, is left out. ``einsum`` is the definition,
computed by PyTorch. ``bound_us`` is what a large copy and a large matrix product, measured in the same run, allow.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import recipe
import torch
from torch import Tensor

from flysurgery.bench import MODES, Record
from flysurgery.ops import ks_linear
from flysurgery.ops.cuda.cubins import find_cubin
from flysurgery.ops.cuda.fused import FusedLinear
from flysurgery.ops.cuda.fused_configs import configs, fits
from flysurgery.ops.cuda.kernel import device_arch
from flysurgery.ops.cuda.obstacles import shared_limit_of
from flysurgery.ops.cuda.product import FUSED
from flysurgery.ops.cuda.single import SingleFactor
from flysurgery.ops.cuda.table import tuned_config
from flysurgery.ops.cuda.tiling import FusedConfig, Tiling, tiling
from flysurgery.patterns import Architecture, gonon, monarch

TOKENS = 196
SHARED_LIMIT = 227 * 1024
"""Shared memory of a block on compute capability 9.0."""

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
    times: recipe.Times
    ratio_to_tuned: float | None
    judged: recipe.Judged


def variants(tile: Tiling, tuned: FusedConfig, limit: int, *, wgmma: bool) -> dict[str, FusedConfig]:
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
    return {"tuned": tuned} | {key: config for key, config in found.items() if config != tuned and fits(tile, config, limit, wgmma=wgmma)}


def changes(layer: str, mode: str, rows: int) -> dict[str, tuple[Tiling, FusedConfig]]:
    """The variants of a layer on this device, or of compute capability 9.0 where there is none; empty where the kernel cannot run."""
    architecture, cuda = LAYERS[layer], torch.cuda.is_available()
    tile, limit = tiling(architecture, mode), shared_limit_of(0) if cuda else SHARED_LIMIT
    if not isinstance(tile, Tiling):
        return {}
    wgmma = not cuda or device_arch(0) == "sm_90a"
    fields = tuned_config(FUSED, architecture, mode, 1, 0, rows) if cuda else None
    tuned = configs(tile, limit, wgmma=wgmma)[0] if fields is None else FusedConfig(**fields)
    return {change: (tile, config) for change, config in variants(tile, tuned, limit, wgmma=wgmma).items()}


def prepare(job: tuple[Tiling, FusedConfig, str]) -> None:
    """Compile into the cache, in a process of its own."""
    tile, config, arch = job
    find_cubin("fused_linear.cu", {**tile.defines(config), "ACTIVATION": 0, "RESIDUAL": 0, "SCALED": 0}, arch=arch, name="fused_linear")


def two_launches(architecture: Architecture, mode: str, factors: list[Tensor], bias: Tensor) -> recipe.Run:
    """The same product without fusion."""
    kernels = [SingleFactor(pattern, mode, shared_limit=shared_limit_of(0)) for pattern in architecture]
    images = [kernel.pack(factor) for kernel, factor in zip(kernels, factors, strict=True)]
    return lambda x: kernels[0].run(kernels[1].run(x, images[1]), images[0], bias)


def compile_ahead(cases: Sequence[Mapping[str, Any]]) -> None:
    """Compile the kernels of the cases side by side."""
    jobs = [(*variant, device_arch(0)) for case in cases for variant in changes(**case).values()]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        list(pool.map(prepare, jobs))


def measure(table: recipe.Table, layer: str, mode: str, rows: int) -> list[Row]:
    """Check and time all variants of a layer."""
    architecture, dtype = LAYERS[layer], MODES[mode]
    factors = [torch.randn(p.factor_shape, device=table.device).div(p.c**0.5).to(dtype) for p in architecture]
    bias = torch.randn(architecture.out_features, device=table.device).to(dtype)
    x = torch.randn(rows, architecture.in_features, device=table.device).to(dtype)
    truth = ks_linear(x.double(), [factor.double() for factor in factors], bias.double())
    found = changes(layer, mode, rows)
    runs: dict[str, recipe.Run | str] = dict.fromkeys(("tuned", *found, "two launches"), recipe.NEEDS_CUDA)
    if table.on_cuda:
        runs["tuned"] = f"no: {tiling(architecture, mode)}"
        for change, (_, config) in found.items():
            kernel = FusedLinear(architecture, mode, config=config, device_index=0)
            image = kernel.pack([(factors[0], factors[1])])
            runs[change] = lambda x, kernel=kernel, image=image: kernel.run(x, image, bias)
        runs["two launches"] = two_launches(architecture, mode, factors, bias)
        if mode == "fp32":
            runs["two launches, FFMA in place of pairs"] = two_launches(architecture, "exact", factors, bias)
    runs["einsum"] = lambda x: ks_linear(x, factors, bias, backend="einsum")
    work = recipe.work_of(x.nbytes + truth.numel() * x.element_size(), factors, rows)
    measured = table.measure(mode, runs, x, truth, work, baseline="tuned" if table.on_cuda else "einsum", worst=4)
    head = layer, str(architecture), mode, rows
    return [
        Row(*head, change, str(found[change][1]) if change in found else "", *recipe.cells(each, measured["tuned"]))
        for change, each in measured.items()
    ]


def draw(records: Sequence[Record], plot: Path) -> None:
    """Bars for each layer, a picture for each mode."""
    recipe.draw(plot, records, group=("layer",), ratio="ratio_to_tuned", series="change")


def main() -> None:
    """Compile, measure, print and write."""
    parser = recipe.arguments(__doc__, modes="fp16,fp32", seconds=0.5)
    recipe.add_rows(parser, TOKENS)
    table = recipe.table_of(parser)
    cases = [{"layer": layer, "mode": mode, "rows": table.rows(TOKENS)} for layer in table.few(LAYERS) for mode in table.modes]
    table.make(Row, cases, measure, draw, compile_ahead)


if __name__ == "__main__":
    recipe.main(main)
