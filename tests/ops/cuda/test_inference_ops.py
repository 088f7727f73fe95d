"""The other operators for inference on the GPU: against float64, beside PyTorch's own operators in the same dtype."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flysurgery.ops import (
    Dense,
    FusedFactors,
    Linear,
    Norm,
    composed,
    ffn,
    ffn_reason,
    linear_residual,
    linear_residual_reason,
    norm_linear,
    norm_linear_reason,
)
from flysurgery.patterns import Architecture
from flysurgery.patterns.catalog import gonon, monarch
from tests.support.problems import all_pairs
from tests.support.rounding import rounding_as

pytestmark = pytest.mark.gpu

K = 1.25 * 1.2
"""Level 2 of the tolerance policy, for a product of factors."""
K_FP32 = 2.0
"""The goal for float32 by pairs of fp16, beside float32 by PyTorch."""
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


def normal(*shape: int, dtype: torch.dtype, deviation: float = 1.0, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * deviation + mean).to(dtype)


def layer(architecture: Architecture, dtype: torch.dtype, bias: bool = True) -> FusedFactors:
    factors = tuple(normal(*pattern.factor_shape, dtype=dtype, deviation=pattern.c**-0.5) for pattern in architecture)
    return FusedFactors(factors, normal(architecture.out_features, dtype=dtype, deviation=0.3) if bias else None)


def dense(in_features: int, out_features: int, dtype: torch.dtype) -> Dense:
    weight = normal(out_features, in_features, dtype=dtype, deviation=in_features**-0.5)
    return Dense(weight, normal(out_features, dtype=dtype, deviation=0.3))


def wide(part: Linear) -> Linear:
    bias = None if part.bias is None else part.bias.double()
    if isinstance(part, Dense):
        return Dense(part.weight.double(), bias)
    return FusedFactors(tuple(f.double() for f in part.factors), bias)


def comparable(out: Tensor, yardstick: Tensor, truth: Tensor, loss: float = 1.0) -> None:
    """Level 2; ``loss`` is the factor that the kernel says it may lose."""
    assert out.dtype == yardstick.dtype and out.shape == yardstick.shape
    assert bool(out.isfinite().all())
    error, allowed = (float((value.double() - truth).square().mean().sqrt()) for value in (out, yardstick))
    assert error <= loss * (K_FP32 if out.dtype == torch.float32 else K) * allowed, f"rms error {error:.3g}, PyTorch's is {allowed:.3g}"


ROWS = ((1, 0.0, 1.0), (197, 50.0, 1.0), (1009, 100.0, 1.0), (211, 0.5, 2e-3), (25216, 0.0, 1.0))
"""How many, their mean and deviation."""


@pytest.mark.parametrize(
    ("architecture", "drawn", "dtype"), all_pairs((gonon(384, 384), monarch(768, 768), monarch(192, 192)), ROWS, DTYPES), ids=str
)
def test_norm_and_projections(architecture: Architecture, drawn: tuple[int, float, float], dtype: torch.dtype) -> None:
    (rows, mean, deviation), features = drawn, architecture.in_features
    x = normal(rows, features, dtype=dtype, mean=mean, deviation=deviation)
    norm = Norm(normal(features, dtype=dtype, mean=1.0, deviation=0.2), normal(features, dtype=dtype, deviation=0.2), 1e-6)
    group = [layer(architecture, dtype) for _ in range(3)]
    exact = Norm(norm.weight.double(), norm.bias.double(), norm.eps)  # type: ignore[union-attr]
    truth = composed.norm_linear(x.double(), exact, [wide(member) for member in group])
    comparable(norm_linear(x, norm, group), composed.norm_linear(x, norm, group), truth)


@pytest.fixture
def tf32_allowed() -> Iterator[None]:
    with rounding_as("tf32"):
        yield


@pytest.mark.parametrize("architecture", [gonon(384, 384), monarch(384, 384)], ids=str)
def test_norm_and_projections_with_tf32(architecture: Architecture, tf32_allowed: None) -> None:
    x, group = normal(1009, 384, dtype=torch.float32, mean=100.0), [layer(architecture, torch.float32) for _ in range(3)]
    norm = Norm(normal(384, dtype=torch.float32, mean=1.0, deviation=0.2), normal(384, dtype=torch.float32, deviation=0.2), 1e-6)
    exact = Norm(norm.weight.double(), norm.bias.double(), norm.eps)  # type: ignore[union-attr]
    truth = composed.norm_linear(x.double(), exact, [wide(member) for member in group])
    comparable(norm_linear(x, norm, group), composed.norm_linear(x, norm, group), truth)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_whose_first_values_stand_apart(dtype: torch.dtype) -> None:
    """What differs from the mean of the row's first values, 16 at least, is summed and, where x is halves, rounded."""
    x, group = normal(331, 384, dtype=dtype), [layer(gonon(384, 384), dtype) for _ in range(3)]
    x[:, :16] += 200
    norm = Norm(None, None, 1e-6)
    truth = composed.norm_linear(x.double(), norm, [wide(member) for member in group])
    loss = 384 / 16 if dtype == torch.float32 else (384 / 16) ** 0.5
    comparable(norm_linear(x, norm, group), composed.norm_linear(x, norm, group), truth, loss)


def test_projections_that_differ_follow_the_norm() -> None:
    """Two launches: biases are not all there, or the architectures are not the same."""
    x, norm = normal(197, 384, dtype=torch.float16), Norm(normal(384, dtype=torch.float16), None, 1e-6)
    exact = Norm(norm.weight.double(), None, norm.eps)  # type: ignore[union-attr]
    for group in (
        [layer(gonon(384, 384), torch.float16, bias=bias) for bias in (True, False, True)],
        [layer(architecture, torch.float16) for architecture in (gonon(384, 384), monarch(384, 384))],
    ):
        truth = composed.norm_linear(x.double(), exact, [wide(member) for member in group])
        comparable(norm_linear(x, norm, group), composed.norm_linear(x, norm, group), truth)


@pytest.mark.parametrize("norm", [Norm(None, None), Norm(torch.ones(384), torch.ones(384))], ids=["plain", "affine"])
def test_the_operator_is_well_behaved(norm: Norm) -> None:
    x, group = normal(70, 384, dtype=torch.float16), [layer(gonon(384, 384), torch.float16) for _ in range(2)]
    weight, bias = (None if part is None else part.cuda() for part in (norm.weight, norm.bias))
    factors, biases = [factor for member in group for factor in member.factors], [member.bias for member in group]
    torch.library.opcheck(torch.ops.flysurgery.norm_linear.default, (x, weight, bias, 1e-6, factors, biases, 2, "none", "fp16"))


def test_norms_without_parameters_of_strided_rows() -> None:
    holder = normal(300, 400, dtype=torch.float16)
    x, group = holder[:, :384], [layer(gonon(384, 384), torch.float16)]
    norm = Norm(None, None, 1e-5)
    truth = composed.norm_linear(x.double(), norm, [wide(group[0])])
    comparable(norm_linear(x, norm, group), composed.norm_linear(x, norm, group), truth)
    assert norm_linear(x[:0], norm, group).shape == (0, 384)


def test_a_changed_norm_is_seen_and_graphs_replay() -> None:
    x, group = normal(394, 384, dtype=torch.float16), [layer(gonon(384, 384), torch.float16) for _ in range(3)]
    norm = Norm(normal(384, dtype=torch.float16), None, 1e-6)
    before = norm_linear(x, norm, group)
    assert norm.weight is not None
    with torch.no_grad():
        norm.weight.mul_(-1)
    assert torch.equal(norm_linear(x, norm, group), norm_linear(x, Norm(norm.weight.clone(), None, 1e-6), group))
    assert not torch.equal(before, norm_linear(x, norm, group))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = norm_linear(x, norm, group)
    expected = norm_linear(x, norm, group)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("architecture", "dtype", "scaled"),
    all_pairs((gonon(384, 384), gonon(384, 1536), monarch(384, 384)), DTYPES, (False, True)),
    ids=str,
)
def test_product_added_to_a_residual(architecture: Architecture, dtype: torch.dtype, scaled: bool) -> None:
    x, residual = normal(2, 197, architecture.in_features, dtype=dtype), normal(2, 197, architecture.out_features, dtype=dtype)
    linear = layer(architecture, dtype)
    scale = normal(architecture.out_features, dtype=dtype) if scaled else None
    truth = composed.linear_residual(x.double(), wide(linear), residual.double(), None if scale is None else scale.double())
    comparable(linear_residual(x, linear, residual, scale), composed.linear_residual(x, linear, residual, scale), truth)


@pytest.mark.parametrize(
    ("size", "dtype", "scaled"), all_pairs(((1, 384), (197, 192), (1009, 768), (25216, 384)), DTYPES, (False, True)), ids=str
)
def test_dense_product_added_to_a_residual(size: tuple[int, int], dtype: torch.dtype, scaled: bool) -> None:
    rows, features = size
    x, residual, linear = normal(rows, features, dtype=dtype), normal(rows, features, dtype=dtype), dense(features, features, dtype)
    scale = normal(features, dtype=dtype) if scaled else None
    truth = composed.linear_residual(x.double(), wide(linear), residual.double(), None if scale is None else scale.double())
    comparable(linear_residual(x, linear, residual, scale), composed.linear_residual(x, linear, residual, scale), truth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [192, 384])
def test_norm_and_a_dense_projection(dtype: torch.dtype, features: int) -> None:
    x, group, norm = normal(333, features, dtype=dtype), [dense(features, 3 * features, dtype)], Norm(None, None, 1e-6)
    truth = composed.norm_linear(x.double(), norm, [wide(group[0])])
    comparable(norm_linear(x, norm, group), composed.norm_linear(x, norm, group), truth)


KINDS = (("dense", "dense"), ("factors", "dense"), ("dense", "factors"), ("factors", "factors"))


@pytest.mark.parametrize(("kinds", "activation", "dtype"), all_pairs(KINDS, ("gelu", "gelu_tanh", "silu"), DTYPES), ids=str)
def test_feed_forward_in_two_launches(kinds: tuple[str, str], activation: str, dtype: torch.dtype) -> None:
    sizes = (384, 1536), (1536, 384)
    up, down = (
        dense(*size, dtype) if kind == "dense" else layer(gonon(size[1], size[0]), dtype) for kind, size in zip(kinds, sizes, strict=True)
    )
    x, norm = normal(2, 197, 384, dtype=dtype), Norm(normal(384, dtype=dtype), normal(384, dtype=dtype), 1e-6)
    exact = Norm(*(part.double() for part in norm.tensors), norm.eps)
    assert ffn_reason(x, norm, up, down, activation) is None
    truth = composed.ffn(x.double(), exact, wide(up), wide(down), activation)
    comparable(ffn(x, norm, up, down, activation), composed.ffn(x, norm, up, down, activation), truth)


def test_reasons() -> None:
    x, group = normal(8, 384, dtype=torch.float16), [layer(gonon(384, 384), torch.float16)]
    norm = Norm(None, None)
    assert norm_linear_reason(x, norm, group) is None
    assert "no gradients" in str(norm_linear_reason(x.requires_grad_(), norm, group))
    assert "float64" in str(norm_linear_reason(x.detach().double(), norm, group))
    assert "take 384 features" in str(norm_linear_reason(x.detach()[:, :380], norm, group))
    assert "expected a residual" in str(linear_residual_reason(x.detach(), group[0], x.detach()[:4]))
