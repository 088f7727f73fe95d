"""The tilings of single blocks: their packed weights, read as the kernel reads them, give the product, and the kernel compiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flysurgery.factors import ks_einsum
from flysurgery.ops.cuda.block_linear import ACTIVATIONS, BlockTiling, pack_blocks
from flysurgery.ops.cuda.compile import compile_cubin
from flysurgery.ops.cuda.wide_ffn import wide_tilings
from flysurgery.ops.cuda.wide_group import group_tilings
from flysurgery.ops.parts import Norm
from flysurgery.patterns import Architecture
from flysurgery.patterns.catalog import gonon, monarch

SHARED = 232448
SPILL_BYTES = 96
"""Of three classes of outputs at once, and of activations in float32, behind a row's products."""
BLOCKS = {
    "gonon 384": (gonon(1536, 384), gonon(384, 1536)),
    "gonon 768": (gonon(3072, 768), gonon(768, 3072)),
    "monarch 768": (monarch(3072, 768), monarch(768, 3072)),
    "monarch 1024": (monarch(4096, 1024), monarch(1024, 4096)),
    "uneven": (Architecture.of((2, 96, 32, 2), (2, 32, 24, 2)), Architecture.of((1, 32, 32, 3), (3, 32, 128, 1))),
}
GROUPS = {"group of 3": gonon(768, 768), "group of 3, narrower": gonon(512, 512)}


def tilings(name: str) -> tuple[BlockTiling, ...]:
    found = group_tilings(GROUPS[name], 3, SHARED) if name in GROUPS else wide_tilings(*BLOCKS[name], SHARED)
    assert not isinstance(found, str), found
    return found


def result(x: np.ndarray, mean: float, tile: BlockTiling, image: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """One row less its mean, tile by tile: gathered pieces of 8, a panel a stage; a lane's columns lie where it stores them."""
    eights = np.concatenate([x.reshape(-1, 8), np.zeros((1, 8))])  # piece -1 is empty
    panels = image.reshape(tile.weight_indices.shape)
    n, run = np.arange(tile.columns), tile.run
    lane, place = n % 8 // 2, n // 8 % run * 2 + n % 2
    stored = n // (8 * run) * 8 * run + lane * 2 * run + place
    y = np.empty((tile.tiles, tile.columns, tile.classes))
    for t in range(tile.tiles):
        for j in range(tile.classes):
            stages = eights[tile.pieces[t, j]].reshape(tile.steps, 8, 8)
            y[t, stored, j] = np.einsum("skh,sknh->n", stages, panels[t, j])
    shifts, scales, sums = columns
    return (y.reshape(-1) - mean * sums + shifts) * scales


def small_integers(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape).float()


@pytest.mark.parametrize("name", ["gonon 384", "monarch 768", "uneven", "group of 3"])
def test_the_images_hold_the_products(name: str) -> None:
    torch.manual_seed(0)
    for tile in tilings(name):
        sizes = tile.factor.in_features, tile.factor.out_features
        factor, x, bias, scale = (small_integers(*shape) for shape in (tile.factor.factor_shape, sizes[:1], sizes[1:], sizes[1:]))
        norm = Norm(small_integers(sizes[0]).clamp(-1, 1), small_integers(sizes[0]))
        image, columns = pack_blocks(tile, factor, bias, scale, norm, torch.float16)
        read = image.view(torch.float16).double().numpy(), columns.double().numpy()
        assert norm.weight is not None and norm.bias is not None
        expected = scale * (ks_einsum(((x - 2) * norm.weight + norm.bias)[None], factor)[0] + bias)
        np.testing.assert_array_equal(
            result(x.double().numpy()[list(tile.inputs)], 2.0, tile, *read), expected.double().numpy()[list(tile.outputs)]
        )


@pytest.mark.parametrize("name", BLOCKS)
def test_every_weight_and_feature_has_its_place(name: str) -> None:
    up, down = BLOCKS[name]
    for tile in tilings(name):
        used = tile.weight_indices[tile.weight_indices >= 0]
        assert np.array_equal(np.sort(used), np.arange(np.prod(tile.factor.factor_shape)))
        assert sorted(tile.outputs) == list(range(tile.factor.out_features))
    first, second, third, last = tilings(name)
    assert (first.outputs, second.outputs, third.outputs) == (second.inputs, third.inputs, last.inputs)
    assert list(first.inputs) == list(range(up.in_features)) and list(last.outputs) == list(range(down.out_features))


@pytest.mark.parametrize("name", ["gonon 768", "monarch 768", *GROUPS])
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_compiles_without_serialized_products(name: str, activation: str) -> None:
    for place, tile in enumerate(tilings(name)):
        defines = tile.defines(
            place % 2, ACTIVATIONS[activation if place == 1 else "none"], norm=place == 0, residual=place == 3, scaled=place == 3
        )
        compiled = compile_cubin("block_linear.cu", defines, arch="sm_90a", name="block_linear")
        assert compiled.serialized == ()
        assert compiled.spill_bytes <= SPILL_BYTES
        assert compiled.registers * 128 * tile.warpgroups <= 65536
        assert tile.shared_bytes + compiled.shared_bytes <= SHARED


def test_two_warpgroups_take_a_tile_twice_as_wide() -> None:
    (first, second), up = tilings("group of 3"), tilings("gonon 768")[1]
    assert (first.warpgroups, up.warpgroups) == (3, 3)
    assert (second.warpgroups, second.columns * second.classes) == (2, 384)


def test_the_copy_engine_brings_columns_that_lie_side_by_side() -> None:
    assert [tile.boxes for tile in tilings("gonon 768")] == [True, True, True, False]
    assert [tile.boxes for tile in tilings("monarch 768")] == [True, False, False, False]
    assert [tile.boxes for tile in tilings("group of 3")] == [True, False]
    widest = tilings("monarch 1024")[1]
    compiled = compile_cubin("block_linear.cu", widest.defines(0, 1, norm=0, residual=False), arch="sm_90a", name="block_linear")
    assert (widest.boxes, widest.columns, compiled.serialized, compiled.spill_bytes) == (True, 256, (), 0)


def test_what_has_no_tiling_is_named() -> None:
    up, down = BLOCKS["gonon 384"]
    assert "where both layers have two, these have 1 and 2" in str(wide_tilings(Architecture.of((1, 1536, 384, 1)), down, SHARED))
    assert "fits in 1024 bytes" in str(wide_tilings(up, down, 1024))
