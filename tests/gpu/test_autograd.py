"""Gradients of the CUDA backend's operators, with the kernels emulated: of small integers, which are exact in any order."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.factors import ks_einsum
from flysurgery.gpu import weight_cache as derivation
from flysurgery.gpu.gradients import EagerLinear
from flysurgery.patterns import Architecture
from tests.support.problems import make_integers
from tests.support.tolerance import FP64, assert_equal

TWO = Architecture.of((2, 3, 4, 3), (1, 8, 5, 3))
THREE = Architecture.of((3, 2, 4, 2), (2, 3, 5, 4), (2, 5, 6, 4))
ONE = Architecture.of((2, 3, 5, 3))

pytestmark = pytest.mark.usefixtures("emulated")


Call = Callable[[Tensor, list[Tensor], list[Tensor], int], Tensor]


def operands(architecture: Architecture, linears: int, rows: int = 4) -> tuple[Tensor, list[Tensor], list[Tensor]]:
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
    return torch.cat(outputs, dim=-1)


def check(call: Call, x: Tensor, factors: list[Tensor], biases: list[Tensor], linears: int) -> None:
    """The result, and the gradients of all that require them."""
    out, expected = call(x, factors, biases, linears), reference(x, factors, biases, linears)
    assert_equal(out, expected)
    wanted = [tensor for tensor in (x, *factors, *biases) if tensor.requires_grad]
    if wanted:
        dy = make_integers(tuple(expected.shape), seed=90, mode=FP64)
        for left, right in zip(torch.autograd.grad(out, wanted, dy), torch.autograd.grad(expected, wanted, dy), strict=True):
            assert_equal(left, right)


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    call=st.sampled_from([eager, registered]),
    case=st.sampled_from([(ONE, 1), (TWO, 1), (THREE, 1), (TWO, 3)]),
    rows=st.integers(0, 4),
    biased=st.booleans(),
    trained=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_gradients(call: Call, case: tuple[Architecture, int], rows: int, biased: bool, trained: tuple[bool, bool, bool]) -> None:
    """Of x, the factors and the biases, each of which may be frozen."""
    derivation._entries.clear()
    x, factors, biases = operands(*case, rows)
    biases = biases if biased else []
    for part, needed in zip(([x], factors, biases), trained, strict=True):
        for tensor in part:
            tensor.requires_grad_(needed)
    check(call, x, factors, biases, case[1])


def test_one_row_without_leading_dimensions_and_any_strides() -> None:
    x, factors, biases = operands(TWO, 1)
    check(eager, x.detach()[0].requires_grad_(), factors, biases, 1)
    wide = make_integers((9, 2 * TWO.in_features), seed=5, mode=FP64)
    for view in (wide[:, 1 : TWO.in_features + 1], wide[:, ::2], wide[::2, : TWO.in_features], wide[:1, ::2].expand(5, -1)):
        check(eager, view, factors, biases, 1)


@pytest.mark.parametrize("call", [eager, registered])
def test_double_backward_is_refused(call: Call) -> None:
    x, factors, biases = operands(TWO, 1)
    for frozen in ([], factors):
        for factor in frozen:
            factor.requires_grad_(False)
        (dx,) = torch.autograd.grad(call(x, factors, biases, 1).square().sum(), x, create_graph=True)
        with pytest.raises(BackendError, match="backend='bmm'"):
            torch.autograd.grad(dx.sum(), x)


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


def test_backward_finds_the_parameters_in_the_cache() -> None:
    """Where an optimizer adds up gradients of several passes for a step."""
    x, factors, biases = operands(TWO, 1)
    optimizer = torch.optim.SGD([*factors, *biases])  # which must live
    optimizer.step()
    eager(x, factors, biases, 1).sum().backward()
    kept = {key: entry.tensors for key, entry in derivation._entries.items()}
    eager(x, factors, biases, 1).sum().backward()
    assert len(kept) == 2, "one entry for the forward pass and one for the backward pass"
    assert all(derivation._entries[key].tensors is tensors for key, tensors in kept.items())


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("architecture", "linears", "biased"), [(TWO, 1, True), (TWO, 3, False), (THREE, 1, True)], ids=str)
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


@pytest.mark.parametrize("linears", [1, 3])
def test_compiles_without_breaks_for_any_number_of_rows(linears: int) -> None:
    compiled = torch.compile(registered, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (4, 7, 1):
        check(compiled, *operands(TWO, linears, rows), linears)
