"""The single-factor kernel without a GPU: its index maps emulated, its variants compiled."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from flysurgery.factors import ks_einsum
from flysurgery.ops.cuda.compile import compile_cubin
from flysurgery.ops.cuda.modes import HALVES
from flysurgery.ops.cuda.single import SingleFactor, candidates, single_reason
from flysurgery.ops.cuda.single_tiling import HEADER_BYTES, SingleConfig, SingleTiling
from flysurgery.patterns import Pattern
from tests.support.tolerance import FP32_BY_FP16_PAIRS

HOPPER = 227 * 1024
SMALL = 99 * 1024
PATTERNS = [
    Pattern(2, 3, 5, 3),
    Pattern(1, 48, 48, 1),
    Pattern(1, 20, 40, 2),
    Pattern(2, 16, 24, 4),
    Pattern(1, 24, 20, 6),
    Pattern(1, 16, 16, 12),
    Pattern(1, 10, 33, 17),
    Pattern(1, 16, 48, 32),
]


def fragment_elements(tile: SingleTiling, chunk: np.ndarray) -> np.ndarray:
    """What each lane's registers hold: (rows, KC, J) as staged to (rows, step, residue, slot k of 16), by the kernel's byte offsets."""
    config, width = tile.config, tile.element_bytes
    residues, block = config.residues, config.block_residues
    rows, inputs, _ = chunk.shape
    found = np.empty((rows, inputs // 16, block, 16), chunk.dtype)
    flat = chunk.reshape(rows, inputs // 16, 16 * block)
    together = config.residue_warps == 1 and not config.interleaved
    for warp in range(config.residue_warps):
        for t in range(4):
            for m in range(4):
                for r in range(residues):
                    if together:
                        element = t * 4 * block + m * residues + r
                    else:
                        q = t + 4 * m if config.interleaved else 4 * t + m
                        assert (q * block + warp * residues) * width % 4 == 0, "a word would start inside another"
                        element = q * block + warp * residues + r
                    slot = 8 * (m // 2) + 2 * t + m % 2  # registers a0, a1 hold k = 2t, 2t+1; a2, a3 hold k = 2t+8, 2t+9
                    found[:, :, warp * residues + r, slot] = flat[:, :, element]
    return found


def weight_slots(tile: SingleTiling, image: torch.Tensor, plane: int) -> np.ndarray:
    """The image as ldmatrix reads it: (a, ranges, output tiles, chunks, residue, step, slot k, output)."""
    config = tile.config
    ranges, outputs, chunks = tile.counts
    dtype = torch.bfloat16 if tile.mode == "bf16" else torch.float16
    halves = image[HEADER_BYTES:].view(dtype).double().numpy()
    shape = (tile.pattern.a, ranges, outputs, chunks, config.block_residues, tile.planes, config.chunk // 16, 2, config.block_outputs, 8)
    panels = halves.reshape(shape)[:, :, :, :, :, plane]
    return np.moveaxis(panels, 6, 7).reshape(*shape[:5], config.chunk // 16, config.block_outputs, 16).swapaxes(-1, -2)


def emulate(single: SingleFactor, x: np.ndarray, image: torch.Tensor) -> np.ndarray:
    """The kernel's product from staged chunks and the image, in float64, with the maps of ``load_x`` and ``store_slab``."""
    tile, pattern = single.tile, single.pattern
    config = tile.config
    a, b, c, d = pattern.factor_shape
    ranges, outputs, chunks = tile.counts
    weights = np.sum([weight_slots(tile, image, plane) for plane in range(tile.planes)], axis=0)
    y = np.full((x.shape[0], pattern.out_features), np.nan)
    block, wide = config.block_residues, config.block_outputs
    for i in range(a):
        for group in range(ranges):
            staged = np.zeros((x.shape[0], chunks * config.chunk, block))
            for q in range(c):
                for j in range(min(block, d - group * block)):
                    staged[:, q, j] = x[:, (i * c + q) * d + group * block + j]
            pieces = fragment_elements(tile, staged)  # shape: (rows, all steps, residues, 16)
            for output in range(outputs):
                piece = weights[i, group, output].swapaxes(0, 1).reshape(block, -1, 16, wide)
                product = np.einsum("nsjk,jskp->npj", pieces, piece)
                for p in range(min(wide, b - output * wide)):
                    for j in range(min(block, d - group * block)):
                        y[:, (i * b + output * wide + p) * d + group * block + j] = product[:, p, j]
    return y


def integers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("mode", ["fp16", "bf16", "tf32", "fp32"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_fragments_and_image_meet_at_the_same_inputs(pattern: Pattern, mode: str) -> None:
    factor, x = integers(pattern.factor_shape, 1), integers((3, pattern.in_features), 2)
    expected = ks_einsum(x, factor).numpy()
    for config in candidates(pattern, mode, HOPPER)[:4]:
        single = SingleFactor(pattern, mode, config, shared_limit=HOPPER)
        image = single.pack(factor.float() if mode in ("tf32", "fp32") else factor.half())
        assert image.numel() == single.tile.image_bytes
        exponent = int(image[:4].view(torch.int32))
        np.testing.assert_array_equal(emulate(single, x.numpy(), image) * 2.0**-exponent, expected)


def test_exact_image_keeps_float32_in_order() -> None:
    pattern = Pattern(2, 10, 20, 3)
    factor = torch.randn(pattern.factor_shape)
    single = SingleFactor(pattern, "exact", shared_limit=HOPPER)
    config = single.tile.config
    ranges, outputs, chunks = single.tile.counts
    shape = (2, ranges, outputs, chunks, config.block_residues, config.chunk, config.block_outputs)
    kept = single.pack(factor)[HEADER_BYTES:].view(torch.float32).reshape(shape)
    joined = kept.permute(0, 2, 6, 3, 5, 1, 4).reshape(2, outputs * config.block_outputs, chunks * config.chunk, -1)
    assert torch.equal(joined[:, :10, :20, :3], factor)
    assert not joined[:, 10:].any() and not joined[:, :, 20:].any() and not joined[:, :, :, 3:].any()


def test_pairs_of_halves_hold_22_bits_of_a_weight() -> None:
    pattern = Pattern(1, 16, 16, 1)
    factor = torch.randn(pattern.factor_shape, generator=torch.Generator().manual_seed(0)) * 1e-20
    factor[0, 0, 0, 0] = torch.inf
    single = SingleFactor(pattern, "fp32", shared_limit=HOPPER)
    image = single.pack(factor)
    exponent = int(image[:4].view(torch.int32))
    kept = np.sum([weight_slots(single.tile, image, plane) for plane in (0, 1)], axis=0)
    finite = np.sort(kept[np.isfinite(kept) & (kept != 0)]) * 2.0**-exponent
    expected = np.sort(factor.double().flatten()[1:].numpy())
    assert np.count_nonzero(~np.isfinite(kept)) == 1
    assert np.max(np.abs(finite - expected) / np.abs(expected)) <= 2.0**-FP32_BY_FP16_PAIRS.exact_bits


@pytest.mark.parametrize("mode", ["fp16", "fp32", "exact"])
def test_configurations_fit_the_device(mode: str) -> None:
    for limit in (SMALL, HOPPER):
        for pattern in (*PATTERNS, Pattern(1, 1024, 1024, 1), Pattern(1, 1024, 256, 64)):
            assert single_reason(pattern, mode, limit) is None
            for config in candidates(pattern, mode, limit):
                tile = SingleTiling(pattern, mode, config)
                assert tile.shared_bytes <= limit
                assert SingleConfig(**json.loads(json.dumps(asdict(config)))) == config
                for vector, unit in ((tile.x_vector, pattern.c), (tile.y_vector, pattern.b)):
                    assert vector in (2, 4, 8, 16) and (unit * pattern.d * tile.element_bytes) % vector == 0


def test_row_chunks_cover_all_rows() -> None:
    tile = SingleTiling(Pattern(1, 64, 64, 4), "fp16", candidates(Pattern(1, 64, 64, 4), "fp16", HOPPER)[0])
    for rows in (1, 63, 64, 65, 25088, 25216, 10**6):
        row_chunks, each = tile.row_chunks(rows, 132)
        assert (row_chunks - 1) * each * tile.config.block_rows < rows <= row_chunks * each * tile.config.block_rows


def test_unknown_mode_is_refused_with_the_known_ones() -> None:
    reason = single_reason(Pattern(1, 16, 16, 1), "fp64", HOPPER)
    assert reason is not None and "fp64" in reason and "bf16" in reason


MAX_SPILL_BYTES = 12
"""Three of 255 registers, which ptxas spills for the largest float32 tile on sm_100."""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize(
    ("pattern", "mode"),
    [
        (Pattern(1, 384, 384, 1), "fp16"),
        (Pattern(1, 192, 48, 2), "bf16"),
        (Pattern(6, 64, 64, 1), "fp32"),
        (Pattern(1, 192, 192, 3), "fp32"),
        (Pattern(1, 128, 128, 64), "tf32"),
        (Pattern(2, 3, 5, 3), "fp16"),
        (Pattern(1, 64, 64, 4), "exact"),
    ],
    ids=str,
)
def test_variants_compile_with_hardly_a_spill(pattern: Pattern, mode: str, arch: str) -> None:
    config = candidates(pattern, mode, 163 * 1024)[0]
    for wide in (False, True) if mode in HALVES else (False,):
        tile = SingleTiling(pattern, mode, config, wide=wide)
        for vector in {tile.x_vector, tile.element_bytes}:
            assert compile_cubin("single_factor.cu", tile.defines(vector), arch=arch, name="single_factor").spill_bytes <= MAX_SPILL_BYTES
