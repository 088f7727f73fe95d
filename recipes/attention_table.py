"""Attention of halves in short sequences, beside PyTorch's backends: one table for one GPU.

``python recipes/attention_table.py --out recipes/results/attention_h200.csv``

Heads of 64 features, q, k and v as views of what one linear gives, for the sizes of timm's models. Times by CUDA graphs over rotating
inputs larger than the L2 cache, all candidates of a case in one shuffled run, after a check against float64; a launch is in them.
``bound_us`` is what a large copy and a large matrix product, measured in the same run, allow for q, k, v, y and both products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import recipe
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flysurgery import ops
from flysurgery.bench import MODES, Record, Work

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


@dataclass(frozen=True)
class Row:
    """One candidate of one size."""

    mode: str
    images: int
    tokens: int
    heads: int
    candidate: str
    times: recipe.Times
    ratio_to_pytorch: float | None
    judged: recipe.Judged


def split(x: Tensor) -> tuple[Tensor, ...]:  # x: (images, tokens, 3 * heads * HEAD); each (images, heads, tokens, HEAD)
    return x.unflatten(2, (3, -1, HEAD)).permute(2, 0, 3, 1, 4).unbind(0)


def by_pytorch(x: Tensor) -> Tensor:
    q, k, v = split(x)
    return scaled_dot_product_attention(q, k, v)


def by_backend(backend: SDPBackend) -> recipe.Run:
    def run(x: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return by_pytorch(x)

    return run


def ours(x: Tensor) -> Tensor:
    q, k, v = split(x)
    return ops.attention(q, k, v)


RUNS: dict[str, recipe.Run] = {
    "pytorch": by_pytorch,
    **{name: by_backend(backend) for name, backend in BACKENDS.items()},
}


def measure(table: recipe.Table, mode: str, images: int, tokens: int, heads: int) -> list[Row]:
    """Check and time all candidates of one case."""
    x = torch.randn((images, tokens, 3 * heads * HEAD), device=table.device).to(MODES[mode])
    checked = range(min(CHECKED, images))
    truth = by_pytorch(x[list(checked)].double())
    work = Work(x.nbytes * 4 // 3, 4 * images * heads * tokens * tokens * HEAD)
    runs = RUNS | {"flysurgery": table.kernel(ours)}
    found = table.measure(mode, runs, x, truth, work, baseline="pytorch", worst=1.25, rows=checked)
    return [Row(mode, images, tokens, heads, name, *recipe.cells(each, found["pytorch"])) for name, each in found.items()]


def draw(records: Sequence[Record], plot: Path) -> None:
    """Bars for each size, a picture for each mode."""
    recipe.draw(plot, records, group=("images", "tokens", "heads"), ratio="ratio_to_pytorch")


def main() -> None:
    """Measure, print and write."""
    table = recipe.table_of(recipe.arguments(__doc__, modes="fp16,bf16", seconds=0.1))
    sizes = [dict(zip(("images", "tokens", "heads"), size, strict=True)) for size in table.few(SIZES)]
    table.make(Row, [{"mode": mode} | size for mode in table.modes for size in sizes], measure, draw)


if __name__ == "__main__":
    recipe.main(main)
