"""What the two functions check, how they follow autocast, and what they leave in traced graphs."""

import pytest
import torch
from torch import Tensor, nn

from flysurgery.errors import BackendError, PatternError
from flysurgery.layers import ButterflyLinear
from flysurgery.ops import ks_linear, ks_multiply
from flysurgery.ops.backend import problem_of
from flysurgery.patterns import Architecture
from flysurgery.torch_state import foreign_obstacle
from tests.support.composed import Composed
from tests.support.problems import make_factors, make_input, make_integers, make_vector
from tests.support.tolerance import BF16, FP32, FP64, assert_bounded, assert_equal

LAYER = Architecture.of((1, 8, 6, 2), (2, 6, 4, 1))
X, FACTORS, BIAS = make_input(5, 8, FP32), make_factors(LAYER, FP32), make_vector(16, FP32)


def test_one_factor_is_a_layer_of_one() -> None:
    assert_equal(ks_multiply(X, FACTORS[1]), ks_linear(X, FACTORS[1:]))
    assert_bounded(ks_multiply(X, FACTORS[1]), X, FACTORS[1:], None, FP32)


REFUSED: list[tuple[type[Exception], Tensor, list[Tensor], Tensor | None, str]] = [
    (PatternError, torch.ones(5, 7), FACTORS, None, r"take rows of 8 features, got x of shape \(5, 7\)"),
    (PatternError, torch.tensor(1.0), FACTORS, None, r"take rows of 8 features, got x of shape \(\)"),
    (PatternError, X, FACTORS[::-1], None, "takes 8 features and .* gives 16"),
    (PatternError, X, FACTORS, torch.ones(15), r"take a bias of 16 entries, got shape \(15,\)"),
    (PatternError, X, FACTORS, torch.ones(1, 16), r"take a bias of 16 entries, got shape \(1, 16\)"),
    (PatternError, X, [FACTORS[0][0], FACTORS[1]], None, r"four dimensions; got a tensor of shape \(8, 6, 2\)"),
    (PatternError, X, [], None, "at least one pattern"),
    (BackendError, X.half(), FACTORS, None, r"x and factor 0 .* got torch\.float16 on cpu and torch\.float32 on cpu; convert one"),
    (BackendError, X, [FACTORS[0], FACTORS[1].double()], None, r"x and factor 1 .* got torch\.float32 on cpu and torch\.float64"),
    (BackendError, X, FACTORS, BIAS.double(), r"x and the bias .* got torch\.float32 on cpu and torch\.float64"),
    (BackendError, X.to("meta"), FACTORS, None, r"x and factor 0 .* got torch\.float32 on meta and torch\.float32 on cpu"),
    (BackendError, X.long(), FACTORS, None, r"expected x of a floating dtype, complex64 or complex128, got torch\.int64"),
    (BackendError, X.to(torch.complex64), FACTORS, None, r"got torch\.complex64 on cpu and torch\.float32 on cpu"),
]


@pytest.mark.parametrize(("error", "x", "factors", "bias", "message"), REFUSED)
def test_operands_that_do_not_fit(error: type[Exception], x: Tensor, factors: list[Tensor], bias: Tensor | None, message: str) -> None:
    with pytest.raises(error, match=message) as refused:
        ks_linear(x, factors, bias)
    assert error is PatternError or isinstance(refused.value, RuntimeError), "the type that nn.Linear raises"


@pytest.mark.parametrize("backend", [None, "einsum", "bmm", "dense", "chunked"])
def test_autocast_rounds_operands_as_for_a_dense_layer(backend: str | None) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        dense = nn.functional.linear(X, torch.ones(16, 8), BIAS)
        cast = ks_linear(X, FACTORS, BIAS, backend=backend)
    assert cast.dtype == dense.dtype == torch.bfloat16
    rounded = [factor.to(BF16.dtype) for factor in FACTORS]
    assert_equal(cast, ks_linear(X.to(BF16.dtype), rounded, BIAS.to(BF16.dtype), backend=backend))


def test_autocast_takes_mixed_operands_leaves_float64_and_lets_gradients_reach_float32_parameters() -> None:
    x, doubles = make_input(5, 8, FP64), make_factors(LAYER, FP64)
    factors = [factor.clone().requires_grad_() for factor in FACTORS]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(ks_linear(X.bfloat16(), FACTORS, BIAS), ks_linear(X, FACTORS, BIAS))
        assert ks_linear(x, doubles).dtype == torch.float64
        with pytest.raises(BackendError, match=r"torch\.float64 on cpu and torch\.float32"):
            ks_linear(x, FACTORS)
        ks_linear(X, factors, BIAS).float().square().sum().backward()
    assert all(factor.grad is not None and factor.grad.dtype == torch.float32 and factor.grad.any() for factor in factors)


def test_exported_graphs_hold_plain_operators_and_any_batch() -> None:
    """Also of a parent that adds to the output in place."""
    model = Composed(lambda self, x: self.inner(x).add_(1.0), inner=ButterflyLinear(LAYER)).eval()
    for index, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, index)  # small integers, on which all backends agree
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (X,), dynamic_shapes=(({0: batch},),), strict=False)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert targets
    assert all(target.startswith("aten.") for target in targets)
    for rows in (1, 700):  # eager takes another backend for the larger number
        x = make_integers((rows, 8), seed=rows, mode=FP32)
        assert_equal(program.module()(x), model(x))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::FutureWarning")
def test_torchscript_traces_serve_other_batches() -> None:
    layer = ButterflyLinear(LAYER).requires_grad_(False)
    traced = torch.jit.trace(layer, (X,))
    assert "aten::mT" not in str(traced.inlined_graph)  # which PyTorch's exporter of traces to ONNX does not know
    x = make_input(600, 8, FP32)
    assert_bounded(traced(x), x, list(layer.factors), layer.bias, FP32, bias_apart=True)


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")  # PyTorch's own, by which it looks for the rules
def test_transforms_and_forward_derivatives_have_no_rules_for_registered_operators() -> None:
    seen = list[tuple[bool, bool]]()

    def noting(x: Tensor) -> Tensor:
        seen.append((foreign_obstacle() is not None, problem_of(x, FACTORS).tracing))
        return ks_linear(x, FACTORS, BIAS)

    noting(X)
    assert_bounded(torch.func.vmap(noting)(X), X, FACTORS, BIAS, FP32, bias_apart=True)
    _, tangent = torch.func.jvp(noting, (X,), (X,))
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.unpack_dual(noting(torch.autograd.forward_ad.make_dual(X, X)))
    assert seen == [(False, False), (True, True), (True, True), (True, True)]
    assert dual.tangent is not None
    assert_equal(dual.tangent, tangent)
