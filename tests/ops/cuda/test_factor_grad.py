"""The factor-gradient kernel without a GPU: its index maps, its splits, its variants compiled."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import product

import pytest

from flysurgery.ops.cuda.compile import compile_cubin
from flysurgery.ops.cuda.factor_grad import FactorGrad, grad_configs, grad_reason, gradient_configs
from flysurgery.ops.cuda.grad_tiling import GradConfig, GradTiling
from flysurgery.ops.cuda.grad_wgmma import WgmmaGradConfig, WgmmaGradTiling, wgmma_grad_configs
from flysurgery.patterns import Pattern

HOPPER = 227 * 1024
PATTERNS = [
    Pattern(2, 3, 5, 3),
    Pattern(1, 48, 48, 1),
    Pattern(6, 64, 64, 1),
    Pattern(1, 192, 48, 2),
    Pattern(1, 33, 20, 17),
    Pattern(1, 64, 64, 64),
]


def features_of(tiles: int, neighbours: int) -> list[int]:
    """Feature of each (tile of eight, lane group), as the kernel's epilogue numbers them."""
    return [tile // neighbours * 8 * neighbours + lane * neighbours + tile % neighbours for tile in range(tiles) for lane in range(8)]


@pytest.mark.parametrize("mode", ["fp16", "tf32", "fp32"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_tiles_number_every_feature_once_and_fit(pattern: Pattern, mode: str) -> None:
    assert grad_reason(pattern, mode, HOPPER) is None
    for config in grad_configs(pattern, mode, HOPPER):
        tile = GradTiling(pattern, mode, config)
        for tiles in (2 * config.output_tiles, config.input_tiles):
            if tile.element_bytes == 2 and config.block_residues == 1:
                assert tiles % config.neighbours == 0 and config.neighbours == 2, "ldmatrix reads two tiles of eight at once"
                continue
            assert sorted(features_of(tiles, config.neighbours)) == list(range(8 * tiles))
        assert config.neighbours * config.residues * tile.element_bytes % 4 == 0
        assert tile.shared_bytes <= HOPPER
        assert GradConfig(**json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_hopper_has_its_kernel_for_halves_and_few_residues(pattern: Pattern) -> None:
    configs = wgmma_grad_configs(pattern, "bf16", HOPPER)
    assert bool(configs) == (pattern in (Pattern(1, 48, 48, 1), Pattern(6, 64, 64, 1), Pattern(1, 192, 48, 2)))
    assert not wgmma_grad_configs(pattern, "tf32", HOPPER)
    both = gradient_configs(pattern, "bf16", HOPPER, wgmma=True)
    assert both[: len(configs)][:1] == configs[:1] and any(isinstance(config, GradConfig) for config in both)
    assert gradient_configs(pattern, "bf16", HOPPER, wgmma=False) == grad_configs(pattern, "bf16", HOPPER)
    for config in configs:
        tile = WgmmaGradTiling(pattern, "bf16", config)
        assert tile.shared_bytes(bias=True) * config.min_blocks <= HOPPER
        assert config.block_outputs - 64 < pattern.b * pattern.d and config.block_inputs < 2 * pattern.c * pattern.d + 16
        assert WgmmaGradConfig(**json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize(
    ("pattern", "joined", "bias"),
    [
        (Pattern(1, 768, 192, 2), 1, True),
        (Pattern(2, 48, 192, 1), 3, False),
        (Pattern(1, 128, 128, 3), 1, True),
        (Pattern(6, 64, 256, 1), 1, False),
        (Pattern(1, 384, 96, 4), 1, True),
    ],
    ids=str,
)
def test_wgmma_variants_compile_without_spills_or_waits(pattern: Pattern, joined: int, bias: bool) -> None:
    wide = Pattern(pattern.a, joined * pattern.b, pattern.c, pattern.d)
    tile = WgmmaGradTiling(pattern, "fp16", wgmma_grad_configs(wide, "fp16", HOPPER)[0], joined)
    compiled = compile_cubin("factor_grad_wgmma.cu", tile.defines(bias), arch="sm_90a", name="factor_grad")
    assert compiled.spill_bytes == 0 and not compiled.serialized
    assert compiled.registers <= 65536 // tile.config.threads


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 25088, 10**6])
def test_splits_cover_all_rows_and_bound_the_workspace(rows: int) -> None:
    tiles = [FactorGrad(pattern, "bf16", shared_limit=HOPPER).tile for pattern in PATTERNS]
    hopper = [WgmmaGradTiling(p, "bf16", configs[0]) for p in PATTERNS if (configs := wgmma_grad_configs(p, "bf16", HOPPER))]
    for tile in (*tiles, *hopper):
        pattern = tile.pattern
        for linears in (1, 3):
            splits, chunks = tile.splits(rows, 132, linears)
            assert (splits - 1) * chunks * tile.config.chunk < rows <= splits * chunks * tile.config.chunk
            assert splits == 1 or splits * linears * pattern.nnz * 4 <= 32 << 20


def test_unknown_mode_is_refused_with_the_known_ones() -> None:
    reason = grad_reason(Pattern(1, 16, 16, 1), "exact", HOPPER)
    assert reason is not None and "exact" in reason and "fp32" in reason


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize(
    ("pattern", "mode"),
    [
        (Pattern(1, 192, 48, 2), "bf16"),
        (Pattern(1, 192, 192, 3), "fp16"),
        (Pattern(1, 128, 128, 12), "fp32"),
        (Pattern(1, 384, 384, 1), "tf32"),
        (Pattern(2, 3, 5, 3), "fp32"),
    ],
    ids=str,
)
def test_variants_compile_without_spills(pattern: Pattern, mode: str, arch: str) -> None:
    tile = FactorGrad(pattern, mode, shared_limit=163 * 1024).tile
    biases = (False, True) if tile.element_bytes == 2 else (False,)
    for x_vector, bias in product((tile.x_vector, tile.element_bytes), biases):
        defines = tile.defines(x_vector, tile.dy_vector, bias)
        assert compile_cubin("factor_grad.cu", defines, arch=arch, name="factor_grad").spill_bytes == 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("vector", [1, 4])
@pytest.mark.parametrize("parts", [1, 9])
def test_sums_of_splits_compile(parts: int, vector: int, arch: str) -> None:
    compiled = compile_cubin("factor_grad_sum.cu", {"PARTS": parts, "VECTOR": vector}, arch=arch, name="factor_grad_sum")
    assert compiled.spill_bytes == 0 and compiled.stack_bytes == 0
