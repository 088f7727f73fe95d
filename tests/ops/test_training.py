"""Fused gradients are those of the definitions, of every tensor, element by element; and sums that come with a gradient serve a bias."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flysurgery.errors import InferenceError
from flysurgery.gpu import graph_branch
from flysurgery.gpu.graph_branch import begin_ahead
from flysurgery.gpu.row_sums import keep_sums
from flysurgery.ops import Attention, FeedForward, Gated, attended, trained, trained_with_x, training_reason
from tests.support import blocks
from tests.support.blocks import TRAINED, dense, to_train
from tests.support.captured import races_of_steps, take_hidden_units

ROWS, WIDTH = 7, 24


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "DEVICE", "cpu")


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert float((found - expected).detach().abs().max()) <= 1e-13 * max(1.0, float(expected.detach().abs().max()))


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_are_those_of_the_definition(name: str) -> None:
    x, operation = to_train(name, ROWS, WIDTH)
    assert training_reason(x, operation) is None
    expected, found = operation.plainly(x), trained(x, operation)
    assert_near(found, expected)
    dy, inputs = torch.randn_like(expected), (x, *operation.tensors)
    for ours, theirs in zip(torch.autograd.grad(found, inputs, dy), torch.autograd.grad(expected, inputs, dy), strict=True):
        assert_near(ours, theirs)


def test_a_gradient_may_come_from_inference_mode() -> None:
    x, operation = to_train("dense q, k, v", ROWS, WIDTH)
    with torch.inference_mode():
        dy = torch.ones_like(operation.plainly(x))
    (found,) = torch.autograd.grad(trained(x, operation), (x,), dy)
    assert_near(found, torch.autograd.grad(operation.plainly(x).sum(), (x,))[0])


@pytest.mark.parametrize(("needs_x", "used"), [(True, (0, 1)), (True, (0,)), (True, (1,)), (False, (0, 1))])
@pytest.mark.parametrize("name", ["dense q, k, v", "factors side by side", "factors beside dense", "norm without weights"])
def test_the_gradient_of_other_uses_of_x_is_added(name: str, needs_x: bool, used: tuple[int, ...]) -> None:
    """Also where one of both results is not used."""
    x, operation = to_train(name, ROWS, WIDTH)
    x = x.detach()[None].requires_grad_(needs_x)
    found, expected, inputs = trained_with_x(x, operation), (operation.plainly(x), x), (x, *operation.tensors)[not needs_x :]
    assert torch.equal(found[1], x) and found[1].grad_fn is found[0].grad_fn
    weights = torch.randn_like(found[0]), torch.randn(1, WIDTH, ROWS, dtype=x.dtype).mT
    losses: list[Any] = [sum((results[place] * weights[place]).sum() for place in used) for results in (found, expected)]
    for ours, theirs in zip(*(torch.autograd.grad(loss, inputs, materialize_grads=True) for loss in losses), strict=True):
        assert_near(ours, theirs)


def test_weights_written_to_before_the_backward_pass_are_noticed_and_there_is_no_second_derivative() -> None:
    x, operation = to_train("residual", ROWS, WIDTH)
    y = trained(x, operation)
    with pytest.raises(InferenceError, match="no second derivatives"):
        torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    y = trained(x, operation)
    with torch.no_grad():
        operation.linear.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_reasons() -> None:
    x, operation = to_train("residual", ROWS, WIDTH)
    square = dense(WIDTH, WIDTH, torch.float64)
    gated = FeedForward(None, Gated((dense(WIDTH, 2 * WIDTH, torch.float64),)), square, "silu")
    assert training_reason(x, gated) == "the fused gradients of feed-forward blocks know neither gates nor inner norms"
    assert training_reason(x, Attention(x, x)) == "it has no fused gradients"
    assert "expected a residual" in str(training_reason(x, operation._replace(residual=x[:3])))


@pytest.fixture(params=[False, True])
def by_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without and with the kernel of hidden units."""
    if request.param:
        take_hidden_units(monkeypatch)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("name", TRAINED)
def test_captured_steps_wait_for_all_that_they_read(name: str, by_hand: bool, by_kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: without an optimizer, through ``data``, of which PyTorch counts nothing; a step packs first on the branch of the last."""
    x, operation = to_train(name, ROWS, 192)
    optimizer = torch.optim.SGD(operation.tensors, 0.1)
    if by_hand:
        monkeypatch.setattr(graph_branch, "_BRANCHES", 1)

    def step() -> None:
        if not by_hand:
            begin_ahead(x.device)
        trained(x, operation).sum().backward()
        if by_hand:
            for tensor in operation.tensors:
                tensor.data.sub_(0.1)
        else:
            optimizer.step()

    assert races_of_steps(step, monkeypatch) == []


@pytest.mark.parametrize("joined", [True, False])
def test_attention_writes_its_gradients_where_q_k_and_v_lie(joined: bool) -> None:
    whole = torch.randn(2, 5, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    found = []
    for ours in (True, False):
        projected = whole * 1.0
        q, k, v = projected.permute(2, 0, 3, 1, 4).unbind(0) if joined else (projected[:, :, n].transpose(1, 2) * 1.0 for n in range(3))
        y = attended(q, Attention(k, v, 0.3)) if ours else functional.scaled_dot_product_attention(q, k, v, scale=0.3)
        assert y.grad_fn is not None and ("_PartsBackward" in str(y.grad_fn.next_functions[0])) == (ours and joined)
        found.append((y, *torch.autograd.grad(y, whole, torch.ones_like(y))))
    for mine, theirs in zip(*found, strict=True):
        assert_near(mine, theirs)


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


MARK = 1000.0
doubled: Any = Doubled.apply


def hooked(y: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Tensor:
    y.register_hook(hook)
    return doubled(y)


def written(gradient: Tensor) -> None:
    gradient.mul_(3.0)


USES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "another user first": (lambda y: y.sin() + doubled(y), lambda y: y.sin() + y * 2.0),
    "another user last": (lambda y: doubled(y) + y.sin(), lambda y: y * 2.0 + y.sin()),
    "a view": (lambda y: doubled(y.flatten()), lambda y: y.flatten() * 2.0),
    "a hook that replaces": (lambda y: hooked(y, lambda gradient: gradient * 3.0), lambda y: y * 6.0),
    "a hook that writes": (lambda y: hooked(y, written), lambda y: y * 6.0),
}


@pytest.mark.parametrize("name", ["nothing else", *USES])
def test_sums_of_a_gradient_are_taken_as_long_as_they_are_its_sums(name: str) -> None:
    x, operation = to_train("dense q, k, v", ROWS, WIDTH)
    ours, plain = USES.get(name, (doubled, torch.clone))
    found, expected = (
        torch.autograd.grad(use(y).sum(), operation.group[0].bias)[0]
        for use, y in ((ours, trained(x, operation)), (plain, operation.plainly(x)))
    )
    torch.testing.assert_close(found, expected if name in USES else torch.full_like(found, MARK))
