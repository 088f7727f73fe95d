"""Patches of images by the dense kernel on the GPU, with position and tokens before them, by all levels of the tolerance policy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flysurgery import ops
from flysurgery.gpu.dense import run_patches
from flysurgery.ops import PatchEmbedding
from flysurgery.patterns import Pattern
from tests.support.oracle import product
from tests.support.problems import make_factor, make_input, make_integers, make_vector
from tests.support.tolerance import ARITHMETICS, assert_epilogue_bounded, assert_epilogue_comparable, assert_equal

pytestmark = pytest.mark.gpu

GRIDS = [(5, 4, 6), (3, 1, 7), (1, 1, 1), (19, 14, 14)]
"""Images, and patches down and across: more and fewer than the 16 rows of a warp."""
CASES = [(96, 16, (), "patches"), (96, 16, (1, 4), "all"), (96, 16, (1,), "none"), (64, 8, (1, 4), "patches")]
"""Features, the side of a patch, tokens before the patches (a class token, registers), and what has a position."""


def as_images(rows: Tensor, grid: tuple[int, int, int], side: int) -> Tensor:
    """The images whose patches, flattened, are the rows."""
    images, high, wide = grid
    return rows.view(images, high, wide, 3, side, side).permute(0, 3, 1, 4, 2, 5).reshape(images, 3, high * side, wide * side)


def run(images: Tensor, factor: Tensor, bias: Tensor | None, position: Tensor | None, prefix: Sequence[Tensor], mode: str) -> Tensor:
    side = int((factor.shape[2] // 3) ** 0.5)
    return run_patches(images, factor[0, :, :, 0].unflatten(1, (3, side, side)), bias, position, prefix, mode)


@pytest.mark.parametrize(("features", "side", "tokens", "placed"), CASES)
def test_integers_with_position_and_tokens(mode: str, features: int, side: int, tokens: tuple[int, ...], placed: str) -> None:
    arithmetic, pattern = ARITHMETICS[mode], Pattern(1, features, 3 * side * side, 1)
    factor, bias = (make_integers(shape, seed=1, mode=arithmetic, device="cuda") for shape in (pattern.factor_shape, (features,)))
    prefix = [make_integers((1, each, features), seed=each, mode=arithmetic, device="cuda") for each in tokens]
    for images, high, wide in GRIDS:
        x = make_integers((images * high * wide, pattern.in_features), seed=2, mode=arithmetic, device="cuda")
        patches = product(x, [factor], bias).unflatten(0, (images, high * wide))
        expected, position = torch.cat([*(each.double().expand(images, -1, -1) for each in prefix), patches], dim=1), None
        if placed != "none":
            rows = high * wide + (sum(tokens) if placed == "all" else 0)
            position = make_integers((1, rows, features), seed=3, mode=arithmetic, device="cuda")
            expected[:, expected.shape[1] - rows :] += position.double()
        assert_equal(run(as_images(x, (images, high, wide), side), factor, bias, position, prefix, mode), expected)


def test_as_accurate_as_pytorch(mode: str) -> None:
    arithmetic, features, grid = ARITHMETICS[mode], 384, (31, 14, 14)
    pattern = Pattern(1, features, 768, 1)
    x, factor = make_input(31 * 196, 768, arithmetic, device="cuda"), make_factor(pattern, arithmetic, device="cuda")
    bias, position = make_vector(features, arithmetic, device="cuda"), make_input(196, features, arithmetic, device="cuda")
    out = run(as_images(x, grid, 16), factor, bias, position, [], mode)
    added = position.expand(31, -1, -1).flatten(0, 1)
    assert_epilogue_bounded(out.flatten(0, 1), x, [factor], bias, lambda y: y, added, arithmetic)
    yardstick, truth = functional.linear(x, factor[0, :, :, 0], bias) + added, product(x, [factor], bias) + added.double()
    assert_epilogue_comparable(out.flatten(0, 1), yardstick, truth, arithmetic)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("features", "side", "all_rows"), [(48, 16, True), (64, 8, False), (96, 4, True), (32, 14, False)])
def test_whichever_product_takes_the_patches(dtype: torch.dtype, features: int, side: int, all_rows: bool) -> None:
    """Patches that the kernel reads, and those of which it is one copy and PyTorch's product."""
    generator = torch.Generator("cuda").manual_seed(3)

    def normal(*shape: int, deviation: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device="cuda") * deviation).to(dtype)

    images, bias = normal(5, 3, 4 * side, 6 * side), normal(features)
    weight = normal(features, 3, side, side, deviation=0.5 / side)
    prefix, position = [normal(1, 1, features), normal(1, 4, features)], normal(1, 24 + 5 * all_rows, features)
    truth = PatchEmbedding(weight.double(), bias.double(), position.double(), [t.double() for t in prefix]).plainly(images.double())
    embedding = PatchEmbedding(weight, bias, position, prefix)
    out, yardstick = ops.run(images, embedding), embedding.plainly(images)
    assert out.shape == yardstick.shape and out.dtype == dtype
    assert float((out.double() - truth).norm()) <= 3 * float((yardstick.double() - truth).norm()) + 1e-7 * float(truth.norm())
    assert_equal(out[:, :5], yardstick[:, :5])


def test_what_is_written_to_position_and_tokens_counts_in_the_next_call() -> None:
    images, weight = torch.zeros(2, 3, 32, 32, device="cuda"), torch.zeros(48, 3, 16, 16, device="cuda")
    position, token = torch.zeros(1, 5, 48, device="cuda"), torch.zeros(1, 1, 48, device="cuda")
    for value in (0.0, 1.0):
        position.fill_(value)
        token.fill_(2 * value)
        out = ops.run(images, PatchEmbedding(weight, None, position, [token]))
        assert_equal(out[:, 1:], torch.full((2, 4, 48), value, device="cuda"))
        assert_equal(out[:, :1], torch.full((2, 1, 48), 3 * value, device="cuda"))


def test_images_that_are_strided_or_none(mode: str) -> None:
    arithmetic = ARITHMETICS[mode]
    factor = make_factor(Pattern(1, 96, 768, 1), arithmetic, device="cuda")
    x, token = make_input(24, 768, arithmetic, device="cuda"), make_vector(96, arithmetic, device="cuda")[None]
    images = as_images(x, (4, 2, 3), 16)
    whole = run(images, factor, None, None, [token], mode)
    assert_equal(run(images.contiguous(memory_format=torch.channels_last), factor, None, None, [token], mode), whole)
    assert_equal(run(images[1:3], factor, None, None, [token], mode), whole[1:3])
    assert run(images[:0], factor, None, None, [token], mode).shape == (0, 7, 96)
