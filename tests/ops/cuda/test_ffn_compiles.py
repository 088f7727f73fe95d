"""The fused feed-forward kernel compiles for Hopper, without waits between warpgroup products and with few spills."""

from __future__ import annotations

import pytest

from flysurgery.ops.cuda.compile import compile_cubin
from flysurgery.ops.cuda.ffn_tiling import ACTIVATIONS, FfnTiling, ffn_tiling
from flysurgery.patterns import Architecture
from flysurgery.patterns.catalog import gonon, monarch

SHARED = 232448
MAX_SPILL_BYTES = 128
"""Stores and loads a thread, at the end, where scaled sums and the rows to be added are held together."""


@pytest.mark.parametrize(
    ("up", "down", "mode", "activation"),
    [
        (gonon(1536, 384), gonon(384, 1536), 0, "gelu"),
        (monarch(1536, 384), monarch(384, 1536), 1, "gelu_tanh"),
        (monarch(768, 192), monarch(192, 768), 0, "silu"),
        (gonon(768, 192), gonon(192, 768), 1, "gelu"),
    ],
)
def test_compiles_without_serialized_products(up: Architecture, down: Architecture, mode: int, activation: str) -> None:
    tile = ffn_tiling(up, down, SHARED, scaled=True)
    assert isinstance(tile, FfnTiling)
    defines = {**tile.defines(), "MODE": mode, "ACTIVATION": ACTIVATIONS[activation], "NORM": 1, "RESIDUAL": 1}
    compiled = compile_cubin("fused_ffn.cu", defines, arch="sm_90a", name="fused_ffn")
    assert compiled.serialized == ()
    assert compiled.spill_bytes <= MAX_SPILL_BYTES
    assert compiled.registers <= 128  # at the start, before one warpgroup leaves its own to the others
