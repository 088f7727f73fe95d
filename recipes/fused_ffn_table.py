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

from flysurgery.bench import Record, time_interleaved
from flysurgery.factors import factors_to_dense
from flysurgery.ops import FusedFactors, Norm, composed, ffn
from flysurgery.patterns import Architecture, gonon, monarch

WIDTHS = (384, 192, 768)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
ARCHITECTURES: dict[str, Callable[[int, int], Architecture]] = {"gonon": gonon, "monarch": monarch}


@dataclass(frozen=True)
class Row:
    """One candidate of one block. ``error`` of the block's change of x is relative to float64, in the Frobenius norm."""

    width: int
    architecture: str
    dtype: str
    activation: str
    rows: int
    candidate: str
    error: float
    median_us: float
    iqr_us: float
    ratio_to_dense: float
    ratio_to_compiled: float
    judged: recipe.Judged


class DenseBlock(nn.Module):
    """The block with the dense matrices that the factors multiply to."""

    def __init__(self, norm: Norm, up: FusedFactors, down: FusedFactors, activation: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation = nn.GELU("tanh" if activation == "gelu_tanh" else "none")
        self.norm = nn.LayerNorm(factors_to_dense(up.factors).shape[1], norm.eps, device="cuda", dtype=dtype)
        self.up, self.down = (self._dense(layer, dtype) for layer in (up, down))
        self.norm.load_state_dict({"weight": norm.weight, "bias": norm.bias})
        self.requires_grad_(False)

    @staticmethod
    def _dense(layer: FusedFactors, dtype: torch.dtype) -> nn.Linear:
        weight = factors_to_dense([factor.double() for factor in layer.factors]).to(dtype)
        linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta", dtype=dtype).to_empty(device="cuda")  # draws nothing there
        linear.load_state_dict({"weight": weight, "bias": layer.bias})
        return linear

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


def make_block(name: str, width: int, dtype: torch.dtype) -> tuple[Norm, FusedFactors, FusedFactors]:
    """Random weights of the sizes of a trained block."""

    def drawn(*shape: int, deviation: float, mean: float = 0.0) -> Tensor:
        # On the CPU: a graph that could not be captured, of the block before, leaves CUDA's generator unusable.
        return (torch.randn(shape) * deviation + mean).to("cuda", dtype)

    def layer(architecture: Architecture) -> FusedFactors:
        factors = tuple(drawn(*p.factor_shape, deviation=p.c**-0.5) for p in architecture)
        return FusedFactors(factors, drawn(architecture.out_features, deviation=0.1))

    build = ARCHITECTURES[name]
    norm = Norm(drawn(width, deviation=0.2, mean=1.0), drawn(width, deviation=0.2), 1e-6)
    return norm, layer(build(4 * width, width)), layer(build(width, 4 * width))


def measure(name: str, width: int, dtype_name: str, activation: str, rows: int) -> list[Row]:
    """Check and time one block."""
    dtype = DTYPES[dtype_name]
    torch.backends.cuda.matmul.allow_tf32 = dtype_name == "tf32"
    torch.manual_seed(0)
    norm, up, down = make_block(name, width, dtype)
    x = torch.randn(rows, width).to("cuda", dtype)
    dense = DenseBlock(norm, up, down, activation, dtype)
    compiled = torch.compile(dense, mode="max-autotune-no-cudagraphs")

    def wide(layer: FusedFactors) -> FusedFactors:
        return FusedFactors(tuple(f.double() for f in layer.factors), None if layer.bias is None else layer.bias.double())

    assert norm.weight is not None and norm.bias is not None
    exact = Norm(norm.weight.double(), norm.bias.double(), norm.eps)
    with torch.inference_mode():
        truth = composed.ffn(x.double(), exact, wide(up), wide(down), activation)
        runs: dict[str, Callable[[Tensor], Tensor]] = {
            "fused": lambda x: ffn(x, norm, up, down, activation),
            "composed": lambda x: composed.ffn(x, norm, up, down, activation),
            "dense": dense,
            "dense again": dense,
            "dense compiled": compiled,
        }
        errors = {key: float((run(x) - truth).norm() / (truth - x).norm()) for key, run in runs.items()}
        if not errors["fused"] < 2 * errors["composed"]:
            raise SystemExit(f"{name} {width} {dtype_name}: the fused block is wrong, relative error {errors['fused']:.2g}")
        timings = time_interleaved(runs, x, rounds=15)
    base, rival = timings["dense"].median_ms, timings["dense compiled"].median_ms
    work = recipe.work_of(2 * x.nbytes, (*up.factors, *down.factors), rows)
    dense_work = recipe.work_of(2 * x.nbytes, (dense.up.weight, dense.down.weight), rows)
    judged = recipe.judge(dtype_name, timings, {key: dense_work if "dense" in key else work for key in runs})
    return [
        Row(
            width,
            name,
            dtype_name,
            activation,
            rows,
            key,
            errors[key],
            t.median_ms * 1e3,
            t.iqr_ms * 1e3,
            t.median_ms / base,
            t.median_ms / rival,
            judged[key],
        )
        for key, t in timings.items()
    ]


def draw(records: Sequence[Record], plot: Path) -> None:
    """Bars for each block, a picture for each mode."""
    recipe.draw(plot, records, group=("width", "architecture", "activation"), by="dtype")


def main() -> None:
    """Measure, print and write."""
    parser = recipe.table_arguments(__doc__, rows=25216)
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)), help="widths of the model")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="out of " + ", ".join(DTYPES))
    parser.add_argument("--activations", default="gelu,gelu_tanh", help="out of gelu, gelu_tanh")
    options = recipe.on_cuda(parser)
    for dtype in options.dtypes.split(","):
        recipe.ceilings(dtype)
    found: list[Row] = []
    for width in map(int, options.widths.split(",")):
        for dtype in options.dtypes.split(","):
            for name in ARCHITECTURES:
                for activation in options.activations.split(","):
                    rows = measure(name, width, dtype, activation, options.rows)
                    found += rows
                    times = ", ".join(f"{row.candidate} {row.median_us:.1f}" for row in rows)
                    own = rows[0]
                    print(
                        f"{width} {dtype} {name} {activation}: {times} us; {own.ratio_to_dense:.3f}, {own.ratio_to_compiled:.3f}",
                        flush=True,
                    )
                    recipe.keep(options, found)
    if options.plot is not None:
        draw(recipe.records_of(found), options.plot)


if __name__ == "__main__":
    recipe.main(main)
