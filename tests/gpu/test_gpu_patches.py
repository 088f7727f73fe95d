"""Patches of images on the GPU, with position and tokens before them, by all levels of the tolerance policy."""

from itertools import cycle

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flysurgery.ops import PatchEmbedding, embedded, run
from flysurgery.patterns import Pattern
from tests.support.blocks import check_replay, normal, wide
from tests.support.oracle import product
from tests.support.problems import make_factor, make_input, make_integers, make_vector
from tests.support.tolerance import ARITHMETICS, assert_epilogue_bounded, assert_epilogue_comparable, assert_equal

pytestmark = pytest.mark.gpu

GRIDS = [(5, 4, 6), (3, 1, 7), (1, 1, 1), (19, 14, 14), (0, 2, 3)]
"""Images, and patches down and across: more and fewer than the 16 rows of a warp."""
CASES = [(96, 16, (), "patches"), (96, 16, (1, 4), "all"), (96, 16, (1,), "none"), (64, 8, (1, 4), "patches")]
CASES += [(48, 16, (1, 4), "all"), (96, 4, (1, 4), "all"), (32, 14, (1, 4), "patches")]
"""Features, the side of a patch, tokens before the patches (a class token, registers), and what has a position.

The kernel reads the first ones; of others it is one copy and PyTorch's product.
"""


def as_images(rows: Tensor, grid: tuple[int, int, int], side: int) -> Tensor:
    """The images whose patches, flattened, are the rows."""
    images, high, wide = grid
    return rows.view(images, high, wide, 3, side, side).permute(0, 3, 1, 4, 2, 5).reshape(images, 3, high * side, wide * side)


@pytest.mark.parametrize(("mode", "case"), [*zip(cycle(("fp16", "fp32", "bf16", "tf32")), CASES * 2)], ids=str, indirect=["mode"])
def test_integers_with_position_and_tokens(mode: str, case: tuple[int, int, tuple[int, ...], str]) -> None:
    """Of images of any layout; and what is written to operands counts in the next call."""
    features, side, tokens, placed = case

    def integers(*shape: int) -> Tensor:
        return make_integers(shape, seed=len(shape), mode=ARITHMETICS[mode], device="cuda")

    weight, bias, prefix = integers(features, 3, side, side), integers(features), [integers(1, each, features) for each in tokens]
    for images, high, across in GRIDS if (features, side) == (96, 16) else GRIDS[:-1]:
        x, rows = integers(images * high * across, 3 * side * side), high * across + (sum(tokens) if placed == "all" else 0)
        position = integers(1, rows, features) if placed != "none" else None
        given, pixels = PatchEmbedding(weight, bias, position, prefix), as_images(x, (images, high, across), side)
        layouts = pixels, pixels.contiguous(memory_format=torch.channels_last), torch.cat([pixels, pixels])[images:]
        for _ in range(2):
            patches = product(x, [weight.view(1, features, -1, 1)], bias).unflatten(0, (images, high * across))
            expected = torch.cat([*(each.double().expand(images, -1, -1) for each in prefix), patches], dim=1)
            if position is not None:
                expected[:, expected.shape[1] - rows :] += position.double()
            for each in layouts:
                assert_equal(run(each, given), expected)
            for operand in given.tensors:
                operand.neg_()


def test_as_accurate_as_pytorch(mode: str) -> None:
    arithmetic, features, grid = ARITHMETICS[mode], 384, (31, 14, 14)
    x, factor = make_input(31 * 196, 768, arithmetic, device="cuda"), make_factor(Pattern(1, 384, 768, 1), arithmetic, device="cuda")
    bias, position = make_vector(features, arithmetic, device="cuda"), make_input(196, features, arithmetic, device="cuda")
    images, given = as_images(x, grid, 16), PatchEmbedding(factor[0, :, :, 0].unflatten(1, (3, 16, 16)), bias, position[None], [])
    out, added = run(images, given).flatten(0, 1), position.expand(31, -1, -1).flatten(0, 1)
    check_replay(lambda: run(images, given))
    assert_epilogue_bounded(out, x, [factor], bias, lambda y: y, added, arithmetic)
    yardstick, truth = functional.linear(x, factor[0, :, :, 0], bias) + added, product(x, [factor], bias) + added.double()
    assert_epilogue_comparable(out, yardstick, truth, arithmetic)


DTYPES = ((torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8), (torch.float32, 2.0**-20))


@pytest.mark.parametrize(("case", "kind"), [*zip(CASES, cycle(DTYPES))], ids=str)
def test_gradients(case: tuple[int, int, tuple[int, ...], str], kind: tuple[torch.dtype, float]) -> None:
    """Of weights in float32, with what is computed in another dtype."""
    (features, side, tokens, placed), (dtype, rounded) = case, kind
    torch.manual_seed(3)
    images, weight = (
        normal(19, 3, 4 * side, 6 * side, dtype=dtype),
        normal(features, 3, side, side, dtype=torch.float32, deviation=0.5 / side),
    )
    rows, prefix = 24 + (sum(tokens) if placed == "all" else 0), [normal(1, each, features, dtype=torch.float32) for each in tokens]
    position = normal(1, rows, features, dtype=torch.float32) if placed != "none" else None
    given = PatchEmbedding(weight, normal(features, dtype=torch.float32), position, prefix)
    exact = wide(given)
    for tensor in (*given.tensors, *exact.tensors):
        tensor.requires_grad_()
    y, truth = embedded(images, given), exact.plainly(images.double())
    dy = normal(*y.shape, dtype=dtype)
    found = y, *torch.autograd.grad(y, given.tensors, dy)
    for ours, true in zip(found, (truth, *torch.autograd.grad(truth, exact.tensors, dy.double())), strict=True):
        assert ours.shape == true.shape and ours.dtype == (dtype if ours is y else torch.float32)
        assert float((ours.double() - true).detach().norm() / true.detach().norm()) < 4 * rounded
