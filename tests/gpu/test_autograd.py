"""Gradients of the CUDA backend's operators, with the kernels emulated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.factors import ks_einsum
from flysurgery.gpu import weight_cache as derivation
from flysurgery.gpu.autograd import EagerLinear
from flysurgery.patterns import Architecture
from tests.gpu.emulation import EmulatedProduct
from tests.support.problems import make_factors, make_input, make_integers, make_vector
from tests.support.tolerance import FP32, FP64, assert_equal

TWO = Architecture.of((2, 3, 4, 3), (1, 8, 5, 3))
THREE = Architecture.of((3, 2, 4, 2), (2, 3, 5, 4), (2, 5, 6, 4))
ONE = Architecture.of((2, 3, 5, 3))

pytestmark = pytest.mark.usefixtures("emulated")


Call = Callable[[Tensor, list[Tensor], list[Tensor], int], Tensor]


def operands(architecture: Architecture, linears: int, rows: int = 4) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Small integers, whose products and sums are exact in any order."""
    draw = partial(make_integers, mode=FP64)
    x = draw((rows, architecture.in_features), seed=0).requires_grad_()
    shapes = [pattern.factor_shape for _ in range(linears) for pattern in architecture]
    factors = [draw(shape, seed=1 + index).requires_grad_() for index, shape in enumerate(shapes)]
    biases = [draw((architecture.out_features,), seed=50 + index).requires_grad_() for index in range(linears)]
    return x, factors, biases


def eager(x: Tensor, factors: list[Tensor], biases: list[Tensor], linears: int) -> Tensor:
    return EagerLinear.apply(x.dtype, linears, "fp32", len(factors), x, *factors, *biases)  # pyright: ignore[reportReturnType]


def registered(x: Tensor, factors: list[Tensor], biases: list[Tensor], linears: int) -> Tensor:
    return torch.ops.flysurgery.ks_linear(x, factors, biases, linears, "fp32")


def reference(x: Tensor, factors: list[Tensor], biases: list[Tensor], linears: int) -> Tensor:
    length, outputs = len(factors) // linears, []
    for n in range(linears):
        value = x
        for factor in reversed(factors[n * length : (n + 1) * length]):
            value = ks_einsum(value, factor)
        outputs.append(value + biases[n] if biases else value)
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("call", [eager, registered])
@pytest.mark.parametrize(("architecture", "linears"), [(ONE, 1), (TWO, 1), (THREE, 1), (TWO, 3)], ids=str)
def test_gradcheck(call: Call, architecture: Architecture, linears: int) -> None:
    x, factors, biases = operands(architecture, linears)
    count = len(factors)

    def layer(x: Tensor, *parameters: Tensor) -> Tensor:
        copies = [parameter.clone() for parameter in parameters]  # gradcheck writes through .data, which the cache cannot see
        return call(x, copies[:count], copies[count:], linears)

    assert torch.autograd.gradcheck(layer, (x, *factors, *biases))


@pytest.mark.parametrize("mode", ["fp32", "exact"])
@pytest.mark.parametrize("trained", [False, True])
def test_one_row_without_leading_dimensions(trained: bool, mode: str) -> None:
    x, factors, biases = operands(TWO, 1, rows=1)
    factors = [factor.detach().requires_grad_(trained) for factor in factors]
    row = x.detach()[0].requires_grad_()
    wanted = [*biases, *(factors if trained else [])]
    out = EagerLinear.apply(x.dtype, 1, mode, len(factors), row, *factors, *biases)
    dx, *found = torch.autograd.grad(out.sum(), (row, *wanted))  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    expected_dx, *expected = torch.autograd.grad(reference(x, factors, biases, 1).sum(), (x, *wanted))
    assert_equal(dx, expected_dx[0])
    for left, right in zip(found, expected, strict=True):
        assert_equal(left, right)


@pytest.mark.parametrize("call", [eager, registered])
def test_only_what_needs_gradients_gets_them(call: Call) -> None:
    for frozen in ("x", "factors", "biases"):
        x, factors, biases = operands(TWO, 3)
        thawed = {"x": [x], "factors": factors, "biases": biases}
        for tensor in thawed.pop(frozen):
            tensor.requires_grad_(False)
        wanted = [tensor for tensors in thawed.values() for tensor in tensors]
        found = torch.autograd.grad(call(x, factors, biases, 3).sum(), wanted)
        expected = torch.autograd.grad(reference(x, factors, biases, 3).sum(), wanted)
        for left, right in zip(found, expected, strict=True):
            assert_equal(left, right)


@pytest.mark.parametrize("call", [eager, registered])
def test_no_rows_give_zero_gradients(call: Call) -> None:
    x, factors, biases = operands(TWO, 1, rows=0)
    out = call(x, factors, biases, 1)
    assert out.shape == (0, TWO.out_features)
    dx, *others = torch.autograd.grad(out.sum(), (x, *factors, *biases))
    assert dx.shape == x.shape
    assert all(not other.any() for other in others)


@pytest.mark.parametrize("call", [eager, registered])
def test_double_backward_is_refused(call: Call) -> None:
    x, factors, biases = operands(TWO, 1)
    for frozen in ([], factors):
        for factor in frozen:
            factor.requires_grad_(False)
        (dx,) = torch.autograd.grad(call(x, factors, biases, 1).square().sum(), x, create_graph=True)
        with pytest.raises(BackendError, match="backend='bmm'"):
            torch.autograd.grad(dx.sum(), x)


def test_wider_factors_get_gradients_in_their_own_dtype() -> None:
    x = make_input(4, TWO.in_features, FP32).requires_grad_()
    factors = [factor.requires_grad_() for factor in make_factors(TWO, FP64)]
    biases = [make_vector(TWO.out_features, FP64).requires_grad_()]
    dx, *others = torch.autograd.grad(eager(x, factors, biases, 1).sum(), (x, *factors, *biases))
    assert dx.dtype == torch.float32
    assert all(other.dtype == torch.float64 for other in others)


@pytest.mark.parametrize("linears", [1, 3])
def test_operators_keep_their_schemas(linears: int) -> None:
    x, factors, biases = operands(TWO, linears)
    arguments = (x, factors, biases, linears, "fp32")
    torch.library.opcheck(torch.ops.flysurgery.ks_linear.default, arguments)
    with torch.no_grad():
        dy = registered(*arguments[:4])
    detached = [factor.detach() for factor in factors]
    torch.library.opcheck(torch.ops.flysurgery.ks_linear_input_gradient.default, (dy, detached, linears, "fp32"))
    for with_input in (False, True):
        arguments = (dy, x.detach(), detached, linears, "fp32", with_input, not with_input)
        torch.library.opcheck(torch.ops.flysurgery.ks_linear_gradients.default, arguments)


def test_the_exact_mode_has_gradients_of_its_own() -> None:
    x, factors, biases = operands(THREE, 1)
    parameters = (x, *factors, *biases)
    out = EagerLinear.apply(x.dtype, 1, "exact", len(factors), *parameters)
    expected = reference(x, factors, biases, 1)
    dy = make_integers(tuple(expected.shape), seed=90, mode=FP64)
    for left, right in zip(torch.autograd.grad(out, parameters, dy), torch.autograd.grad(expected, parameters, dy), strict=True):
        assert_equal(left, right)


def test_backward_finds_the_parameters_in_the_cache(emulated: type[EmulatedProduct]) -> None:
    """Where an optimizer adds up gradients of several passes for a step."""
    x, factors, biases = operands(TWO, 1)
    optimizer = torch.optim.SGD([*factors, *biases])
    optimizer.step()
    eager(x, factors, biases, 1).sum().backward()
    kept = {key: entry.tensors for key, entry in derivation._entries.items()}
    eager(x, factors, biases, 1).sum().backward()
    assert len(kept) == 2, "one entry for the forward pass and one for the backward pass"
    assert all(derivation._entries[key].tensors is tensors for key, tensors in kept.items())


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("architecture", "linears"), [(TWO, 1), (TWO, 3), (THREE, 1)], ids=str)
def test_training_in_halves(architecture: Architecture, linears: int, biased: bool, wide: bool) -> None:
    """x may be wider, and so is its gradient then."""
    x, factors, biases = operands(architecture, linears, rows=2)
    biases = biases if biased else []
    expected = reference(x, factors, biases, linears)
    dy = make_integers(tuple(expected.shape), seed=90, mode=FP64)
    exact = torch.autograd.grad(expected, (x, *factors, *biases), dy)
    own = (x.detach().to(torch.float32 if wide else torch.bfloat16), *(tensor.detach().float() for tensor in (*factors, *biases)))
    own = tuple(tensor.requires_grad_() for tensor in own)
    out = EagerLinear.apply(torch.bfloat16, linears, "bf16", len(factors), *own)
    assert_equal(out, expected.to(torch.bfloat16))  # pyright: ignore[reportArgumentType]
    for _ in range(2):  # a graph that is retained runs backward again
        found = torch.autograd.grad(out, own, dy.to(torch.bfloat16), retain_graph=True)  # pyright: ignore[reportArgumentType]
        assert [gradient.dtype for gradient in found] == [tensor.dtype for tensor in own]
        for left, right in zip(found, exact, strict=True):
            assert_equal(left, right.to(left.dtype))


def test_any_strides_are_taken() -> None:
    _, factors, biases = operands(TWO, 1)
    wide = torch.randn(9, 2 * TWO.in_features, dtype=torch.float64)
    for view in (wide[:, 1 : TWO.in_features + 1], wide[:, ::2], wide[::2, : TWO.in_features], wide[:1, ::2].expand(5, -1)):
        assert_equal(eager(view, factors, biases, 1), eager(view.contiguous(), factors, biases, 1))


@pytest.mark.parametrize("linears", [1, 3])
def test_compiles_without_breaks_for_any_number_of_rows(linears: int) -> None:
    compiled = torch.compile(registered, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (4, 7, 1):
        x, factors, biases = operands(TWO, linears, rows)
        parameters = (x, *factors, *biases)
        out, expected = compiled(x, factors, biases, linears), reference(x, factors, biases, linears)
        assert_equal(out, expected)
        dy = make_integers(tuple(out.shape), seed=90, mode=FP64)
        for left, right in zip(torch.autograd.grad(out, parameters, dy), torch.autograd.grad(expected, parameters, dy), strict=True):
            assert_equal(left, right)
