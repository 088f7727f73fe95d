"""Whole feed-forward blocks as they are fused, against the dense block eager and compiled: one table for one CUDA device.

``python recipes/fused_ffn_table.py --out recipes/results/fused_ffn_h200.csv``

Norm, two linear layers, activation and residual: one launch where a kernel takes the whole block, else, as of width 768, one for the norm
and one or two for each layer. ``tf32`` and ``fp32`` are float32, with and without leave to round to TF32. Times by CUDA graphs over
rotating inputs larger than the L2 cache, all candidates of a block in one shuffled run, after a check against float64. ``composed`` is
the same block of factors as separate operators. ``bound_us`` is what a large copy and a large matrix product, measured in the same run,
allow for x, y and the weights.
``ratio_to_compiled`` is against ``torch.compile(mode="max-autotune-no-cudagraphs")`` of the dense block; this run captures
its graphs itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import recipe
import torch
from torch import Tensor, nn

from flysurgery.bench import MODES, Record
from flysurgery.factors import factors_to_dense
from flysurgery.ops import FusedFactors, Norm, composed, ffn
from flysurgery.patterns import Architecture, gonon, monarch

WIDTHS, TOKENS = (384, 192, 768), 197
ARCHITECTURES: dict[str, Callable[[int, int], Architecture]] = {"gonon": gonon, "monarch": monarch}


@dataclass(frozen=True)
class Row:
    """One candidate of one block."""

    width: int
    architecture: str
    dtype: str
    activation: str
    rows: int
    candidate: str
    times: recipe.Times
    ratio_to_dense: float | None
    ratio_to_compiled: float | None
    judged: recipe.Judged


class DenseBlock(nn.Module):
    """The block with the dense matrices that the factors multiply to."""

    def __init__(self, norm: Norm, up: FusedFactors, down: FusedFactors, activation: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation = nn.GELU("tanh" if activation == "gelu_tanh" else "none")
        self.norm = nn.LayerNorm(factors_to_dense(up.factors).shape[1], norm.eps, device=up.factors[0].device, dtype=dtype)
        self.up, self.down = (self._dense(layer, dtype) for layer in (up, down))
        self.norm.load_state_dict({"weight": norm.weight, "bias": norm.bias})
        self.requires_grad_(False)

    @staticmethod
    def _dense(layer: FusedFactors, dtype: torch.dtype) -> nn.Linear:
        weight = factors_to_dense([factor.double() for factor in layer.factors]).to(dtype)
        linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta", dtype=dtype).to_empty(
            device=weight.device
        )  # draws nothing there
        linear.load_state_dict({"weight": weight, "bias": layer.bias})
        return linear

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


def make_block(name: str, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Norm, FusedFactors, FusedFactors]:
    """Random weights of the sizes of a trained block."""

    def drawn(*shape: int, deviation: float, mean: float = 0.0) -> Tensor:
        # On the CPU: a graph that could not be captured, of the block before, leaves CUDA's generator unusable.
        return (torch.randn(shape) * deviation + mean).to(device, dtype)

    def layer(architecture: Architecture) -> FusedFactors:
        factors = tuple(drawn(*p.factor_shape, deviation=p.c**-0.5) for p in architecture)
        return FusedFactors(factors, drawn(architecture.out_features, deviation=0.1))

    build = ARCHITECTURES[name]
    norm = Norm(drawn(width, deviation=0.2, mean=1.0), drawn(width, deviation=0.2), 1e-6)
    return norm, layer(build(4 * width, width)), layer(build(width, 4 * width))


def in_double(layer: FusedFactors) -> FusedFactors:
    """The same weights in float64."""
    return FusedFactors(tuple(f.double() for f in layer.factors), None if layer.bias is None else layer.bias.double())


def norm_in_double(norm: Norm) -> Norm:
    """The same norm in float64."""
    weight, bias = (part.double() for part in norm.tensors)
    return Norm(weight, bias, norm.eps)


def truth_of(x: Tensor, norm: Norm, up: FusedFactors, down: FusedFactors, activation: str) -> Tensor:
    """What the block makes of x, in float64."""
    return composed.ffn(x.double(), norm_in_double(norm), in_double(up), in_double(down), activation)


def measure(table: recipe.Table, width: int, dtype: str, architecture: str, activation: str, rows: int) -> list[Row]:
    """Check and time one block."""
    norm, up, down = make_block(architecture, width, MODES[dtype], table.device)
    x = torch.randn(rows, width).to(table.device, MODES[dtype])
    dense = DenseBlock(norm, up, down, activation, MODES[dtype])
    runs: dict[str, recipe.Run | str] = {
        "fused": table.kernel(lambda x: ffn(x, norm, up, down, activation)),
        "composed": lambda x: composed.ffn(x, norm, up, down, activation),
        "dense": dense,
        "dense compiled": table.compiled(dense, "max-autotune-no-cudagraphs"),
    }
    work = recipe.work_of(2 * x.nbytes, (*up.factors, *down.factors), rows)
    dense_work = recipe.work_of(2 * x.nbytes, (dense.up.weight, dense.down.weight), rows)
    works = {key: dense_work if "dense" in key else work for key in runs}
    found = table.measure(dtype, runs, x, truth_of(x, norm, up, down, activation), works, worst=3, base=x)
    head, bases = (width, architecture, dtype, activation, rows), (found["dense"], found["dense compiled"])
    return [Row(*head, name, *recipe.cells(each, *bases)) for name, each in found.items()]


def draw(records: Sequence[Record], plot: Path) -> None:
    """Bars for each block, a picture for each mode."""
    recipe.draw(plot, records, group=("width", "architecture", "activation"), by="dtype")


def main() -> None:
    """Measure, print and write."""
    parser = recipe.arguments(__doc__, modes="fp16,bf16,tf32,fp32", seconds=0.5)
    recipe.add_rows(parser, TOKENS)
    parser.add_argument("--widths", type=recipe.counts, default=WIDTHS, help="widths of the model, 384,192,768 by default")
    parser.add_argument("--activations", default="gelu,gelu_tanh", help="out of gelu, gelu_tanh")
    table = recipe.table_of(parser)
    sizes = [(width, mode) for width in table.few(table.options.widths) for mode in table.modes]
    kinds = [(name, activation) for name in ARCHITECTURES for activation in table.few(table.options.activations.split(","))]
    cases = [
        {"width": width, "dtype": mode, "architecture": name, "activation": activation, "rows": table.rows(TOKENS)}
        for width, mode in sizes
        for name, activation in kinds
    ]
    table.make(Row, cases, measure, draw)


if __name__ == "__main__":
    recipe.main(main)
