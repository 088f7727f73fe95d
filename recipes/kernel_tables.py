"""Time kernels, and the parts of a block that they compute, beside PyTorch's own.

    python recipes/kernel_tables.py attention --out build/kernels.csv

The tables:

    attention       attention of halves in short sequences, for the sizes of timm's models, beside PyTorch's backends
    norm_linear     a norm with q, k and v of a ViT-S/16 in one launch, beside two launches, dense and compiled
    fused_linear    the layers of a ViT-S/16 block as single launches, beside dense, bmm and einsum
    factor_gradients  the gradients of a layer's factors, for the layers of a ViT-S/16 block, beside einsum
    fused_ffn       feed-forward blocks with norm and residual, beside separate operators, dense and compiled
    few_rows        the parts of a block for 1 to 8 images, dense and converted
    gated_ffn       gated feed-forward blocks (SwiGLU) of timm's eva02 and giant DINOv2 models, dense and converted
    wide            wide layers factor by factor, beside a launch a layer, for few rows and many, in fp16

``fused`` is what ``flysurgery.ops`` chooses, ``composed`` the same by separate operators, ``dense`` PyTorch's operators with the matrices
that the factors multiply to, ``compiled`` these through ``torch.compile``. Times by CUDA graphs over rotating inputs larger than the L2
cache, all candidates of a case in one shuffled run, after a check against float64; a launch is in them. ``ratio_to_dense`` is the ratio to
the candidate that is timed twice: PyTorch's choice for attention, einsum for gradients. ``bound_ms`` is what a large copy and a large
matrix product, measured in the same run, allow for x, y and the candidate's weights.

Needs a CUDA device, and half a minute to ten minutes a table; kernels that are not compiled yet take most of it.
Rows: recipes/results/kernels_h200.csv
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernel_operations import FAMILIES, GATED_BLOCKS, LAYERS, PATCHES, TOKENS, attention, block_part, factor_gradients, gated_ffn, linear
from recipe import Table, run

SIZES = (*((images, 197, 6) for images in (8, 16, 32, 64, 128, 256)), (128, 197, 3), (128, 197, 12), (128, 50, 12), (64, 257, 16))
"""Images, tokens and heads of timm's models."""

WIDE = (("monarch", 768), ("monarch", 512), ("monarch", 1024), ("gonon", 768))
HALVES_AND_FLOAT = ("fp16", "fp32")
GROUP, FFN = "norm and q, k, v", "feed-forward"
ON_TOKENS: Mapping[str, Any] = {"quick": {"rows": (TOKENS,)}, "needs_cuda": True, "few": 1}
ON_PATCHES: Mapping[str, Any] = {**ON_TOKENS, "quick": {"rows": (PATCHES,)}}
FOUR_PARTS: Mapping[str, Any] = {**ON_TOKENS, "few": 4}

TABLES = {
    "attention": Table(
        {"mode": ("fp16", "bf16")},
        attention,
        cases=[dict(zip(("images", "tokens", "heads"), size, strict=True)) for size in SIZES],
        needs_cuda=True,
        few=1,
        seconds=0.1,
    ),
    "norm_linear": Table(
        {"part": (GROUP,), "width": (384,), "architecture": tuple(FAMILIES), "mode": ("all",), "rows": (128 * TOKENS,)},
        block_part,
        candidates=("fused", "two launches", "dense", "dense compiled"),
        **ON_TOKENS,
    ),
    "fused_linear": Table(
        {"layer": tuple(LAYERS), "mode": ("all",), "rows": (128 * PATCHES,)}, linear, columns=("architecture", "linears"), **ON_PATCHES
    ),
    "factor_gradients": Table(
        {"layer": tuple(LAYERS), "mode": ("bf16", "fp32"), "rows": (128 * PATCHES,)}, factor_gradients, seconds=0.1, **ON_PATCHES
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
        **FOUR_PARTS,
    ),
    "gated_ffn": Table(
        {"model": tuple(GATED_BLOCKS), "mode": HALVES_AND_FLOAT, "rows": (128 * TOKENS,)},
        gated_ffn,
        columns=("width", "hidden"),
        **ON_TOKENS,
    ),
    "wide": Table(
        {"mode": ("fp16",), "rows": (16, 197, 788, 1576, 3152, 6304, 12608, 25216), "part": (GROUP, FFN)},
        block_part,
        cases=[{"architecture": architecture, "width": width} for architecture, width in WIDE],
        candidates=("dense", "factor by factor", "one launch", "a launch a layer"),
        seconds=0.03,
        **ON_TOKENS,
    ),
}

if __name__ == "__main__":
    run(__doc__, TABLES)
