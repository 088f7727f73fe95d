"""The two factors around a wide block's activation: packed panels, read as the kernel reads them, give the product, and it compiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flysurgery.factors import ks_einsum
from flysurgery.ops.cuda.block_linear import ACTIVATIONS
from flysurgery.ops.cuda.compile import compile_cubin
from flysurgery.ops.cuda.ffn_middle import MiddleTiling, fills_rounds, middle_tiling, pack_middle
from flysurgery.ops.cuda.wide_ffn import wide_middle, wide_tilings
from flysurgery.patterns import Architecture
from flysurgery.patterns.catalog import gonon, monarch

SHARED = 232448
COLUMNS = 128
BLOCKS = {
    "gonon 768": (gonon(3072, 768), gonon(768, 3072)),
    "three classes": (Architecture.of((1, 256, 128, 3), (2, 192, 64, 1)), Architecture.of((1, 64, 128, 2), (2, 128, 384, 1))),
}


def tiling(name: str) -> MiddleTiling:
    found = wide_middle(*BLOCKS[name], SHARED)
    assert not isinstance(found, str), found
    return found


def result(u: np.ndarray, tile: MiddleTiling, image: np.ndarray, biases: np.ndarray) -> np.ndarray:
    """One row: a class, a block, a piece after the other. A lane's columns of h are at once those of its operand."""
    pieces = tile.classes, tile.down.tiles, tile.pieces
    panels, shifts = image.reshape(*pieces, -1, 8, COLUMNS, 8), biases.reshape(*pieces, COLUMNS)
    n = np.arange(COLUMNS)
    lane, place = n % 8 // 2, n // 8 % 4 * 2 + n % 2
    stored = n // 32 * 32 + lane * 8 + place
    v = np.zeros((tile.down.tiles, COLUMNS))
    for j in range(tile.classes):
        stretches = np.stack([u[first : first + 64] for first in tile.places[j]]).reshape(-1, 8, 8)
        for i in range(tile.down.tiles):
            for weights, shift in zip(panels[j, i], shifts[j, i], strict=True):
                h = shift[stored] + np.einsum("skh,sknh->n", stretches, weights[: tile.stages])
                v[i, stored] += np.einsum("skh,sknh->n", h.reshape(2, 8, 8), weights[tile.stages :])
    return v.reshape(-1)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_panels_hold_the_products(name: str) -> None:
    torch.manual_seed(0)
    tile = tiling(name)
    second, third = tile.up.factor, tile.down.factor
    k2, k3 = (torch.randint(-2, 3, factor.factor_shape).float() for factor in (second, third))
    u, bias = (torch.randint(-3, 4, (size,)).double() for size in (second.in_features, second.out_features))
    image, biases = pack_middle(tile, k2, bias, k3, torch.float16)
    read = image.view(torch.float16).double().numpy(), biases.double().numpy()
    expected = ks_einsum((ks_einsum(u[None], k2.double()) + bias) / 2, k3.double())[0]
    np.testing.assert_array_equal(result(u.numpy()[list(tile.up.inputs)], tile, *read), expected.numpy()[list(tile.down.outputs)])


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_compiles_without_spills(name: str, activation: str) -> None:
    tile = tiling(name)
    for mode in (0, 1):
        compiled = compile_cubin("ffn_middle.cu", tile.defines(mode, ACTIVATIONS[activation]), arch="sm_90a", name="ffn_middle")
        assert compiled.serialized == ()
        assert compiled.spill_bytes == 0
        assert tile.shared_bytes + compiled.shared_bytes <= SHARED


def test_rounds_are_filled() -> None:
    rows = 0, 8448, 22720, 22848, 25344, 25345, 45568, 45632, 76032
    assert [each for each in rows if fills_rounds(each, 3 * 132)] == [22848, 25344, 45632, 76032]
    assert not fills_rounds(25344, 0)


def test_what_has_no_tiling_is_named() -> None:
    assert "blocks of 128" in str(wide_middle(monarch(3072, 768), monarch(768, 3072), SHARED))
    tiles = wide_tilings(*BLOCKS["gonon 768"], SHARED)
    assert not isinstance(tiles, str)
    _, second, third, _ = tiles
    assert "do not fit in 100000 bytes" in str(middle_tiling(second.factor, third.factor, second.inputs, third.outputs, 100000))
    assert "do not lie in stretches" in str(middle_tiling(second.factor, third.factor, range(768), third.outputs, SHARED))
    assert "blocks of 128" in str(middle_tiling(third.factor, second.factor, second.inputs, third.outputs, SHARED))
