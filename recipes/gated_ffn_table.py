"""Gated feed-forward blocks as they are fused, dense and converted, beside the same by PyTorch's operators: one table for one CUDA device.

``python recipes/gated_ffn_table.py --out recipes/results/gated_ffn_h200.csv``

The blocks of timm's eva02 and giant DINOv2 models: norm, gate and value (the halves of one layer's outputs, or two layers), their product,
a norm where the model has one, the last layer, layer scale where the model has one, residual. Monarch with four blocks. All candidates of a
block in one shuffled run, by CUDA graphs over rotating inputs larger than the L2 cache, after a check against float64. ``bound_us`` is
what a large copy and a large matrix product, measured in the same run, allow for x, y and the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import recipe
import torch
from torch import Tensor

from flysurgery.bench import MODES, Record, Work, in_mode
from flysurgery.ops import Dense, FusedFactors, Gated, Linear, Norm, composed, ffn, ffn_launches
from flysurgery.patterns import monarch


@dataclass(frozen=True)
class Block:
    """Sizes of a model's block. ``apart``: gate and value have layers of their own; ``inner``: a norm stands before the last layer."""

    model: str
    width: int
    hidden: int
    apart: bool = False
    inner: bool = False
    scaled: bool = False


CHECKED = 4096
"""Rows that are held against float64."""

TOKENS = 197
BLOCKS = {
    block.model: block
    for block in (
        Block("eva02_tiny", 192, 512),
        Block("eva02_small", 384, 1024),
        Block("eva02_base", 768, 2048, apart=True, inner=True),
        Block("vit_giant_patch14_dinov2", 1536, 4096, scaled=True),
    )
}


@dataclass(frozen=True)
class Row:
    """One candidate of one block."""

    model: str
    width: int
    hidden: int
    mode: str
    rows: int
    candidate: str
    launches: str
    times: recipe.Times
    ratio_to_dense: float | None
    judged: recipe.Judged


Operands = tuple[Norm, Gated, Linear, str, Tensor | None, bool, Norm | None]


def operands_of(block: Block, dtype: torch.dtype, device: torch.device, *, converted: bool) -> Operands:
    """Random weights of the sizes of a trained block."""

    def drawn(*shape: int, deviation: float) -> Tensor:
        return (torch.randn(shape, device=device) * deviation).to(dtype)

    def linear(outputs: int, inputs: int) -> Linear:
        bias = drawn(outputs, deviation=0.1)
        if not converted:
            return Dense(drawn(outputs, inputs, deviation=inputs**-0.5), bias)
        return FusedFactors(tuple(drawn(*p.factor_shape, deviation=p.c**-0.5) for p in monarch(outputs, inputs, 4)), bias)

    def norm(features: int) -> Norm:
        return Norm(1 + drawn(features, deviation=0.2), drawn(features, deviation=0.2), 1e-6)

    count = 2 if block.apart else 1
    up = Gated(tuple(linear(2 * block.hidden // count, block.width) for _ in range(count)))
    scale = drawn(block.width, deviation=0.1) if block.scaled else None
    inner = norm(block.hidden) if block.inner else None
    return norm(block.width), up, linear(block.width, block.hidden), "silu", scale, True, inner


def weights_of(operands: Operands) -> list[Tensor]:
    """The matrices or factors of all layers."""
    linears = (*operands[1].members, operands[2])
    return [each for linear in linears for each in ((linear.weight,) if isinstance(linear, Dense) else linear.factors)]


def in_double(operands: Operands) -> Operands:
    """The same weights in float64."""
    norm, up, down, activation, scale, residual, inner = operands

    def wide(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.double()

    def linear(part: Linear) -> Linear:
        if isinstance(part, Dense):
            return Dense(part.weight.double(), wide(part.bias))
        return FusedFactors(tuple(factor.double() for factor in part.factors), wide(part.bias))

    def norm_of(each: Norm) -> Norm:
        return Norm(wide(each.weight), wide(each.bias), each.eps)

    members = Gated(tuple(linear(member) for member in up.members), up.gate)
    return norm_of(norm), members, linear(down), activation, wide(scale), residual, None if inner is None else norm_of(inner)


def measure(table: recipe.Table, model: str, mode: str, rows: int) -> list[Row]:
    """Check and time one block."""
    block = BLOCKS[model]
    x = torch.randn(rows, block.width, device=table.device).to(MODES[mode])
    checked = range(min(CHECKED, rows))
    runs: dict[str, recipe.Run | str] = {}
    truths: dict[str, Tensor] = {}
    launches: dict[str, str] = {}
    works: dict[str, Work] = {}
    for kind in ("dense", "converted"):
        operands = operands_of(block, MODES[mode], table.device, converted=kind == "converted")
        own: dict[str, recipe.Run | str] = {
            kind: lambda x, operands=operands: composed.ffn(x, *operands),
            f"{kind} fused": table.kernel(lambda x, operands=operands: ffn(x, *operands)),
        }
        truths |= dict.fromkeys(own, composed.ffn(x[: len(checked)].double(), *in_double(operands)))
        works |= dict.fromkeys(own, recipe.work_of(2 * x.nbytes, weights_of(operands), rows))
        runs |= own
        if table.on_cuda:
            with in_mode(mode):
                launches[f"{kind} fused"] = " | ".join(ffn_launches(x, *operands))
    found = table.measure(mode, runs, x, truths, works, base=x[: len(checked)], rows=checked)
    head = model, block.width, block.hidden, mode, rows
    return [Row(*head, name, launches.get(name, ""), *recipe.cells(each, found["dense"])) for name, each in found.items()]


def draw(records: Sequence[Record], plot: Path) -> None:
    """Bars for each block, a picture for each mode."""
    recipe.draw(plot, records, group=("model",))


def main() -> None:
    """Measure, print and write after every block."""
    parser = recipe.arguments(__doc__, modes="fp16,fp32", seconds=0.5)
    recipe.add_rows(parser, TOKENS)
    table = recipe.table_of(parser)
    cases = [{"model": model, "mode": mode, "rows": table.rows(TOKENS)} for mode in table.modes for model in table.few(BLOCKS)]
    table.make(Row, cases, measure, draw)


if __name__ == "__main__":
    recipe.main(main)
