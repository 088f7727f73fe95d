"""The packed weights of a dense layer, read as the kernel reads them, give the product."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flysurgery.ops.cuda.dense import _in_turn, pack_dense
from flysurgery.ops.cuda.dense_tiling import DenseTiling, dense_tiling

SHARED_BYTES = 163 * 1024


def result(x: np.ndarray, tile: DenseTiling, image: np.ndarray, columns: np.ndarray) -> np.ndarray:  # shape: (out_features,)
    """One row, batch by batch, its inputs as lanes hold them; a lane's columns lie where it stores them."""
    k, n = np.arange(16), np.arange(tile.columns)
    order = k % 8 // 2 * 4 + k // 8 * 2 + k % 2 if tile.element_bytes == 4 else k
    taken = x.reshape(-1, tile.batch // 16, 16)[:, :, order].reshape(-1, tile.batch // 16, 2, 8)
    panels = image.reshape(tile.out_features // tile.columns, -1, tile.planes, tile.batch // 16, 2, tile.columns, 8)
    sums = np.einsum("bskh,cbpsknh->cn", taken, panels)
    group, within = n // (8 * tile.run), n % (8 * tile.run)
    places = group * 8 * tile.run + within % 8 // 2 * 2 * tile.run + within // 8 * 2 + within % 2
    y = np.zeros_like(sums)
    y[:, places] = sums
    undo = 2.0**-13 if tile.element_bytes == 4 else 1.0
    return y.reshape(-1) * undo * columns[0] + columns[1]


@pytest.mark.parametrize("mode", ["fp16", "bf16", "tf32", "fp32"])
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 32), (192, 384), (384, 96)])
def test_the_image_holds_the_product(mode: str, in_features: int, out_features: int) -> None:
    tile = dense_tiling(in_features, out_features, mode, SHARED_BYTES, wgmma=False)
    assert isinstance(tile, DenseTiling), tile
    generator = torch.Generator().manual_seed(0)
    shapes = ((out_features, in_features), (in_features,), (out_features,), (out_features,))
    weight, x, bias, scale = (torch.randint(-3, 4, shape, generator=generator).float() for shape in shapes)
    weight[1] = 0.0
    if mode in ("tf32", "fp32"):  # whose outputs have scales of their own
        weight[0] *= 2.0**100
    image, columns = pack_dense(tile, weight, bias, scale)
    read = image.view(torch.bfloat16 if mode == "bf16" else torch.float16).double().numpy()
    expected = scale.double() * (weight.double() @ x.double() + bias.double())
    np.testing.assert_array_equal(result(x.double().numpy(), tile, read, columns.double().numpy()), expected.numpy())


@pytest.mark.parametrize("mode", ["fp16", "fp32"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("gate", [0, 1])
def test_each_block_has_columns_of_the_gate_and_of_the_value(mode: str, parts: int, gate: int) -> None:
    tile = dense_tiling(64, 768, mode, SHARED_BYTES, wgmma=False, gated=True)
    assert isinstance(tile, DenseTiling), tile
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randint(-3, 4, shape, generator=generator).float() for shape in ((768, 64), (768,), (64,)))
    in_turn = [_in_turn(tile, whole.chunk(parts), gate) for whole in (weight, bias)]
    image, columns = pack_dense(tile, *in_turn, None)
    y = result(x.double().numpy(), tile, image.view(torch.float16).double().numpy(), columns.double().numpy())
    halves = y.reshape(-1, 2, tile.columns // 2).swapaxes(0, 1).reshape(2, -1)
    expected = (weight.double() @ x.double() + bias.double()).numpy().reshape(2, -1)
    np.testing.assert_array_equal(halves, expected[[gate, 1 - gate]])


def test_halves_of_a_pair_add_up() -> None:
    tile = dense_tiling(64, 32, "fp32", SHARED_BYTES, wgmma=False)
    assert isinstance(tile, DenseTiling), tile
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 30, 32)[:, None]
    image, columns = pack_dense(tile, weight, None, None)
    read = image.view(torch.float16).double().numpy()
    for index in (0, 17, 63):
        found = result(np.eye(64)[index], tile, read, columns.double().numpy())
        np.testing.assert_allclose(found, weight[:, index].double().numpy(), rtol=2.0**-21, atol=0)


@pytest.mark.parametrize("mode", ["tf32", "fp32"])
def test_the_largest_weights_stay_finite(mode: str) -> None:
    tile = dense_tiling(64, 32, mode, SHARED_BYTES, wgmma=False)
    assert isinstance(tile, DenseTiling), tile
    weight = 2.0 ** torch.arange(96, 128).float()[:, None].expand(32, 64)
    image, columns = pack_dense(tile, weight, None, None)
    found = result(np.eye(64)[0], tile, image.view(torch.float16).double().numpy(), columns.double().numpy())
    np.testing.assert_array_equal(found, weight[:, 0].double().numpy())


def test_sizes_without_a_tile_are_named() -> None:
    assert "multiples of 64 inputs and 32 outputs, got 100 and 384" in str(dense_tiling(100, 384, "fp16", SHARED_BYTES, wgmma=False))
    assert "exceed" in str(dense_tiling(65536, 384, "fp32", SHARED_BYTES, wgmma=False))
    assert "no mode 'exact'" in str(dense_tiling(384, 384, "exact", SHARED_BYTES, wgmma=False))
