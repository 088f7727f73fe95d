"""The parts of a Vision Transformer's block for a few images, by the kernels for few rows, beside PyTorch's own: one table for one GPU.

``python recipes/few_rows_table.py --out recipes/results/few_rows_h200.csv``

Dense layers, and those of Gonon et al., which the kernels multiply out. Times by CUDA graphs over rotating inputs larger than the L2 cache,
all candidates of a part in one shuffled run, after a check against float64; a launch is in them. Where the kernels for few rows do not
take a part, ``flysurgery.ops`` takes others. ``bound_us`` is what a large copy and a large matrix product, measured in the same run,
allow for x, y and the candidate's weights; a kernel that multiplies factors out reads more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import ModuleType

import recipe
import torch
from torch import Tensor

from flysurgery import ops
from flysurgery.bench import MODES, Record, Work
from flysurgery.factors import factors_to_dense
from flysurgery.ops import Dense, FusedFactors, Linear, Norm, composed
from flysurgery.patterns import gonon

HEAD = 64
PARTS = ("norm and q, k, v", "attention", "output projection", "feed-forward")
IMAGES, WIDTHS, TOKENS = (1, 2, 4, 8), (384, 768), 197


@dataclass(frozen=True)
class Block:
    """A block's layers."""

    norm: Norm
    group: tuple[Linear, ...]
    out: Linear
    up: Linear
    down: Linear

    def weights(self, part: str) -> list[Tensor]:
        """The matrices or factors of one part."""
        of: dict[str, tuple[Linear, ...]] = dict(zip(PARTS, (self.group, (), (self.out,), (self.up, self.down)), strict=True))
        return [each for linear in of[part] for each in ((linear.weight,) if isinstance(linear, Dense) else linear.factors)]

    def parts(self, operators: ModuleType) -> dict[str, recipe.Run]:
        """The block's parts by the functions of ``flysurgery.ops`` or of ``flysurgery.ops.composed``."""

        def attention(x: Tensor) -> Tensor:  # shape: (images * TOKENS, 3 * width)
            q, k, v = x.view(-1, TOKENS, 3, x.shape[1] // (3 * HEAD), HEAD).permute(2, 0, 3, 1, 4).unbind(0)
            return operators.attention(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1)

        runs: tuple[recipe.Run, ...] = (
            lambda x: operators.norm_linear(x, self.norm, self.group),
            attention,
            lambda x: operators.linear_residual(x, self.out, x),
            lambda x: operators.ffn(x, self.norm, self.up, self.down),
        )
        return dict(zip(PARTS, runs, strict=True))


@dataclass(frozen=True)
class Row:
    """One candidate of one part."""

    part: str
    width: int
    mode: str
    rows: int
    candidate: str
    times: recipe.Times
    ratio_to_dense: float | None
    judged: recipe.Judged


def butterfly(width: int, device: torch.device) -> Block:
    """Random factors."""

    def drawn(*shape: int, deviation: float = 0.2, mean: float = 0.0) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.float64) * deviation + mean

    def layer(inputs: int, outputs: int) -> FusedFactors:
        factors = tuple(drawn(*pattern.factor_shape, deviation=pattern.c**-0.5) for pattern in gonon(outputs, inputs))
        return FusedFactors(factors, drawn(outputs))

    q, k, v, out = (layer(width, width) for _ in range(4))
    return Block(Norm(drawn(width, mean=1.0), drawn(width), 1e-6), (q, k, v), out, layer(width, 4 * width), layer(4 * width, width))


def changed(block: Block, of: Callable[[Linear], Linear], dtype: torch.dtype) -> Block:
    """The block with other layers, and its norm in a dtype."""
    weight, bias = (part.to(dtype) for part in block.norm.tensors)
    return Block(Norm(weight, bias, block.norm.eps), tuple(map(of, block.group)), of(block.out), of(block.up), of(block.down))


def measure(table: recipe.Table, width: int, mode: str, rows: int) -> list[Row]:
    """Check and time all parts of one width in one mode."""
    dtype = MODES[mode]

    def rounded(linear: Linear) -> Linear:
        assert isinstance(linear, FusedFactors) and linear.bias is not None
        return FusedFactors(tuple(factor.to(dtype) for factor in linear.factors), linear.bias.to(dtype))

    def multiplied(linear: Linear) -> Linear:
        assert isinstance(linear, FusedFactors) and linear.bias is not None
        return Dense(factors_to_dense([factor.double() for factor in linear.factors]).to(dtype), linear.bias)

    def wide(linear: Linear) -> Linear:
        assert isinstance(linear, FusedFactors) and linear.bias is not None
        return FusedFactors(tuple(factor.double() for factor in linear.factors), linear.bias.double())

    factors = changed(butterfly(width, table.device), rounded, dtype)
    exact, dense = changed(factors, wide, torch.float64), changed(factors, multiplied, dtype)
    weights = [(part.weight, part.bias) for part in dense.group if isinstance(part, Dense) and part.bias is not None]
    joined = Dense(*(torch.cat(each) for each in zip(*weights, strict=True)))
    dense = replace(dense, group=(joined,))
    blocks = {"dense": dense, "dense fused": dense, "converted fused": factors}
    found: list[Row] = []
    for part in PARTS:
        features = width * (3 if part == "attention" else 1)
        x = torch.randn(rows, features, device=table.device, dtype=torch.float64).to(dtype)
        own = {name: block for name, block in blocks.items() if part != "attention" or "dense" in name}
        runs = {
            name: table.kernel(block.parts(ops)[part]) if "fused" in name else dense.parts(composed)[part] for name, block in own.items()
        }
        truth = exact.parts(composed)[part](x.double())
        moved = x.nbytes + truth.numel() * x.element_size()
        works = {name: recipe.work_of(moved, block.weights(part), rows) for name, block in own.items()}
        if part == "attention":
            works = dict.fromkeys(runs, Work(moved, 4 * rows * TOKENS * width))
        measured = table.measure(mode, runs, x, truth, works)
        found += [Row(part, width, mode, rows, name, *recipe.cells(each, measured["dense"])) for name, each in measured.items()]
    return found


def draw(records: Sequence[Record], plot: Path) -> None:
    """Bars for each part, a picture for each mode."""
    recipe.draw(plot, records, group=("part", "width", "rows"))


def main() -> None:
    """Measure, print and write."""
    parser = recipe.arguments(__doc__, modes="fp16,fp32", seconds=0.5)
    parser.add_argument("--images", type=recipe.counts, default=IMAGES, help=f"of {TOKENS} tokens each, 1,2,4,8 by default")
    parser.add_argument("--widths", type=recipe.counts, default=WIDTHS, help="widths of the model, 384,768 by default")
    table = recipe.table_of(parser)
    sizes = table.few(product(table.options.widths, table.options.images))
    cases = [{"width": width, "mode": mode, "rows": images * TOKENS} for mode in table.modes for width, images in sizes]
    table.make(Row, cases, measure, draw)


if __name__ == "__main__":
    recipe.main(main)
