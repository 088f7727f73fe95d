"""Gated feed-forward blocks as they are fused, dense and converted, beside the same by PyTorch's operators: one table for one CUDA device.

``python recipes/gated_ffn_table.py --out recipes/results/gated_ffn_h200.csv``

The blocks of timm's eva02 and giant DINOv2 models: norm, gate and value (the halves of one layer's outputs, or two layers), their product,
a norm where the model has one, the last layer, layer scale where the model has one, residual. Monarch with four blocks. All candidates of a
block in one shuffled run, by CUDA graphs over rotating inputs larger than the L2 cache, after a check against float64. ``bound_us`` is
what a large copy and a large matrix product, measured in the same run, allow for x, y and the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import recipe
import torch
from torch import Tensor

from flysurgery.bench import Record, Work, in_mode, time_interleaved
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


BLOCKS = (
    Block("eva02_tiny", 192, 512),
    Block("eva02_small", 384, 1024),
    Block("eva02_base", 768, 2048, apart=True, inner=True),
    Block("vit_giant_patch14_dinov2", 1536, 4096, scaled=True),
)


@dataclass(frozen=True)
class Row:
    """One candidate of one block. ``error`` of the block's change of x is relative to float64, in the Frobenius norm."""

    model: str
    width: int
    hidden: int
    mode: str
    rows: int
    candidate: str
    launches: str
    error: float
    median_us: float
    iqr_us: float
    ratio_to_dense: float
    judged: recipe.Judged


Operands = tuple[Norm, Gated, Linear, str, Tensor | None, bool, Norm | None]


def operands_of(block: Block, dtype: torch.dtype, *, converted: bool) -> Operands:
    """Random weights of the sizes of a trained block."""

    def drawn(*shape: int, deviation: float) -> Tensor:
        return (torch.randn(shape, device="cuda") * deviation).to(dtype)

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


def measure(block: Block, mode: str, rows: int) -> list[Row]:
    """Check and time one block."""
    with in_mode(mode) as dtype, torch.inference_mode():
        torch.manual_seed(0)
        x = torch.randn(rows, block.width, device="cuda").to(dtype)
        runs: dict[str, Callable[[Tensor], Tensor]] = {}
        errors: dict[str, float] = {}
        launches: dict[str, str] = {}
        works: dict[str, Work] = {}
        for kind in ("dense", "converted"):
            operands = operands_of(block, dtype, converted=kind == "converted")
            own: dict[str, Callable[[Tensor], Tensor]] = {
                kind: lambda x, operands=operands: composed.ffn(x, *operands),
                f"{kind} fused": lambda x, operands=operands: ffn(x, *operands),
            }
            checked = x[:4096]
            truth = composed.ffn(checked.double(), *in_double(operands))
            for name, run in own.items():
                errors[name] = float((run(checked) - truth).norm() / (truth - checked).norm())
            if not errors[f"{kind} fused"] < 2 * errors[kind]:
                raise SystemExit(f"{block.model} {mode}: the {kind} fused block is wrong, relative error {errors[f'{kind} fused']:.2g}")
            launches[f"{kind} fused"] = " | ".join(ffn_launches(x, *operands))
            works |= dict.fromkeys(own, recipe.work_of(2 * x.nbytes, weights_of(operands), rows))
            runs |= own
        runs["dense again"], errors["dense again"], works["dense again"] = runs["dense"], errors["dense"], works["dense"]
        timings = time_interleaved(runs, x, rounds=15)
    judged = recipe.judge(mode, timings, works)
    dense = timings["dense"].median_ms
    sizes = block.model, block.width, block.hidden, mode, rows
    found: list[Row] = []
    for name, each in timings.items():
        times = 1e3 * each.median_ms, 1e3 * each.iqr_ms, each.median_ms / dense
        found.append(Row(*sizes, name, launches.get(name, ""), errors[name], *times, judged[name]))
    return found


def draw(records: Sequence[Record], plot: Path) -> None:
    """Bars for each block, a picture for each mode."""
    recipe.draw(plot, records, group=("model",))


def main() -> None:
    """Measure, print and write after every block."""
    options = recipe.on_cuda(recipe.table_arguments(__doc__, rows=25216, modes=("fp16", "fp32")))
    found: list[Row] = []
    for mode in options.modes:
        for block in BLOCKS:
            rows = measure(block, mode, options.rows)
            found += rows
            print(f"{block.model} {mode}: " + ", ".join(f"{row.candidate} {row.median_us:.1f} us" for row in rows), flush=True)
            recipe.keep(options, found)
    if options.plot is not None:
        draw(recipe.records_of(found), options.plot)


if __name__ == "__main__":
    recipe.main(main)
