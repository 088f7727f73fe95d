"""Gradients of embedded patches are those of the definition, whatever stands before the patches; and copies keep every bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flysurgery.errors import InferenceError
from flysurgery.ops import PatchEmbedding, embedded
from flysurgery.ops.vectors import copy_wide

FEATURES, PATCHES = 6, 12
TOKENS = {"no token": (), "a class token": (1,), "a class token and registers": (1, 4)}
FORMS = [(tokens, placed, bias) for tokens in TOKENS for placed in ("none", "patches", "all") for bias in (True, False)]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def made(tokens: str, placed: str, bias: bool, image: bool = False) -> PatchEmbedding:
    prefix = [drawn(1, count, FEATURES) for count in TOKENS[tokens]]
    rows = PATCHES + (sum(TOKENS[tokens]) if placed == "all" else 0)
    weight, position = drawn(FEATURES, 3, 4, 4), drawn(1, rows, FEATURES) if placed != "none" else None
    given = PatchEmbedding(weight, drawn(FEATURES) if bias else None, position, prefix, image)
    for tensor in given.tensors:
        tensor.requires_grad_()
    return given


IMAGES = drawn(5, 3, 12, 16)
LAYOUTS = [IMAGES, IMAGES.contiguous(memory_format=torch.channels_last), torch.cat([IMAGES, IMAGES], dim=3)[..., 3:19]]


def of_tensors(y: Tensor, given: PatchEmbedding, dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, [each for each in given.tensors if each.requires_grad], dy)


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert float((found - expected).abs().max()) <= 1e-13 * float(expected.abs().max())


@pytest.mark.parametrize("form", [*FORMS, ("no token", "none", True, True)])
def test_gradients_are_those_of_the_definition(form: Any) -> None:
    given = made(*form)
    for x in LAYOUTS:
        y, expected = embedded(x, given), given.plainly(x)
        assert_near(y.detach(), expected.detach())
        dy = drawn(*y.shape)
        found = of_tensors(y.add_(0.0), given, dy)  # others may write to the result
        for ours, theirs in zip(found, of_tensors(expected, given, dy), strict=True):
            assert_near(ours, theirs)
        assert len({each.untyped_storage().data_ptr() for each in found}) == len(found), "each may be written to, as clipping does"


@pytest.mark.parametrize("learning", range(4))
def test_one_tensor_learns_alone(learning: int) -> None:
    given = made("a class token", "all", True)
    for place, tensor in enumerate(given.tensors):
        tensor.requires_grad_(place == learning)
    dy = drawn(5, PATCHES + 1, FEATURES)
    assert_near(*of_tensors(embedded(IMAGES, given), given, dy), *of_tensors(given.plainly(IMAGES), given, dy))


def test_images_have_gradients_and_there_may_be_none() -> None:
    given = made("a class token", "all", True)
    x = IMAGES.clone().requires_grad_()
    dy = drawn(5, PATCHES + 1, FEATURES)
    assert_near(*torch.autograd.grad(embedded(x, given), x, dy), *torch.autograd.grad(given.plainly(x), x, dy))
    y = embedded(IMAGES[:0], given)
    assert y.shape == (0, PATCHES + 1, FEATURES)
    assert not any(each.any() for each in of_tensors(y, given, y))


def test_there_is_no_second_derivative() -> None:
    given = made("a class token", "all", True)
    y = embedded(IMAGES, given)
    with pytest.raises(InferenceError, match="no second derivatives"):
        torch.autograd.grad(y, given.weight, torch.ones_like(y), create_graph=True)


@pytest.mark.parametrize("form", FORMS)
def test_errors_are_those_of_autocast(form: tuple[str, str, bool]) -> None:
    """Weights are float32, and what is computed bfloat16."""
    exact, given = made(*form), made(*form)
    for tensor in given.tensors:
        tensor.data = tensor.data.float()
    expected = exact.plainly(IMAGES)
    dy = drawn(*expected.shape)
    truth = [expected, *of_tensors(expected, exact, dy)]
    with torch.autocast("cpu", torch.bfloat16):
        yardstick, found = given.by_product(IMAGES.bfloat16()).bfloat16(), embedded(IMAGES.bfloat16(), given)
    assert found.dtype == torch.bfloat16
    theirs, ours = ([y, *of_tensors(y, given, dy.bfloat16())] for y in (yardstick, found))
    for one, other, true in zip(ours, theirs, truth, strict=True):
        assert one.dtype == other.dtype
        assert error(one, true) <= 1.25 * error(other, true)


def error(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true).detach().norm() / true.detach().norm())


class Copies(TorchDispatchMode):
    """The bytes of an element of each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.sizes.append(args[0].element_size())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "columns", "first", "of_element"),
    [
        (torch.bfloat16, 16, 0, 16),
        (torch.bfloat16, 16, 8, 16),
        (torch.bfloat16, 16, 4, 8),
        (torch.bfloat16, 14, 0, 4),
        (torch.bfloat16, 14, 2, 4),
        (torch.bfloat16, 14, 1, 2),
        (torch.bfloat16, 7, 0, 2),
        (torch.float32, 16, 0, 16),
        (torch.float32, 7, 0, 4),
        (torch.float64, 2, 0, 16),
        (torch.float64, 7, 0, 8),
    ],
)
def test_copies_are_wide_and_keep_every_bit(dtype: torch.dtype, columns: int, first: int, of_element: int) -> None:
    source = torch.arange(3 * 5 * 64).view(3, 5, 64).to(dtype)[:, ::2, first : first + columns].transpose(0, 1)
    source[0, 0, 0] = torch.nan
    to = torch.zeros((3, 3, columns), dtype=dtype)
    with Copies() as seen:
        copy_wide(to, source)
    assert seen.sizes == [of_element]
    assert torch.equal(to.view(torch.uint8), source.contiguous().view(torch.uint8))
