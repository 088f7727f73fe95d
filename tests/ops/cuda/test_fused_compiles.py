"""The fused kernel compiled for each generation of GPUs, without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from flysurgery.ops.cuda import table
from flysurgery.ops.cuda.autotune import FUSED_KINDS
from flysurgery.ops.cuda.compile import compile_cubin
from flysurgery.ops.cuda.fused import fused_reason
from flysurgery.ops.cuda.fused_configs import configs, fits
from flysurgery.ops.cuda.obstacles import product_obstacle
from flysurgery.ops.cuda.product import FUSED
from flysurgery.ops.cuda.table import TunedCase
from flysurgery.ops.cuda.tiling import FusedConfig, Tiling, tiling
from flysurgery.patterns import Architecture, gonon, monarch

SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90a": 227 * 1024, "sm_100": 227 * 1024}
SPILL_BYTES = 2048
"""Stores and loads a thread. Fp32 by pairs lives on 255 registers; configurations were chosen by time, some spill and are faster."""

SQUARE, UP, DOWN = gonon(384, 384), gonon(1536, 384), gonon(384, 1536)
MONARCH = monarch(384, 384, 4)
NARROW, UNCHAINED = Architecture.of((1, 24, 16, 1), (1, 16, 40, 1)), Architecture.of((1, 32, 32, 3), (6, 16, 24, 1))
FIRST = [
    (SQUARE, "fp16", 3, "sm_80"),
    (SQUARE, "fp32", 1, "sm_80"),
    (UP, "bf16", 1, "sm_80"),
    (DOWN, "tf32", 1, "sm_80"),
    (MONARCH, "fp32", 1, "sm_80"),
    (SQUARE, "fp16", 1, "sm_90a"),
    (SQUARE, "bf16", 3, "sm_90a"),
    (SQUARE, "tf32", 1, "sm_90a"),
    (SQUARE, "fp32", 3, "sm_90a"),
    (UP, "bf16", 1, "sm_90a"),
    (DOWN, "fp32", 1, "sm_90a"),
    (MONARCH, "fp16", 3, "sm_90a"),
    (SQUARE, "bf16", 1, "sm_100"),
    (UP, "fp32", 1, "sm_100"),
    (monarch(384, 1536, 4), "fp16", 1, "sm_100"),
    (NARROW, "tf32", 1, "sm_90a"),
    (UNCHAINED, "fp16", 1, "sm_80"),
]
"""What runs on GPUs for which nothing was tuned."""
BEHIND_A_NORM = [
    (SQUARE, "fp16", 3, "sm_80"),
    (SQUARE, "fp32", 3, "sm_80"),
    (SQUARE, "bf16", 3, "sm_90a"),
    (SQUARE, "tf32", 3, "sm_90a"),
    (MONARCH, "fp16", 3, "sm_90a"),
    (SQUARE, "fp16", 3, "sm_100"),
    (DOWN, "tf32", 1, "sm_100"),
]
"""Likewise."""

GATED = [
    (monarch(2048, 384, 4), "fp16", True, "sm_80"),
    (monarch(2048, 384, 4), "tf32", False, "sm_80"),
    (monarch(1024, 192, 4), "bf16", True, "sm_90a"),
    (monarch(2048, 384, 4), "fp16", True, "sm_90a"),
    (monarch(2048, 384, 4), "fp32", True, "sm_90a"),
    (monarch(4096, 768, 4), "fp16", False, "sm_90a"),
    (monarch(2048, 384, 4), "fp16", False, "sm_100"),
]
"""Likewise of layers whose outputs are a gate and a value."""

SERIALIZED = {
    (UP, "bf16", 1): "ptxas runs short of registers at 12 warps, 168 each; the table has another configuration for the H200",
    (UP, "fp16", 1): "likewise, with an activation and a residual",
    (SQUARE, "bf16", 3): "likewise",
}
"""Where ptxas may remark that wgmma instructions wait for each other, and why that is taken. Nothing tuned is among them."""

_SHIPPED = Path(table.__file__).parent / "tuned" / "h200.json"
# bf16 has the same code as fp16 but for the type of the instructions
TUNED = [
    (entry.case, FusedConfig(**entry.config))
    for entry in table._read(_SHIPPED)
    if entry.case.kernel in FUSED_KINDS and entry.case.mode != "bf16"
]


def tile_of(architecture: Architecture, mode: str, linears: int, *, norm: bool = False, gated: bool = False) -> Tiling:
    tile = tiling(architecture, mode, linears, norm=norm, gated=gated)
    assert isinstance(tile, Tiling), tile
    return tile


def check(
    tile: Tiling, config: FusedConfig, arch: str, *, activation: int = 0, residual: int = 0, scaled: int = 0, tuned: bool = False
) -> None:
    tile = tile.of(config)
    defines = {**tile.defines(config), "ACTIVATION": activation, "RESIDUAL": residual, "SCALED": scaled}
    compiled = compile_cubin("fused_linear.cu", defines, arch=arch, name="fused_linear")
    assert 0 < compiled.registers * 32 * config.warps <= 65536
    assert compiled.spill_bytes <= SPILL_BYTES
    assert tile.shared_bytes(config) + compiled.shared_bytes <= SHARED_BYTES[arch]
    if tuned or (Architecture((tile.second, tile.first)), tile.mode, tile.linears) not in SERIALIZED:
        assert compiled.serialized == ()


@pytest.mark.parametrize(("architecture", "mode", "linears", "arch"), FIRST, ids=str)
def test_the_first_configuration_compiles(architecture: Architecture, mode: str, linears: int, arch: str) -> None:
    tile = tile_of(architecture, mode, linears)
    assert fused_reason(architecture, mode, linears, SHARED_BYTES[arch]) is None
    check(tile, configs(tile, SHARED_BYTES[arch], wgmma=arch == "sm_90a")[0], arch)


@pytest.mark.parametrize(("architecture", "mode", "linears", "arch"), BEHIND_A_NORM, ids=str)
def test_the_first_configuration_behind_a_norm_compiles(architecture: Architecture, mode: str, linears: int, arch: str) -> None:
    tile = tile_of(architecture, mode, linears, norm=True)
    check(tile, configs(tile, SHARED_BYTES[arch], wgmma=arch == "sm_90a")[0], arch)


def test_there_is_a_table() -> None:
    layers = {(case.architecture, case.mode, case.linears) for case, _ in TUNED if case.kernel == FUSED}
    assert layers >= {(layer, mode, 1) for layer in (SQUARE, UP, DOWN, MONARCH) for mode in ("fp16", "tf32", "fp32")}
    assert layers >= {(SQUARE, mode, 3) for mode in ("fp16", "tf32", "fp32")}


@pytest.mark.parametrize(
    ("case", "config"),
    TUNED,
    ids=lambda value: f"{value.kernel}-{value.architecture}-{value.mode}-{value.linears}" if isinstance(value, TunedCase) else "",
)
def test_the_tuned_configurations_compile(case: TunedCase, config: FusedConfig) -> None:
    tile = tile_of(case.architecture, case.mode, case.linears, **FUSED_KINDS[case.kernel])
    assert fits(tile, config, SHARED_BYTES["sm_90a"], wgmma=True)
    check(tile, config, "sm_90a", activation=3 if tile.gated else 0, tuned=True)


def test_long_sums_of_pairs_have_their_small_products_apart() -> None:
    apart = {}
    for case, config in TUNED:
        tile = tile_of(case.architecture, case.mode, case.linears, **FUSED_KINDS[case.kernel]).of(config)
        if tile.long_sums:
            apart[case.kernel, case.architecture, case.linears] = tile.small_apart(config)
    alone = [(FUSED, *layer) for layer in ((SQUARE, 1), (SQUARE, 3), (DOWN, 1), (monarch(384, 1536, 4), 1))]
    assert apart == dict.fromkeys([*alone, ("norm_linear", SQUARE, 3)], True)


@pytest.mark.parametrize("activation", [1, 2, 3])
def test_compiles_with_activation_and_residual(activation: int) -> None:
    tile = tile_of(UP, "fp16", 1)
    check(tile, configs(tile, SHARED_BYTES["sm_90a"], wgmma=True)[0], "sm_90a", activation=activation, residual=1)


def test_compiles_with_a_layer_scale_and_a_residual() -> None:
    tile = tile_of(DOWN, "fp16", 1)
    check(tile, configs(tile, SHARED_BYTES["sm_80"], wgmma=False)[0], "sm_80", residual=1, scaled=1)


@pytest.mark.parametrize(("architecture", "mode", "norm", "arch"), GATED, ids=str)
def test_a_gate_and_a_value_compile(architecture: Architecture, mode: str, norm: bool, arch: str) -> None:
    tile = tile_of(architecture, mode, 1, norm=norm, gated=True)
    check(tile, configs(tile, SHARED_BYTES[arch], wgmma=arch == "sm_90a")[0], arch, activation=3)


@pytest.mark.parametrize("nblocks", [2, 4, 8])
@pytest.mark.parametrize("width", [192, 384, 768, 1024, 1280, 1408, 1664])
def test_every_monarch_layer_of_timm_runs(width: int, nblocks: int) -> None:
    for out_features, in_features in ((width, width), (4 * width, width), (width, 4 * width)):
        for mode in ("fp16", "fp32") if width in (192, 1664) else ("fp32",):  # which needs the most memory; the ends in both
            assert product_obstacle(monarch(out_features, in_features, nblocks), mode, 1, SHARED_BYTES["sm_80"]) is None
