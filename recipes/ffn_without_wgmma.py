"""Whole feed-forward blocks by mma.sync, as on devices without wgmma, in one launch and in two: one table for one CUDA device.

``python recipes/ffn_without_wgmma.py --out recipes/results/ffn_without_wgmma_h200.csv``

Norm, two butterfly layers, activation and residual. The two launches are the fused linear kernel's: the norm with the first layer and the
activation, the second layer with the residual; each the fastest of some configurations without wgmma. ``shared_kb`` is what a block may
use of shared memory: as on compute capability 9.0 and 10.0, on 8.0, and on 8.9 and 12.0, where the device at hand has as much; the
arithmetic is its own.
Times by CUDA graphs over rotating inputs larger than the L2 cache, all candidates of a block in one shuffled run, after a check against
float64. ``bound_us`` is what a large copy and a large matrix product, measured in the same run, allow for x, y and the candidate's weights.
In the most shared memory also with narrower pieces of hidden units than the kernel takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import recipe
import torch
from fused_ffn_table import ARCHITECTURES, DenseBlock, make_block, truth_of
from torch import Tensor

from flysurgery.bench import MODES, Record, time_interleaved
from flysurgery.ops import FusedFactors, Norm
from flysurgery.ops.cuda.cubins import find_cubin
from flysurgery.ops.cuda.ffn import FusedFfn
from flysurgery.ops.cuda.ffn_image import pack_ffn
from flysurgery.ops.cuda.ffn_tiling import ACTIVATIONS
from flysurgery.ops.cuda.ffn_warp_tiling import WarpFfnTiling, warp_ffn_tiling
from flysurgery.ops.cuda.fused import FusedLinear
from flysurgery.ops.cuda.fused_configs import configs
from flysurgery.ops.cuda.kernel import device_arch
from flysurgery.ops.cuda.norm_linear import fold, with_sums
from flysurgery.ops.cuda.obstacles import shared_limit_of
from flysurgery.ops.cuda.tiling import FusedConfig, Tiling, tiling
from flysurgery.patterns import Architecture

WIDTHS, TOKENS, SHARED_KB = (384, 192), 197, (227, 163, 99)
TRIED = 3
FIRST, SECOND = {"ACTIVATION": 1, "SCALED": 0, "RESIDUAL": 0}, {"ACTIVATION": 0, "SCALED": 0, "RESIDUAL": 1}
Layer = Callable[[Tensor, Tensor], Tensor]  # of its input and the residual


@dataclass(frozen=True)
class Row:
    """One candidate of one block in fp16."""

    width: int
    architecture: str
    rows: int
    shared_kb: int
    candidate: str
    times: recipe.Times
    ratio_to_dense: float | None
    judged: recipe.Judged


@dataclass(frozen=True)
class Block:
    """The layers of one width, and what a multiprocessor has room for."""

    name: str
    width: int
    shared_kb: int

    @property
    def layers(self) -> tuple[Architecture, Architecture]:
        build = ARCHITECTURES[self.name]
        return build(4 * self.width, self.width), build(self.width, 4 * self.width)

    @property
    def tile(self) -> WarpFfnTiling | None:
        """How one launch tiles the block; None where it does not fit."""
        tile = warp_ffn_tiling(*self.layers, self.shared_kb * 1024, scaled=False)
        return tile if isinstance(tile, WarpFfnTiling) else None

    def tiles(self) -> dict[str, WarpFfnTiling]:
        """The tile that is chosen, and ones with narrower pieces."""
        tile = self.tile
        if tile is None:
            return {}
        units = range(16, tile.hidden, 16) if self.shared_kb == max(SHARED_KB) else ()
        narrower = {f"one launch, pieces of {n}": replace(tile, hidden=n) for n in units if tile.hidden * tile.pieces % n == 0}
        return {"one launch": tile, **narrower}

    def linear(self, nth: int) -> tuple[Tiling, list[FusedConfig]]:
        """The tiling of a layer and the configurations to try."""
        tile = tiling(self.layers[nth], "fp16", norm=nth == 0)
        assert isinstance(tile, Tiling), tile
        return tile, configs(tile, self.shared_kb * 1024, wgmma=False)[:TRIED]

    def jobs(self) -> Iterable[tuple[str, dict[str, int | str]]]:
        """The kernels to compile."""
        for tile in self.tiles().values():
            yield "ffn_warps", {**tile.defines(), "MODE": 0, "ACTIVATION": ACTIVATIONS["gelu"], "NORM": 1, "RESIDUAL": 1}
        for nth, epilogue in enumerate((FIRST, SECOND)):
            linear, found = self.linear(nth)
            for config in found:
                yield "fused_linear", {**linear.of(config).defines(config), **epilogue}


def blocks(name: str, width: int) -> list[Block]:
    """One for each of ``SHARED_KB`` that the device at hand has; all without a device."""
    return [Block(name, width, size) for size in SHARED_KB if not torch.cuda.is_available() or size * 1024 <= shared_limit_of(0)]


def prepare(job: tuple[str, dict[str, int | str], str]) -> None:
    """Compile into the cache, in a process of its own."""
    name, defines, arch = job
    find_cubin(f"{name}.cu", defines, arch=arch, name=name)


def one_launch(tile: WarpFfnTiling, norm: Norm, up: FusedFactors, down: FusedFactors) -> recipe.Run:
    kernel = FusedFfn(tile, "fp16", "gelu", norm=True, residual=True, device_index=0)
    factors = (up.factors[1], up.factors[0], down.factors[1], down.factors[0])
    image = pack_ffn(tile, factors, (up.bias, down.bias), (norm.weight, norm.bias), None, torch.float16)
    return lambda x: kernel.run(x, image, norm.eps)


def two_launches(block: Block, norm: Norm, up: FusedFactors, down: FusedFactors, x: Tensor) -> recipe.Run:
    """Both layers, each in its fastest configuration."""
    assert up.bias is not None
    pairs, offset = fold([(up.factors[0], up.factors[1])], [up.bias], norm.weight, norm.bias)
    bias = with_sums(offset, pairs, torch.float16)
    layers: list[Layer] = []
    for nth, weights in enumerate((pairs, [(down.factors[0], down.factors[1])])):
        found: dict[str, Layer] = {}
        for config in block.linear(nth)[1]:
            kernel = FusedLinear(block.layers[nth], "fp16", config=config, norm=nth == 0, device_index=0)
            image = kernel.pack(weights)
            found[str(config)] = (
                (lambda x, residual, kernel=kernel, image=image: kernel.run(x, image, bias, None, "gelu", norm.eps))
                if nth == 0
                else (lambda x, residual, kernel=kernel, image=image: kernel.run(x, image, down.bias, residual))
            )
        entering = layers[0](x, x) if nth else x
        runs: dict[str, recipe.Run] = {key: lambda entering, layer=layer: layer(entering, x) for key, layer in found.items()}
        timings = time_interleaved(runs, entering, rounds=5, seconds=0.1)
        layers.append(found[min(timings, key=lambda key: timings[key].median_ms)])
    return lambda x: layers[1](layers[0](x, x), x)


def compile_ahead(cases: Sequence[Mapping[str, Any]]) -> None:
    """Compile the kernels of the cases side by side."""
    found = [block for case in cases for block in blocks(case["architecture"], case["width"])]
    jobs = [(*job, device_arch(0)) for block in found for job in block.jobs()]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        list(pool.map(prepare, jobs))


def measure(table: recipe.Table, width: int, architecture: str, rows: int) -> list[Row]:
    """Check and time one block, dense among the candidates."""
    (mode,) = table.modes
    norm, up, down = make_block(architecture, width, MODES[mode], table.device)
    x = torch.randn(rows, width).to(table.device, MODES[mode])
    dense = DenseBlock(norm, up, down, "gelu", MODES[mode])
    runs: dict[str, recipe.Run | str] = {"dense": dense}
    kinds = {"dense": (0, "dense"), "dense again": (0, "dense again")}
    for block in blocks(architecture, width):
        own = {key: partial(one_launch, tile, norm, up, down) for key, tile in block.tiles().items()}
        for key, make in (own | {"two launches": partial(two_launches, block, norm, up, down, x)}).items():
            name = f"{key} in {block.shared_kb} KB"
            kinds[name], runs[name] = (block.shared_kb, key), make() if table.on_cuda else recipe.NEEDS_CUDA
    truth = truth_of(x, norm, up, down, "gelu")
    work = recipe.work_of(2 * x.nbytes, (*up.factors, *down.factors), rows)
    works = dict.fromkeys(runs, work) | {"dense": recipe.work_of(2 * x.nbytes, (dense.up.weight, dense.down.weight), rows)}
    found = table.measure(mode, runs, x, truth, works, base=x)
    return [Row(width, architecture, rows, *kinds[name], *recipe.cells(each, found["dense"])) for name, each in found.items()]


def draw(records: Sequence[Record], plot: Path) -> None:
    """Bars for each block, a picture for each width."""
    recipe.draw(plot, records, group=("architecture", "shared_kb"), by="width")


def main() -> None:
    """Compile, measure, print and write."""
    parser = recipe.arguments(__doc__, seconds=0.5)
    parser.set_defaults(modes="fp16")
    recipe.add_rows(parser, TOKENS)
    table = recipe.table_of(parser)
    cases = [{"width": width, "architecture": name, "rows": table.rows(TOKENS)} for width in table.few(WIDTHS) for name in ARCHITECTURES]
    table.make(Row, cases, measure, draw, compile_ahead)


if __name__ == "__main__":
    recipe.main(main)
