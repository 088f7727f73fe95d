"""Patches of images by the dense kernel on the GPU, by all levels of the tolerance policy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flysurgery.gpu.dense_patches import run_patches
from flysurgery.patterns import Pattern
from tests.support.oracle import product
from tests.support.problems import make_factor, make_input, make_integers, make_vector
from tests.support.tolerance import ARITHMETICS, assert_epilogue_bounded, assert_epilogue_comparable, assert_equal

pytestmark = pytest.mark.gpu

GRIDS = [(5, 4, 6), (3, 1, 7), (1, 1, 1), (19, 14, 14)]
"""Images, and patches down and across: more and fewer than the 16 rows of a warp."""


def as_images(rows: Tensor, grid: tuple[int, int, int], side: int) -> Tensor:
    """The images whose patches, flattened, are the rows."""
    images, high, wide = grid
    return rows.view(images, high, wide, 3, side, side).permute(0, 3, 1, 4, 2, 5).reshape(images, 3, high * side, wide * side)


def run(images: Tensor, factor: Tensor, bias: Tensor | None, mode: str) -> Tensor:
    side = int((factor.shape[2] // 3) ** 0.5)
    return run_patches(images, factor[0, :, :, 0].unflatten(1, (3, side, side)), bias, mode)


@pytest.mark.parametrize(("features", "side"), [(96, 16), (64, 8)])
def test_integers(mode: str, features: int, side: int) -> None:
    arithmetic, pattern = ARITHMETICS[mode], Pattern(1, features, 3 * side * side, 1)
    factor, bias = (make_integers(shape, seed=1, mode=arithmetic, device="cuda") for shape in (pattern.factor_shape, (features,)))
    for images, high, wide in GRIDS:
        x = make_integers((images * high * wide, pattern.in_features), seed=2, mode=arithmetic, device="cuda")
        expected = product(x, [factor], bias).unflatten(0, (images, high * wide))
        assert_equal(run(as_images(x, (images, high, wide), side), factor, bias, mode), expected)


def test_as_accurate_as_pytorch(mode: str) -> None:
    arithmetic, features, grid = ARITHMETICS[mode], 384, (31, 14, 14)
    x, factor = make_input(31 * 196, 768, arithmetic, device="cuda"), make_factor(Pattern(1, features, 768, 1), arithmetic, device="cuda")
    bias = make_vector(features, arithmetic, device="cuda")
    out = run(as_images(x, grid, 16), factor, bias, mode).flatten(0, 1)
    assert_epilogue_bounded(out, x, [factor], bias, lambda y: y, None, arithmetic)
    assert_epilogue_comparable(out, functional.linear(x, factor[0, :, :, 0], bias), product(x, [factor], bias), arithmetic)


def test_images_that_are_strided_or_none_and_the_operator_is_well_behaved(mode: str) -> None:
    arithmetic = ARITHMETICS[mode]
    factor = make_factor(Pattern(1, 96, 768, 1), arithmetic, device="cuda")
    images = as_images(make_input(24, 768, arithmetic, device="cuda"), (4, 2, 3), 16)
    whole = run(images, factor, None, mode)
    assert_equal(run(images.contiguous(memory_format=torch.channels_last), factor, None, mode), whole)
    assert_equal(run(images[1:3], factor, None, mode), whole[1:3])
    assert run(images[:0], factor, None, mode).shape == (0, 6, 96)
    weight = torch.ones(96, 3, 16, 16, device="cuda").to(images.dtype)
    torch.library.opcheck(torch.ops.flysurgery.dense_patches.default, (images, weight, None, mode))
