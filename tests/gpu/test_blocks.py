"""Parts of blocks by their kernels on the GPU: against float64, beside PyTorch's own operators in the same dtype.

Norms with linears, linears with a residual, gated and plain feed-forward blocks. Those of one kernel are in test_ffn.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from flysurgery.gpu.factor_by_factor import run_wide_ffn, run_wide_group
from flysurgery.gpu.gated import run_gated
from flysurgery.ops import (
    Dense,
    FeedForward,
    FusedFactors,
    Gated,
    Linear,
    LinearResidual,
    Norm,
    NormLinears,
    leaves_moments,
    reason,
    run,
    run_with_moments,
)
from flysurgery.patterns import Architecture
from flysurgery.patterns.catalog import gonon, monarch
from tests.gpu.gpu_blocks import DTYPES, K_FP32, K, affine, check, check_replay, comparable, dense, layer, normal, wide
from tests.support.problems import all_pairs
from tests.support.rounding import rounding_as

pytestmark = pytest.mark.gpu

HALF = torch.float16
NO_NORM = Norm(None, None, 1e-6)


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
    check(x, NormLinears(affine(features, dtype), [layer(architecture, dtype) for _ in range(3)]))


def test_norm_and_projections_with_tf32() -> None:
    x, group = normal(1009, 384, dtype=torch.float32, mean=100.0), [layer(gonon(384, 384), torch.float32) for _ in range(3)]
    with rounding_as("tf32"):
        check(x, NormLinears(affine(384, torch.float32), group))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_whose_first_values_stand_apart(dtype: torch.dtype) -> None:
    """What differs from the mean of the row's first values, 16 at least, is summed and, where x is halves, rounded."""
    x, group = normal(331, 384, dtype=dtype), [layer(gonon(384, 384), dtype) for _ in range(3)]
    x[:, :16] += 200
    operation = NormLinears(NO_NORM, group)
    k = K_FP32 * 384 / 16 if dtype == torch.float32 else K * (384 / 16) ** 0.5
    check(x, operation, k)


GROUPS: dict[str, Callable[[torch.dtype], Sequence[Linear]]] = {
    "biases not all there": lambda dtype: [layer(gonon(384, 384), dtype, bias=bias) for bias in (True, False, True)],
    "architectures not the same": lambda dtype: [layer(each(384, 384), dtype) for each in (gonon, monarch)],
    "one layer": lambda dtype: [layer(gonon(384, 384), dtype)],
    "a dense layer": lambda dtype: [dense(384, 1152, dtype)],
    "factors beside a dense layer": lambda dtype: [*(layer(monarch(384, 384, 8), dtype) for _ in range(2)), dense(384, 384, dtype)],
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_every_kind_strided_rows_and_changed_weights(dtype: torch.dtype, group: str) -> None:
    x, norm = normal(1009, 400, dtype=dtype)[:, :384], NO_NORM if group == "one layer" else affine(384, dtype)
    operation = NormLinears(norm, GROUPS[group](dtype))
    before = check(x, operation)
    assert run(x[:0], operation).shape == (0, sum(member.sizes[1] for member in operation.group))
    if group == "factors beside a dense layer":
        with torch.no_grad():
            operation.group[2].tensors[0].zero_()
        after = run(x, operation)
        assert torch.equal(after[:, :768], before[:, :768]) and not torch.equal(after[:, 768:], before[:, 768:])


LINEARS = (gonon(384, 384), gonon(384, 1536), monarch(384, 384), (197, 192), (1009, 768), (25216, 384))
"""Factors, or how many rows a dense layer has and how many inputs and outputs."""


@pytest.mark.parametrize(("kind", "dtype", "scaled"), all_pairs(LINEARS, DTYPES, (False, True)), ids=str)
def test_product_added_to_a_residual(kind: Any, dtype: torch.dtype, scaled: bool) -> None:
    linear = layer(kind, dtype) if isinstance(kind, Architecture) else dense(kind[1], kind[1], dtype)
    rows = (2, 197) if isinstance(kind, Architecture) else (kind[0],)
    inputs, outputs = linear.sizes
    residual, scale = normal(*rows, outputs, dtype=dtype), normal(outputs, dtype=dtype) if scaled else None
    check(normal(*rows, inputs, dtype=dtype), LinearResidual(linear, residual, scale))


def linear(kind: str, inputs: int, outputs: int, dtype: torch.dtype) -> Linear:
    return dense(inputs, outputs, dtype) if kind == "dense" else layer({"gonon": gonon, "monarch": monarch}[kind](outputs, inputs), dtype)


PLAIN = (("dense", "dense"), ("gonon", "dense"), ("dense", "gonon"), ("gonon", "gonon"))


@pytest.mark.parametrize(("kinds", "activation", "dtype"), all_pairs(PLAIN, ("gelu", "gelu_tanh", "silu"), DTYPES), ids=str)
def test_feed_forward_in_two_launches(kinds: tuple[str, str], activation: str, dtype: torch.dtype) -> None:
    up, down = linear(kinds[0], 384, 1536, dtype), linear(kinds[1], 1536, 384, dtype)
    check(normal(2, 197, 384, dtype=dtype), FeedForward(affine(384, dtype), up, down, activation))


def gated(kind: str, dtype: torch.dtype, features: int = 192, hidden: int = 512, gate: int = 0) -> tuple[Gated, Linear]:
    """Layers up, of two or packed in one, and down; converted, dense, or one of each. The sizes are those of eva02's models."""
    up, down, form = kind.split("-")
    if form == "packed":
        return Gated((linear(up, features, 2 * hidden, dtype),), gate), linear(down, hidden, features, dtype)
    kinds = ("dense", "monarch") if up == "mixed" else (up, up)
    return Gated(tuple(linear(each, features, hidden, dtype) for each in kinds), gate), linear(down, hidden, features, dtype)


GATED = ("dense-dense-packed", "dense-dense-apart", "monarch-monarch-packed", "monarch-monarch-apart", "mixed-monarch-apart")


@pytest.mark.parametrize(("kind", "more", "dtype"), all_pairs(GATED, ("nothing", "norm inside", "layer scale"), DTYPES), ids=str)
def test_gated_blocks(kind: str, more: str, dtype: torch.dtype) -> None:
    features, hidden = (192, 512) if more == "norm inside" else (384, 1024)
    up, down = gated(kind, dtype, features, hidden, gate=int(more == "layer scale"))
    inner = affine(hidden, dtype) if more == "norm inside" else None
    scale = normal(features, dtype=dtype, deviation=0.1) if more == "layer scale" else None
    check(normal(3, 197, features, dtype=dtype), FeedForward(affine(features, dtype), up, down, "silu", scale, True, inner))


@pytest.mark.parametrize(("kind", "rows", "dtype"), all_pairs(GATED[:3], (0, 8, 1009), DTYPES), ids=str)
def test_gated_blocks_of_any_number_of_rows(kind: str, rows: int, dtype: torch.dtype) -> None:
    operation = FeedForward(affine(192, dtype), *gated(kind, dtype), "silu", None, False)
    x = normal(rows, 192, dtype=dtype, mean=3.0)
    assert run(x, operation).shape == x.shape
    if rows:
        check(x, operation)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_and_values_that_differ_in_form_and_wide_ones(activation: str, dtype: torch.dtype) -> None:
    up = Gated((layer(gonon(1536, 384), dtype), layer(monarch(1536, 384), dtype)), 1)
    check(normal(1009, 384, dtype=dtype), FeedForward(None, up, layer(gonon(384, 1536), dtype), activation))
    if activation == "silu":
        up, down = gated("monarch-monarch-packed", dtype, 1536, 4096)
        check(normal(257, 1536, dtype=dtype), FeedForward(affine(1536, dtype), up, down, "silu", normal(1536, dtype=dtype, deviation=0.1)))


def test_the_product_with_a_gate_takes_odd_places_and_what_is_not_finite() -> None:
    holder = normal(300, 2 * 520 + 3, dtype=torch.bfloat16)
    for gate, value in ((holder[:, :520], holder[:, 520:1040]), (holder[:, 1:521], holder[:, 523:])):
        truth = silu(gate.double()) * value.double()
        comparable(run_gated(gate, value, "silu"), silu(gate) * value, truth)
    gate = torch.cat([torch.linspace(-12, 12, 1 << 16), torch.randn(1 << 16)]).cuda().view(-1, 512)
    comparable(run_gated(gate, torch.ones_like(gate), "gelu"), gelu(gate), gelu(gate.double()), 1.05)
    gate = torch.tensor([[torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 0.0, -1e-30, 7.0]], device="cuda")
    y = run_gated(gate, torch.ones_like(gate), "gelu")[0]
    assert not bool(y[:3].isfinite().any())
    assert torch.equal(y[3:], gelu(gate.double())[0, 3:].float())


WIDE = gonon(3072, 768), gonon(768, 3072)
UNEVEN = Architecture.of((2, 96, 32, 2), (2, 32, 24, 2)), Architecture.of((1, 32, 32, 3), (3, 32, 128, 1))
JOINED = Architecture.of((1, 256, 128, 3), (2, 192, 64, 1)), Architecture.of((1, 64, 128, 2), (2, 128, 384, 1))
FACTOR_BY_FACTOR = [
    (WIDE, HALF, 25200, "silu"),  # which almost fill a round of the kernel for the factors around an activation, on 132 multiprocessors
    (WIDE, torch.bfloat16, 1, "silu"),
    ((monarch(3072, 768), monarch(768, 3072)), HALF, 8451, "gelu_tanh"),
    (UNEVEN, HALF, 197, "silu"),
    (UNEVEN, torch.bfloat16, 8451, "gelu_tanh"),
    (JOINED, HALF, 197, "gelu"),
    (JOINED, torch.bfloat16, 50000, "gelu_tanh"),
]


def factor_by_factor(x: Tensor, block: FeedForward, moments: Tensor | None = None) -> Tensor:
    norm, up, down, activation, scale, residual, *_ = block
    assert isinstance(up, FusedFactors) and isinstance(down, FusedFactors)
    return run_wide_ffn(x, norm, up, down, activation, scale, residual=residual, moments=moments)


@pytest.mark.parametrize(("architectures", "dtype", "rows", "activation"), FACTOR_BY_FACTOR)
def test_feed_forward_factor_by_factor(
    architectures: tuple[Architecture, Architecture], dtype: torch.dtype, rows: int, activation: str
) -> None:
    up, down = (layer(architecture, dtype) for architecture in architectures)
    features = up.sizes[0]
    x, block = (
        normal(rows, features, dtype=dtype),
        FeedForward(affine(features, dtype), up, down, activation, normal(features, dtype=dtype)),
    )
    check(x, block, out=factor_by_factor(x, block))


def test_feed_forward_factor_by_factor_without_what_may_be_left_out() -> None:
    up, down = (FusedFactors(layer(architecture, HALF).factors) for architecture in WIDE)
    x = normal(500, 768, dtype=HALF)
    for norm in (None, NO_NORM):
        block = FeedForward(norm, up, down, residual=False)
        check(x, block, out=factor_by_factor(x, block))


def test_moments_may_come_in_parts_and_from_a_residual_sum() -> None:
    up, down = (layer(architecture, HALF) for architecture in WIDE)
    x, block = normal(500, 768, dtype=HALF, mean=30.0), FeedForward(affine(768, HALF), up, down, residual=False)
    whole, truth = factor_by_factor(x, block), wide(block).plainly(x.double())
    for count in (1, 3, 8):
        parts = x.float().unflatten(1, (count, -1))
        moments = torch.stack((parts.mean(dim=2), parts.var(dim=2, correction=0) * parts.shape[2]), dim=2)
        comparable(factor_by_factor(x, block, moments), whole, truth)
    x, residual = normal(43, 197, 768, dtype=HALF), normal(43, 197, 768, dtype=HALF, mean=30.0)
    linear = Dense(normal(768, 768, dtype=HALF, deviation=0.03), None)
    assert not leaves_moments(x[:1], LinearResidual(linear, residual[:1]))
    assert leaves_moments(x, LinearResidual(linear, residual))
    y, moments = run_with_moments(x, LinearResidual(linear, residual))
    assert torch.equal(y, run(x, LinearResidual(linear, residual)))
    block = block._replace(residual=True)
    comparable(run(y, block._replace(moments=moments)), run(y, block), wide(block).plainly(y.double()))


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(("architecture", "rows", "mean"), [(gonon(768, 768), 197, 30.0), (monarch(384, 384), 8451, 0.0)])
def test_linears_that_share_x_factor_by_factor(dtype: torch.dtype, architecture: Architecture, rows: int, mean: float) -> None:
    features = architecture.in_features
    x, norm, group = normal(rows, features, dtype=dtype, mean=mean), affine(features, dtype), [layer(architecture, dtype) for _ in range(3)]
    check(x, NormLinears(norm, group), out=run_wide_group(x, norm, group))
    same = run_wide_group(x[:1].expand(70, -1), norm, group)
    assert torch.equal(same, same[:1].expand(70, -1)) and bool(same.isfinite().all())
    assert run_wide_group(x.as_strided((1, features), (1, 1)), None, group).shape == (1, 3 * features)
    assert run_wide_group(x[:0], norm, group).shape == (0, 3 * features)


def test_wide_blocks_and_many_rows_of_linears_that_share_x() -> None:
    up, down = (layer(architecture, HALF) for architecture in WIDE)
    x, block = normal(3001, 800, dtype=HALF, mean=30.0)[:, :768], FeedForward(affine(768, HALF), up, down)
    found, x = check(x, block), x.contiguous()
    assert torch.equal(found, run(x, block))
    operation = NormLinears(affine(768, HALF), [layer(gonon(768, 768), HALF) for _ in range(3)])
    for rows in (1800, 2100):  # factor by factor, and in one launch
        check(x[:rows], operation)
        check_replay(lambda rows=rows: run(x[:rows], operation))


@pytest.mark.parametrize("kind", ["norm and projections", "gated", "factor by factor"])
def test_a_changed_weight_is_seen_and_graphs_replay(kind: str) -> None:
    x, norm = normal(394, 384, dtype=HALF), affine(384, HALF)
    changed: Tensor | None = norm.weight
    if kind == "norm and projections":
        operation: Any = NormLinears(norm, [layer(gonon(384, 384), HALF) for _ in range(3)])
    elif kind == "gated":
        up, down = gated("monarch-monarch-packed", HALF, 384, 1024)
        operation, changed = FeedForward(norm, up, down, "silu"), up.members[0].tensors[0]
    else:
        x, (up, down) = normal(300, 96, dtype=HALF), (layer(architecture, HALF) for architecture in UNEVEN)
        operation, changed = FeedForward(None, up, down), down.factors[0]
    call = factor_by_factor if kind == "factor by factor" else run
    before = call(x, operation)
    check_replay(lambda: call(x, operation))
    assert changed is not None
    with torch.no_grad():
        changed.mul_(-1)
    assert not torch.equal(check(x, operation, out=call(x, operation)), before)
    check_replay(lambda: call(x, operation))


def test_reasons() -> None:
    x, group = normal(8, 384, dtype=HALF), [layer(gonon(384, 384), HALF)]
    norm, (up, down) = Norm(None, None), gated("dense-dense-apart", HALF, 384, 1024)
    uneven = Gated((dense(384, 1024, HALF), Dense(normal(512, 384, dtype=HALF))))
    assert reason(x, NormLinears(norm, group)) is None
    for words, operands, operation in (
        ("no gradients", x.clone().requires_grad_(), NormLinears(norm, group)),
        ("float64", x.double(), NormLinears(norm, group)),
        ("take 384 features", x[:, :380], NormLinears(norm, group)),
        ("expected a residual", x, LinearResidual(group[0], x[:4])),
        ("fit each other", x, FeedForward(None, up, dense(1000, 384, HALF), "silu")),
        ("silu, got 'relu'", x, FeedForward(None, up, down, "relu")),
        ("as many outputs", x, FeedForward(None, uneven, dense(768, 384, HALF), "silu")),
    ):
        assert words in str(reason(operands, operation))
