"""Patches of images and what stands before them: the values, the gradients, and what is refused; and that copies keep every bit."""

from math import gcd
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flysurgery.errors import BackendError, InferenceError
from flysurgery.ops import PatchEmbedding, choose_launches, embedded, reason, run
from flysurgery.ops.attention import copy_wide

FEATURES, PATCHES = 6, 12
TOKENS = {"no token": (), "a class token": (1,), "a class token and registers": (1, 4)}
FORMS = [(tokens, placed, bias) for tokens in TOKENS for placed in ("none", "patches", "all") for bias in (True, False)]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


IMAGES = drawn(5, 3, 12, 16)
LAYOUTS = [IMAGES, IMAGES.contiguous(memory_format=torch.channels_last), torch.cat([IMAGES, IMAGES], dim=3)[..., 3:19]]


def made(tokens: str = "a class token", placed: str = "all", bias: bool = True, image: bool = False) -> PatchEmbedding:
    prefix = [drawn(1, count, FEATURES) for count in TOKENS[tokens]]
    rows = PATCHES + (sum(TOKENS[tokens]) if placed == "all" else 0)
    weight, position = drawn(FEATURES, 3, 4, 4), drawn(1, rows, FEATURES) if placed != "none" else None
    given = PatchEmbedding(weight, drawn(FEATURES) if bias else None, position, prefix, image)
    for tensor in given.tensors:
        tensor.requires_grad_()
    return given


def of_tensors(y: Tensor, given: PatchEmbedding, dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, [each for each in given.tensors if each.requires_grad], dy)


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert float((found - expected).detach().abs().max()) <= 1e-13 * float(expected.detach().abs().max())


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tensors of any device through, to PyTorch's product."""
    monkeypatch.setattr(choose_launches, "_decided", {})
    monkeypatch.setattr(choose_launches, "_obstacle", lambda *_: None)


def by_hand(given: PatchEmbedding) -> Tensor:
    """Token by token."""
    tokens = [each.expand(5, -1, -1) for each in given.prefix]
    for place in range(PATCHES):
        row, column = 4 * (place // 4), 4 * (place % 4)
        patch = IMAGES[:, :, row : row + 4, column : column + 4].flatten(1) @ given.weight.flatten(1).T
        tokens.append((patch if given.bias is None else patch + given.bias)[:, None])
    result = torch.cat(tokens, dim=1)
    if given.position is not None:
        rows = given.position.shape[-2]
        result = torch.cat([result[:, :-rows], result[:, -rows:] + given.position], dim=1)
    return result


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("form", [*FORMS, ("no token", "none", True, True)])
def test_values_and_gradients_are_those_of_the_definition(form: Any) -> None:
    given = made(*form)
    if not given.image:
        assert_near(given.plainly(IMAGES), by_hand(given))
    for x in LAYOUTS:
        y, expected = embedded(x, given), given.plainly(x)
        assert_near(y, expected)
        with torch.no_grad():
            assert_near(run(x, given), expected)
        dy = drawn(*y.shape)
        found = of_tensors(y.add_(0.0), given, dy)  # others may write to the result
        for ours, theirs in zip(found, of_tensors(expected, given, dy), strict=True):
            assert_near(ours, theirs)
        assert len({each.untyped_storage().data_ptr() for each in found}) == len(found), "each may be written to, as clipping does"


@pytest.mark.parametrize("learning", range(4))
def test_one_tensor_learns_alone(learning: int) -> None:
    given, dy = made(), drawn(5, PATCHES + 1, FEATURES)
    for place, tensor in enumerate(given.tensors):
        tensor.requires_grad_(place == learning)
    assert_near(*of_tensors(embedded(IMAGES, given), given, dy), *of_tensors(given.plainly(IMAGES), given, dy))


def test_images_have_gradients_and_there_may_be_none_but_no_second_derivative() -> None:
    given, x, dy = made(), IMAGES.clone().requires_grad_(), drawn(5, PATCHES + 1, FEATURES)
    assert_near(*torch.autograd.grad(embedded(x, given), x, dy), *torch.autograd.grad(given.plainly(x), x, dy))
    y = embedded(IMAGES[:0], given)
    assert y.shape == given.by_product(IMAGES[:0]).shape == (0, PATCHES + 1, FEATURES)
    assert not any(each.any() for each in of_tensors(y, given, y))
    with pytest.raises(InferenceError, match="no second derivatives"):
        torch.autograd.grad(embedded(IMAGES, given), given.weight, dy, create_graph=True)


@pytest.mark.parametrize("form", FORMS[::3])
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
        assert float((one - true).detach().norm()) <= 1.25 * float((other - true).detach().norm())


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize(
    ("position", "tokens", "words"),
    [
        (drawn(1, 11, FEATURES), [], "12 patches and 0 tokens before them have no position of 11 rows"),
        (drawn(14, FEATURES), [drawn(1, 1, FEATURES)], "12 patches and 1 tokens before them have no position of 14 rows"),
        (drawn(PATCHES, 5), [], r"rows of 6 features, got a tensor of shape \(12, 5\)"),
        (None, [drawn(2, 1, FEATURES)], r"rows of 6 features, got a tensor of shape \(2, 1, 6\)"),
        (None, [drawn(FEATURES)], r"rows of 6 features, got a tensor of shape \(6,\)"),
        (drawn(PATCHES, FEATURES).float(), [], "torch.float64, got torch.float32"),
    ],
)
def test_rows_of_no_token_are_refused(position: Tensor | None, tokens: list[Tensor], words: str) -> None:
    with pytest.raises(BackendError, match=words):
        run(IMAGES, PatchEmbedding(drawn(FEATURES, 3, 4, 4), None, position, tokens))


def test_images_that_are_no_whole_patches_are_refused_and_kernels_need_a_gpu(request: pytest.FixtureRequest) -> None:
    given = PatchEmbedding(drawn(FEATURES, 3, 4, 4), None)
    assert "CUDA" in str(reason(IMAGES, given))
    request.getfixturevalue("taken")
    for height in (10, 0):
        assert f"images of {height}x16 are not cut into patches of 4x4" in str(reason(IMAGES[:, :, :height], given))


class Copies(TorchDispatchMode):
    """The bytes of an element of each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.sizes.append(args[0].element_size())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("columns", [2, 7, 14, 16])
@pytest.mark.parametrize("first", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_copies_are_wide_and_keep_every_bit(dtype: torch.dtype, columns: int, first: int) -> None:
    """An element of the copy is as wide as what begins and ends at its multiples, and 16 bytes at most."""
    source = torch.arange(3 * 5 * 64).view(3, 5, 64).to(dtype)[:, ::2, first : first + columns].transpose(0, 1)
    source[0, 0, 0] = torch.nan
    to = torch.zeros((3, 3, columns), dtype=dtype)
    with Copies() as seen:
        copy_wide(to, source)
    assert seen.sizes == [gcd(16, columns * dtype.itemsize, first * dtype.itemsize)]
    assert torch.equal(to.view(torch.uint8), source.contiguous().view(torch.uint8))
