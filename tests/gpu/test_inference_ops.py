"""The other operators for inference on the GPU: against float64, beside PyTorch's own operators in the same dtype."""

from __future__ import annotations

import pytest
import torch

from flysurgery.ops import FeedForward, LinearResidual, Norm, NormLinears, reason, run
from flysurgery.patterns import Architecture
from flysurgery.patterns.catalog import gonon, monarch
from tests.gpu.gpu_blocks import DTYPES, affine, comparable, dense, layer, normal, wide
from tests.support.problems import all_pairs
from tests.support.rounding import rounding_as

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


ROWS = ((1, 0.0, 1.0), (197, 50.0, 1.0), (1009, 100.0, 1.0), (211, 0.5, 2e-3), (25216, 0.0, 1.0))
"""How many, their mean and deviation."""


@pytest.mark.parametrize(
    ("architecture", "drawn", "dtype"), all_pairs((gonon(384, 384), monarch(768, 768), monarch(192, 192)), ROWS, DTYPES), ids=str
)
def test_norm_and_projections(architecture: Architecture, drawn: tuple[int, float, float], dtype: torch.dtype) -> None:
    (rows, mean, deviation), features = drawn, architecture.in_features
    x = normal(rows, features, dtype=dtype, mean=mean, deviation=deviation)
    norm = affine(features, dtype)
    group = [layer(architecture, dtype) for _ in range(3)]
    truth = NormLinears(wide(norm), [wide(member) for member in group]).plainly(x.double())
    comparable(run(x, NormLinears(norm, group)), NormLinears(norm, group).plainly(x), truth)


@pytest.mark.parametrize("architecture", [gonon(384, 384), monarch(384, 384)], ids=str)
def test_norm_and_projections_with_tf32(architecture: Architecture) -> None:
    x, group = normal(1009, 384, dtype=torch.float32, mean=100.0), [layer(architecture, torch.float32) for _ in range(3)]
    norm = affine(384, torch.float32)
    truth = NormLinears(wide(norm), [wide(member) for member in group]).plainly(x.double())
    with rounding_as("tf32"):
        comparable(run(x, NormLinears(norm, group)), NormLinears(norm, group).plainly(x), truth)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_whose_first_values_stand_apart(dtype: torch.dtype) -> None:
    """What differs from the mean of the row's first values, 16 at least, is summed and, where x is halves, rounded."""
    x, group = normal(331, 384, dtype=dtype), [layer(gonon(384, 384), dtype) for _ in range(3)]
    x[:, :16] += 200
    norm = Norm(None, None, 1e-6)
    truth = NormLinears(norm, [wide(member) for member in group]).plainly(x.double())
    loss = 384 / 16 if dtype == torch.float32 else (384 / 16) ** 0.5
    comparable(run(x, NormLinears(norm, group)), NormLinears(norm, group).plainly(x), truth, loss)


def test_projections_that_differ_follow_the_norm() -> None:
    """Two launches: biases are not all there, or the architectures are not the same."""
    x, norm = normal(197, 384, dtype=torch.float16), Norm(normal(384, dtype=torch.float16), None, 1e-6)
    for group in (
        [layer(gonon(384, 384), torch.float16, bias=bias) for bias in (True, False, True)],
        [layer(architecture, torch.float16) for architecture in (gonon(384, 384), monarch(384, 384))],
    ):
        truth = NormLinears(wide(norm), [wide(member) for member in group]).plainly(x.double())
        comparable(run(x, NormLinears(norm, group)), NormLinears(norm, group).plainly(x), truth)


@pytest.mark.parametrize("norm", [Norm(None, None), Norm(torch.ones(384), torch.ones(384))], ids=["plain", "affine"])
def test_the_operator_is_well_behaved(norm: Norm) -> None:
    x, group = normal(70, 384, dtype=torch.float16), [layer(gonon(384, 384), torch.float16) for _ in range(2)]
    weight, bias = (None if part is None else part.cuda() for part in (norm.weight, norm.bias))
    factors, biases = [factor for member in group for factor in member.factors], [member.bias for member in group]
    arguments = (x, weight, bias, 1e-6, factors, biases, None, "none", None, None, "fp16")
    torch.library.opcheck(torch.ops.flysurgery.fused_linears.default, arguments)


def test_norms_without_parameters_of_strided_rows() -> None:
    holder = normal(300, 400, dtype=torch.float16)
    x, group = holder[:, :384], [layer(gonon(384, 384), torch.float16)]
    norm = Norm(None, None, 1e-5)
    truth = NormLinears(norm, [wide(group[0])]).plainly(x.double())
    comparable(run(x, NormLinears(norm, group)), NormLinears(norm, group).plainly(x), truth)
    assert run(x[:0], NormLinears(norm, group)).shape == (0, 384)


def test_a_changed_norm_is_seen_and_graphs_replay() -> None:
    x, group = normal(394, 384, dtype=torch.float16), [layer(gonon(384, 384), torch.float16) for _ in range(3)]
    norm = Norm(normal(384, dtype=torch.float16), None, 1e-6)
    before = run(x, NormLinears(norm, group))
    assert norm.weight is not None
    with torch.no_grad():
        norm.weight.mul_(-1)
    assert torch.equal(run(x, NormLinears(norm, group)), run(x, NormLinears(Norm(norm.weight.clone(), None, 1e-6), group)))
    assert not torch.equal(before, run(x, NormLinears(norm, group)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, NormLinears(norm, group))
    expected = run(x, NormLinears(norm, group))
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
    truth = LinearResidual(wide(linear), residual.double(), wide(scale)).plainly(x.double())
    comparable(run(x, LinearResidual(linear, residual, scale)), LinearResidual(linear, residual, scale).plainly(x), truth)


@pytest.mark.parametrize(
    ("size", "dtype", "scaled"), all_pairs(((1, 384), (197, 192), (1009, 768), (25216, 384)), DTYPES, (False, True)), ids=str
)
def test_dense_product_added_to_a_residual(size: tuple[int, int], dtype: torch.dtype, scaled: bool) -> None:
    rows, features = size
    x, residual, linear = normal(rows, features, dtype=dtype), normal(rows, features, dtype=dtype), dense(features, features, dtype)
    scale = normal(features, dtype=dtype) if scaled else None
    truth = LinearResidual(wide(linear), residual.double(), wide(scale)).plainly(x.double())
    comparable(run(x, LinearResidual(linear, residual, scale)), LinearResidual(linear, residual, scale).plainly(x), truth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [192, 384])
def test_norm_and_a_dense_projection(dtype: torch.dtype, features: int) -> None:
    x, group, norm = normal(333, features, dtype=dtype), [dense(features, 3 * features, dtype)], Norm(None, None, 1e-6)
    truth = NormLinears(norm, [wide(group[0])]).plainly(x.double())
    comparable(run(x, NormLinears(norm, group)), NormLinears(norm, group).plainly(x), truth)


KINDS = (("dense", "dense"), ("factors", "dense"), ("dense", "factors"), ("factors", "factors"))


@pytest.mark.parametrize(("kinds", "activation", "dtype"), all_pairs(KINDS, ("gelu", "gelu_tanh", "silu"), DTYPES), ids=str)
def test_feed_forward_in_two_launches(kinds: tuple[str, str], activation: str, dtype: torch.dtype) -> None:
    sizes = (384, 1536), (1536, 384)
    up, down = (
        dense(*size, dtype) if kind == "dense" else layer(gonon(size[1], size[0]), dtype) for kind, size in zip(kinds, sizes, strict=True)
    )
    x, norm = normal(2, 197, 384, dtype=dtype), Norm(normal(384, dtype=dtype), normal(384, dtype=dtype), 1e-6)
    assert reason(x, FeedForward(norm, up, down, activation)) is None
    truth = FeedForward(wide(norm), wide(up), wide(down), activation).plainly(x.double())
    comparable(run(x, FeedForward(norm, up, down, activation)), FeedForward(norm, up, down, activation).plainly(x), truth)


def test_reasons() -> None:
    x, group = normal(8, 384, dtype=torch.float16), [layer(gonon(384, 384), torch.float16)]
    norm = Norm(None, None)
    assert reason(x, NormLinears(norm, group)) is None
    assert "no gradients" in str(reason(x.requires_grad_(), NormLinears(norm, group)))
    assert "float64" in str(reason(x.detach().double(), NormLinears(norm, group)))
    assert "take 384 features" in str(reason(x.detach()[:, :380], NormLinears(norm, group)))
    assert "expected a residual" in str(reason(x.detach(), LinearResidual(group[0], x.detach()[:4])))
