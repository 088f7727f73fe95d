"""Attention of halves in short sequences, beside PyTorch's backends: one table for one GPU.

``python recipes/attention_table.py --out recipes/results/attention_h200.csv``

Heads of 64 features, q, k and v as views of what one linear gives, for the sizes of timm's models. Times by CUDA graphs over rotating
inputs larger than the L2 cache, all candidates of a case in one shuffled run, after a check against float64; a launch is in them.
``bound_us`` is what a large copy and a large matrix product, measured in the same run, allow for q, k, v, y and both products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import recipe
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flysurgery import ops
from flysurgery.bench import MODES, Record, Work, in_mode, time_interleaved

HEAD = 64
CHECKED = 8
"""Images that are held against float64."""

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
SIZES = (
    *((batch, 197, 6) for batch in (8, 16, 32, 64, 128, 256)),
    (128, 197, 3),
    (128, 197, 12),
    (128, 50, 12),
    (64, 257, 16),
    (32, 577, 6),
)
"""Images, tokens and heads."""

Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """One candidate. ``error`` is relative to float64, in the Frobenius norm."""

    mode: str
    images: int
    tokens: int
    heads: int
    candidate: str
    error: float
    median_us: float
    iqr_us: float
    ratio_to_pytorch: float
    judged: recipe.Judged


def split(x: Tensor) -> tuple[Tensor, ...]:  # x: (images, tokens, 3 * heads * HEAD); each (images, heads, tokens, HEAD)
    return x.unflatten(2, (3, -1, HEAD)).permute(2, 0, 3, 1, 4).unbind(0)


def by_pytorch(x: Tensor) -> Tensor:
    q, k, v = split(x)
    return scaled_dot_product_attention(q, k, v)


def by_backend(backend: SDPBackend) -> Run:
    def run(x: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return by_pytorch(x)

    return run


def ours(x: Tensor) -> Tensor:
    q, k, v = split(x)
    return ops.attention(q, k, v)


RUNS: dict[str, Run] = {
    "pytorch": by_pytorch,
    "pytorch again": by_pytorch,
    **{name: by_backend(backend) for name, backend in BACKENDS.items()},
    "flysurgery": ours,
}


def measure(mode: str, images: int, tokens: int, heads: int) -> list[Row]:
    """Check and time all candidates of one case."""
    torch.manual_seed(0)
    x = torch.randn((images, tokens, 3 * heads * HEAD), device="cuda").to(MODES[mode])
    with torch.inference_mode():
        truth = by_pytorch(x[:CHECKED].double())
        errors = {name: float((run(x)[:CHECKED].double() - truth).norm() / truth.norm()) for name, run in RUNS.items()}
        if not errors["flysurgery"] < 1.25 * errors["pytorch"]:
            raise SystemExit(f"{mode}, {images} images, {tokens} tokens, {heads} heads: wrong, relative error {errors['flysurgery']:.2g}")
        timings = time_interleaved(RUNS, x, rounds=15, seconds=0.1)
    work = Work(x.nbytes * 4 // 3, 4 * images * heads * tokens * tokens * HEAD)
    base, judged = timings["pytorch"].median_ms, recipe.judge(mode, timings, dict.fromkeys(RUNS, work), "pytorch")
    return [
        Row(mode, images, tokens, heads, name, errors[name], 1e3 * t.median_ms, 1e3 * t.iqr_ms, t.median_ms / base, judged[name])
        for name, t in timings.items()
    ]


def draw(records: Sequence[Record], plot: Path) -> None:
    """Bars for each size, a picture for each mode."""
    recipe.draw(plot, records, group=("images", "tokens", "heads"), ratio="ratio_to_pytorch")


def main() -> None:
    """Measure, print and write."""
    options = recipe.on_cuda(recipe.table_arguments(__doc__, modes=("fp16", "bf16")))
    found: list[Row] = []
    for mode in options.modes:
        for size in SIZES:
            with in_mode(mode):
                rows = measure(mode, *size)
            found += rows
            times = ", ".join(f"{row.candidate} {row.median_us:.1f}" for row in rows)
            print(f"{mode}, images, tokens and heads {size}: {times} us", flush=True)
            recipe.keep(options, found)
    if options.plot is not None:
        draw(recipe.records_of(found), options.plot)


if __name__ == "__main__":
    recipe.main(main)
