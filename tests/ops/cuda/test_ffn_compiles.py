"""The kernels of whole feed-forward blocks compile: for Hopper with few spills and no waits between products, elsewhere without spills."""

from __future__ import annotations

import pytest

from flysurgery.ops.cuda.compile import compile_cubin
from flysurgery.ops.cuda.ffn_float_tiling import FloatFfnTiling, float_ffn_tiling
from flysurgery.ops.cuda.ffn_tiling import ACTIVATIONS, FfnTiling, ffn_tiling
from flysurgery.ops.cuda.ffn_warp_tiling import WarpFfnTiling, warp_ffn_tiling
from flysurgery.ops.cuda.tiling import MODES, registers_allowed
from flysurgery.patterns import Architecture
from flysurgery.patterns.catalog import gonon, low_rank, monarch

SHARED = 232448
MAX_SPILL_BYTES = 128
"""Stores and loads a thread, at the end, where scaled sums and the rows to be added are held together."""
MAX_SPILL_BYTES_BESIDE_PIECES = 96
"""Stores and loads a thread outside of the loop over pieces of hidden units."""


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


@pytest.mark.parametrize(
    ("up", "down", "mode", "activation", "arch", "shared"),
    [
        (gonon(1536, 384), gonon(384, 1536), 0, "gelu", "sm_80", 163 * 1024),
        (monarch(1536, 384), monarch(384, 1536), 1, "gelu_tanh", "sm_100", SHARED),
        (monarch(1536, 384), monarch(384, 1536), 0, "gelu", "sm_90a", SHARED),
        (gonon(768, 192), gonon(192, 768), 1, "silu", "sm_89", 99 * 1024),
        (low_rank(1536, 384, 96), low_rank(384, 1536, 96), 0, "gelu", "sm_80", 163 * 1024),
    ],
)
def test_compiles_without_wgmma(up: Architecture, down: Architecture, mode: int, activation: str, arch: str, shared: int) -> None:
    tile = warp_ffn_tiling(up, down, shared, scaled=True)
    assert isinstance(tile, WarpFfnTiling)
    defines = {**tile.defines(), "MODE": mode, "ACTIVATION": ACTIVATIONS[activation], "NORM": 1, "RESIDUAL": 1}
    compiled = compile_cubin("ffn_warps.cu", defines, arch=arch, name="ffn_warps")
    assert compiled.spill_bytes == 0
    assert compiled.registers <= registers_allowed(tile.warps)


@pytest.mark.parametrize(
    ("up", "down", "mode", "activation", "scaled"),
    [
        (gonon(1536, 384), gonon(384, 1536), "fp32", "gelu", True),
        (gonon(1536, 384), gonon(384, 1536), "tf32", "gelu", False),
        (monarch(1536, 384), monarch(384, 1536), "tf32", "gelu_tanh", True),
        (monarch(1536, 384), monarch(384, 1536), "fp32", "gelu", False),
        (gonon(768, 192), gonon(192, 768), "tf32", "gelu", True),
        (monarch(768, 192), monarch(192, 768), "fp32", "gelu", True),
        (low_rank(1536, 384, 96), low_rank(384, 1536, 96), "fp32", "gelu", True),
    ],
)
def test_compiles_for_float32(up: Architecture, down: Architecture, mode: str, activation: str, scaled: bool) -> None:
    tile = float_ffn_tiling(up, down, mode, SHARED, scaled=scaled)
    assert isinstance(tile, FloatFfnTiling)
    defines = {**tile.defines(), "MODE": MODES.index(mode), "ACTIVATION": ACTIVATIONS[activation], "NORM": 1, "RESIDUAL": 1}
    compiled = compile_cubin("ffn_floats.cu", defines, arch="sm_90a", name="ffn_floats")
    assert compiled.serialized == ()
    assert compiled.spill_bytes <= MAX_SPILL_BYTES_BESIDE_PIECES
    assert compiled.registers <= registers_allowed(tile.warps + 4)  # at the start, before those that bring weights leave theirs
