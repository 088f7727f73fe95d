"""Time kernels, and the parts of a block that they compute, beside PyTorch's own.

    python recipes/kernel_tables.py attention --out build/kernels.csv

The tables:

    attention         attention of halves in short sequences, for the sizes of timm's models, beside PyTorch's backends
    norm_linear       a norm with q, k and v of a ViT-S/16 in one launch, beside dense and compiled
    factor_gradients  the gradients of a layer's factors, for the layers of a ViT-S/16 block, beside einsum
    fused_ffn         feed-forward blocks with norm and residual, beside separate operators, dense and compiled
    few_rows          the parts of a block for 1 to 8 images, dense and converted

``vits.py table6`` has linear layers, and ``vits.py table3`` blocks and gated feed-forward blocks. ``fused`` is what ``flysurgery.ops``
chooses, ``composed`` the same by separate operators, ``dense`` PyTorch's operators with the matrices that the factors multiply to,
``compiled`` these through ``torch.compile``. Times by CUDA graphs over rotating inputs larger than the L2 cache, all candidates of a case
in one shuffled run, after a check against float64; a launch is in them. ``ratio_to_dense`` is the ratio to the candidate that is timed
twice: dense, or einsum for gradients. ``bound_ms`` is what a large copy and a large matrix product, measured in the same run, allow for x,
y and the candidate's weights.

Needs a CUDA device, and half a minute to ten minutes a table; kernels that are not compiled yet take most of it.
Rows: recipes/results/kernels_h200.csv
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernel_operations import FAMILIES, LAYERS, PATCHES, TOKENS, block_part, factor_gradients
from recipe import Table, run

SIZES = (*((images, 197, 6) for images in (8, 16, 32, 64, 128, 256)), (128, 197, 3), (128, 197, 12), (128, 50, 12), (64, 257, 16))
"""Images, tokens and heads of 64 features of timm's models."""

HALVES_AND_FLOAT = ("fp16", "fp32")
GROUP, FFN = "norm and q, k, v", "feed-forward"
ON_TOKENS: Mapping[str, Any] = {"quick": {"rows": (TOKENS,)}, "needs_cuda": True, "few": 1}

TABLES = {
    "attention": Table(
        {"part": ("attention",), "mode": ("fp16", "bf16")},
        block_part,
        cases=[{"rows": images * tokens, "tokens": tokens, "width": 64 * heads} for images, tokens, heads in SIZES],
        candidates=("dense", "cudnn", "flash", "dense fused"),
        needs_cuda=True,
        few=1,
        seconds=0.1,
    ),
    "norm_linear": Table(
        {"part": (GROUP,), "width": (384,), "architecture": tuple(FAMILIES), "mode": ("all",), "rows": (128 * TOKENS,)},
        block_part,
        candidates=("fused", "dense", "dense compiled"),
        **ON_TOKENS,
    ),
    "factor_gradients": Table(
        {"layer": tuple(LAYERS), "mode": ("bf16", "fp32"), "rows": (128 * PATCHES,)},
        factor_gradients,
        quick={"rows": (PATCHES,)},
        needs_cuda=True,
        few=1,
        seconds=0.1,
    ),
    "fused_ffn": Table(
        {
            "part": (FFN,),
            "width": (384, 192, 768),
            "architecture": tuple(FAMILIES),
            "activation": ("gelu", "gelu_tanh"),
            "mode": ("all",),
            "rows": (128 * TOKENS,),
        },
        block_part,
        candidates=("fused", "composed", "dense", "dense compiled"),
        **ON_TOKENS,
    ),
    "few_rows": Table(
        {
            "architecture": ("gonon",),
            "width": (384, 768),
            "mode": HALVES_AND_FLOAT,
            "rows": (TOKENS, 2 * TOKENS, 4 * TOKENS, 8 * TOKENS),
            "part": (GROUP, "attention", "output projection", FFN),
        },
        block_part,
        candidates=("dense", "dense fused", "fused"),
        **{**ON_TOKENS, "few": 4},
    ),
}

if __name__ == "__main__":
    run(__doc__, TABLES)
