"""The kernels of fused gradients, and the gradients that they give, beside float64."""

from itertools import cycle

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flysurgery.factors import factors_to_dense
from flysurgery.gpu.hidden_gradient import hidden_gradient_takes, hidden_image, run_hidden_gradient
from flysurgery.gpu.layer_norm import norm_gradient, normalize_rows
from flysurgery.gpu.row_sums import activation_gradient, sum_of_rows
from flysurgery.gpu.weight_space import multiplied_out
from flysurgery.ops import trained, trained_with_x, training
from flysurgery.ops.feed_forward import ACTIVATIONS
from flysurgery.patterns import Architecture, gonon, monarch, named
from tests.support.blocks import TRAINED, to_train
from tests.support.problems import all_pairs

pytestmark = pytest.mark.gpu

ROUNDED = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-20}
"""Half a unit in the last place; sums and approximate functions make more of float32."""
FLOOR = {torch.float16: 0.02, torch.bfloat16: 0.02, torch.float32: 0.5}
"""The share of the largest element that counts like an element's own size."""
FACTOR_BY_FACTOR = ["feed-forward of factors", "scaled feed-forward of factors"]
"""Wide ones, whose gradients are computed so too."""

DTYPES = pytest.mark.parametrize("dtype", ROUNDED)
HALVES, ACTIVATED = (torch.float16, torch.bfloat16), ("gelu", "gelu_tanh", "silu")


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(sum(shape)), device="cuda")


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).detach().norm() / expected.detach().norm())


def assert_rounded(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    room = ROUNDED[dtype] * (expected.abs() + FLOOR[dtype] * expected.abs().max())
    assert ((found.double() - expected).abs() <= room).all()


@pytest.mark.parametrize(("columns", "dtype", "rows"), all_pairs((24, 384, 1024), [*ROUNDED], (1, 1001)), ids=str)
def test_norms_and_their_gradients(columns: int, dtype: torch.dtype, rows: int) -> None:
    x, g, r = (
        each.to(dtype) for each in (normal(rows, columns) * 2 + 1, normal(rows, columns + 1)[:, 1:], normal(rows, columns + 2)[:, 2:])
    )
    weight, bias = normal(columns), normal(columns)
    wide = [each.double().requires_grad_() for each in (x, weight, bias)]
    y = functional.layer_norm(wide[0], (columns,), wide[1], wide[2], 1e-6)
    of_x, of_weight, of_bias = torch.autograd.grad(y, wide, g.double())
    assert_rounded(normalize_rows(x, weight, bias, 1e-6), y.detach(), dtype)
    found = norm_gradient(x, g, weight, 1e-6, r)
    assert_rounded(found.x, of_x + r.double(), dtype)
    assert max(map(distance, (found.weight, found.bias), (of_weight, of_bias))) < 1e-6
    alone = norm_gradient(x, g, None, 1e-6)
    assert distance(alone.bias, g.double().sum(0)) < 1e-6
    assert distance(sum_of_rows(g, torch.float32), g.double().sum(0)) < 1e-6
    off = g.flatten()[1 : 1 + columns][None]  # rows that do not begin at a multiple of 16 bytes
    assert distance(sum_of_rows(off, torch.float32), off.double()[0]) < 1e-6


@DTYPES
@pytest.mark.parametrize(("rows", "columns"), [(0, 24), (25216, 384), (700, 40), (264, 4096), (20000, 8)])
def test_sums_of_rows(rows: int, columns: int, dtype: torch.dtype) -> None:
    g = normal(rows, columns).add(1).to(dtype)
    sums = sum_of_rows(g, torch.float32)
    assert sums.shape == (columns,) and (sums.double() - g.double().sum(0)).norm() <= 1e-6 * g.double().sum(0).norm()
    assert torch.equal(sum_of_rows(g, torch.float32), sums)


@DTYPES
@pytest.mark.parametrize("activation", ACTIVATED)
def test_activations_and_their_gradients(activation: str, dtype: torch.dtype) -> None:
    u, g = (normal(1001, 1536) * 3).to(dtype), normal(1002, 1536)[1:].to(dtype)
    u[0, :4] = torch.tensor([0.0, 1e-4, -40.0, 40.0])
    wide = u.double().requires_grad_()
    y = ACTIVATIONS[activation](wide)
    (of_u,) = torch.autograd.grad(y, wide, g.double())
    sums = activation_gradient(u, g, activation)
    assert_rounded(u, y.detach(), dtype)
    assert_rounded(g, of_u, dtype)
    assert distance(sums.sum(0), of_u.sum(0)) < (1e-3 if dtype == torch.bfloat16 else 1e-6)  # whose slopes are approximate


HIDDEN = [(1, 64, 128), (1001, 384, 1536), (25216, 64, 256), (6001, 64, 3072)]


@pytest.mark.parametrize(("size", "activation", "dtype"), all_pairs(HIDDEN, ACTIVATED, HALVES), ids=str)
def test_hidden_units_and_their_gradients(size: tuple[int, int, int], activation: str, dtype: torch.dtype) -> None:
    rows, features, hidden = size
    x, dy, bias = (normal(*shape).to(dtype) for shape in ((rows, features), (rows, features + 1), (hidden,)))
    dy = dy[:, :-1]
    first, last = (normal(*shape).div(features**0.5).to(dtype) for shape in ((hidden, features), (features, hidden)))
    assert hidden_gradient_takes(x, features, hidden) and not hidden_gradient_takes(x, features + 64, hidden)
    u = functional.linear(x.double(), first.double(), bias.double()).requires_grad_()
    y = ACTIVATIONS[activation](u)
    (of_u,) = torch.autograd.grad(y, u, dy.double() @ last.double())
    h, du, sums = run_hidden_gradient(x, dy, hidden_image(first, last), bias, activation)
    assert_rounded(h, y.detach(), dtype)
    assert distance(du, of_u) < ROUNDED[dtype]
    assert distance(sums.sum(0), of_u.sum(0)) < ROUNDED[dtype]
    assert torch.equal(run_hidden_gradient(x, dy, hidden_image(first, last), bias, activation)[2], sums)
    alone, *_ = run_hidden_gradient(x, dy, hidden_image(first, last), None, activation)
    assert_rounded(alone, ACTIVATIONS[activation](functional.linear(x.double(), first.double())), dtype)


@DTYPES
@pytest.mark.parametrize(
    "architecture", [monarch(1536, 384), gonon(384, 1536), named("lowrank", 384, 384), Architecture.of((2, 6, 4, 3), (3, 8, 5, 1))], ids=str
)
def test_factors_are_multiplied_out(architecture: Architecture, dtype: torch.dtype) -> None:
    factors = [normal(*p.factor_shape).to(dtype) for _ in range(3) for p in architecture]
    expected = torch.cat([factors_to_dense([each.double() for each in factors[start : start + 2]]) for start in (0, 2, 4)])
    assert distance(multiplied_out(factors, 3, torch.float32), expected) < 1e-6
    assert torch.equal(multiplied_out(factors, 3, torch.bfloat16), multiplied_out(factors, 3, torch.float32).bfloat16())


FORMS = [*((name, 384) for name in TRAINED), *((name, 768) for name in FACTOR_BY_FACTOR)]


@pytest.mark.parametrize(("form", "dtype"), [*zip(FORMS, cycle(HALVES))], ids=str)
def test_gradients_beside_those_of_the_definition(form: tuple[str, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where other uses of x add to its gradient."""
    name, width = form
    by_factors = list[object]()
    monkeypatch.setattr(training, "_back_wide", lambda *given, own=training._back_wide: by_factors.append(given) or own(*given))
    wide, operation = to_train(name, 301, width)
    exact = operation.plainly(wide)
    dy = torch.randn_like(exact)
    of_x, *expected = torch.autograd.grad(exact, (wide, *operation.tensors), dy)
    with torch.no_grad():
        for tensor in operation.tensors:  # weights are float32, what has rows is not
            tensor.data = tensor.data.to(dtype if tensor.shape[0] == 301 else torch.float32)
    x = wide.detach().to(dtype).requires_grad_()
    y = trained(x, operation)
    assert distance(y, exact) < 4 * ROUNDED[dtype]
    found = torch.autograd.grad(y, (x, *operation.tensors), dy.to(dtype))
    assert max(map(distance, found, (of_x, *expected))) < 4 * ROUNDED[dtype] and bool(by_factors) == (width == 768)
    if name in ("dense q, k, v", "factors side by side"):
        beside = torch.randn_like(wide)
        found = torch.autograd.grad(trained_with_x(x, operation), (x, *operation.tensors), (dy.to(dtype), beside.to(dtype)))
        assert max(map(distance, found, (of_x + beside, *expected))) < 4 * ROUNDED[dtype]
