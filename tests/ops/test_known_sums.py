"""Sums of rows that come with a gradient are taken for the gradient of a bias as long as they are its sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flysurgery.ops import trained
from flysurgery.ops.known_sums import keep_sums, known_sums
from tests.support import blocks
from tests.support.blocks import to_train

MARK = 1000.0


class Doubled(torch.autograd.Function):
    """Twice its input, whose gradient comes with sums that no gradient has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        dx = dy * 2.0
        keep_sums(dx, dx.new_full((2, dx.shape[-1]), MARK / 2))
        return dx


def hooked(hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor]:
    def use(y: Tensor) -> Tensor:
        y.register_hook(hook)
        return Doubled.apply(y)  # pyright: ignore[reportReturnType]

    return use


def written(gradient: Tensor) -> None:
    gradient.mul_(3.0)


USES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "another user first": (lambda y: y.sin() + Doubled.apply(y), lambda y: y.sin() + y * 2.0),
    "another user last": (lambda y: Doubled.apply(y) + y.sin(), lambda y: y * 2.0 + y.sin()),
    "a view": (lambda y: Doubled.apply(y.flatten()), lambda y: y.flatten() * 2.0),
    "a hook that replaces": (hooked(lambda gradient: gradient * 3.0), lambda y: y * 6.0),
    "a hook that writes": (hooked(written), lambda y: y * 6.0),
}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "DEVICE", "cpu")


def of_bias(use: Callable[[Tensor], Tensor], ours: bool = True) -> Tensor:
    x, operation = to_train("dense q, k, v", 7, 24)
    y = trained(x, operation) if ours else operation.plainly(x)
    return torch.autograd.grad(use(y).sum(), operation.group[0].bias)[0]


def test_they_are_taken_for_the_gradient_of_a_bias() -> None:
    assert (of_bias(lambda y: Doubled.apply(y)) == MARK).all()  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", USES)
def test_they_are_not_where_the_gradient_is_another(name: str) -> None:
    ours, plain = USES[name]
    torch.testing.assert_close(of_bias(ours), of_bias(plain, ours=False))


def test_none_are_known_of_a_gradient_without() -> None:
    gradient = torch.ones(3, 4)
    keep_sums(gradient, None)
    assert known_sums(gradient) is None
