"""The fused kernel compiled for each generation of GPUs, without one."""

from __future__ import annotations

import pytest

from flysurgery.ops.cuda.compile import compile_cubin
from flysurgery.ops.cuda.fused import fused_reason
from flysurgery.ops.cuda.obstacles import product_obstacle
from flysurgery.ops.cuda.tiling import Tiling, configs, tiling
from flysurgery.patterns import Architecture, gonon, monarch

SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90a": 227 * 1024, "sm_100": 227 * 1024}
SPILL_BYTES = {"sm_80": 1024, "sm_90a": 64, "sm_100": 1024}
"""Stores and loads a thread. Tiles are chosen for Hopper; elsewhere they are right, and may spill outside of the loops."""

SQUARE, UP, DOWN = gonon(384, 384), gonon(1536, 384), gonon(384, 1536)
MONARCH = monarch(384, 384, 4)
COMPILED = [
    (SQUARE, "fp16", 1),
    (SQUARE, "fp16", 3),
    (SQUARE, "bf16", 1),
    (SQUARE, "tf32", 1),
    (SQUARE, "fp32", 1),
    (SQUARE, "fp32", 3),
    (UP, "bf16", 1),
    (UP, "fp32", 1),
    (DOWN, "tf32", 1),
    (MONARCH, "fp16", 3),
    (MONARCH, "fp32", 1),
    (monarch(1536, 384, 4), "fp32", 1),
    (monarch(384, 1536, 4), "fp16", 1),
]


def tile_of(architecture: Architecture, mode: str, linears: int) -> Tiling:
    tile = tiling(architecture, mode, linears)
    assert isinstance(tile, Tiling), tile
    return tile


@pytest.mark.parametrize("arch", list(SHARED_BYTES))
@pytest.mark.parametrize(("architecture", "mode", "linears"), COMPILED, ids=str)
def test_compiles_with_few_spills(architecture: Architecture, mode: str, linears: int, arch: str) -> None:
    tile = tile_of(architecture, mode, linears)
    reason = fused_reason(architecture, mode, linears, SHARED_BYTES[arch])
    if reason is not None and linears > 1:
        pytest.skip(reason)  # three linears are then three launches
    config = configs(tile, SHARED_BYTES[arch], wgmma=arch == "sm_90a")[0]
    compiled = compile_cubin("fused_linear.cu", {**tile.defines(config), "ACTIVATION": 0, "RESIDUAL": 0}, arch=arch, name="fused_linear")
    assert compiled.spill_bytes <= SPILL_BYTES[arch]
    assert compiled.serialized == ()
    assert compiled.registers * 32 * config.warps <= 65536
    assert tile.shared_bytes(config) + compiled.shared_bytes <= SHARED_BYTES[arch]


@pytest.mark.parametrize("activation", [1, 2, 3])
def test_compiles_with_activation_and_residual(activation: int) -> None:
    tile = tile_of(UP, "fp16", 1)
    config = configs(tile, SHARED_BYTES["sm_90a"], wgmma=True)[0]
    defines = {**tile.defines(config), "ACTIVATION": activation, "RESIDUAL": 1}
    compiled = compile_cubin("fused_linear.cu", defines, arch="sm_90a", name="fused_linear")
    assert compiled.spill_bytes <= SPILL_BYTES["sm_90a"] and compiled.serialized == ()


@pytest.mark.parametrize("nblocks", [2, 4, 8])
@pytest.mark.parametrize("width", [192, 384, 768, 1024, 1280, 1408, 1664])
def test_every_monarch_layer_of_timm_runs(width: int, nblocks: int) -> None:
    for out_features, in_features in ((width, width), (4 * width, width), (width, 4 * width)):
        for mode in ("fp16", "fp32"):
            assert product_obstacle(monarch(out_features, in_features, nblocks), mode, 1, SHARED_BYTES["sm_80"]) is None
