"""Layers multiplied factor by factor on the GPU: against float64, beside PyTorch's own operators in the same dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flysurgery.gpu.obstacles import multiprocessors_of
from flysurgery.gpu.wide_ffn import run_wide_ffn
from flysurgery.gpu.wide_group import run_wide_group
from flysurgery.ops import (
    Dense,
    FeedForward,
    FusedFactors,
    LinearResidual,
    Norm,
    NormLinears,
    ks_linear,
    leaves_moments,
    run,
    run_with_moments,
    way,
)
from flysurgery.ops.feed_forward import ACTIVATIONS
from flysurgery.patterns import Architecture
from flysurgery.patterns.catalog import gonon, monarch
from tests.gpu.gpu_blocks import affine, comparable, layer, normal, wide

pytestmark = pytest.mark.gpu

ONE_ROUND, TWO_ROUNDS = 25200, 50000
"""Rows that almost fill the rounds of the kernel for the factors around an activation, on the 132 multiprocessors of an H100 or H200."""
UNEVEN = Architecture.of((2, 96, 32, 2), (2, 32, 24, 2)), Architecture.of((1, 32, 32, 3), (3, 32, 128, 1))
JOINED = Architecture.of((1, 256, 128, 3), (2, 192, 64, 1)), Architecture.of((1, 64, 128, 2), (2, 128, 384, 1))
BLOCKS = [(gonon(3072, 768), gonon(768, 3072)), (monarch(3072, 768), monarch(768, 3072)), UNEVEN, JOINED]
GROUPS = [gonon(768, 768), monarch(768, 768), monarch(384, 384)]
HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


def plain(x: Tensor, layer: FusedFactors) -> Tensor:
    """The layer by PyTorch's batched products, in the dtype of x."""
    return ks_linear(x, layer.factors, layer.bias, backend="bmm")


def plain_norm(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def plain_ffn(x: Tensor, norm: Norm | None, up: FusedFactors, down: FusedFactors, activation: str, scale: Tensor | None) -> Tensor:
    y = plain(ACTIVATIONS[activation](plain(plain_norm(x, norm), up)), down)
    return y if scale is None else x + y * scale


CASES = [
    (0, torch.float16, 1, "gelu"),
    (0, torch.bfloat16, 197, "silu"),
    (0, torch.float16, 8451, "gelu"),
    (0, torch.float16, ONE_ROUND, "silu"),
    (1, torch.float16, 8451, "gelu_tanh"),
    (1, torch.bfloat16, 75, "gelu"),
    (2, torch.float16, 197, "silu"),
    (2, torch.bfloat16, 8451, "gelu_tanh"),
    (3, torch.float16, 197, "gelu"),
    (3, torch.float16, ONE_ROUND, "gelu"),
    (3, torch.bfloat16, TWO_ROUNDS, "gelu_tanh"),
]


@pytest.mark.parametrize(("which", "dtype", "rows", "activation"), CASES)
def test_feed_forward(which: int, dtype: torch.dtype, rows: int, activation: str) -> None:
    up, down = (layer(architecture, dtype) for architecture in BLOCKS[which])
    x, norm, scale = normal(rows, up.sizes[0], dtype=dtype), affine(up.sizes[0], dtype), normal(down.sizes[1], dtype=dtype)
    out = run_wide_ffn(x, norm, up.factors, up.bias, down.factors, down.bias, activation, scale, residual=True)
    truth = plain_ffn(x.double(), wide(norm), wide(up), wide(down), activation, scale.double())
    comparable(out, plain_ffn(x, norm, up, down, activation, scale), truth)


def test_moments_may_come_in_parts() -> None:
    up, down = (layer(architecture, torch.float16) for architecture in BLOCKS[0])
    x, norm = normal(500, 768, dtype=torch.float16, mean=30.0), affine(768, torch.float16)
    operands = (up.factors, up.bias, down.factors, down.bias, "gelu", None)
    whole = run_wide_ffn(x, norm, *operands, residual=False)
    truth = plain_ffn(x.double(), wide(norm), wide(up), wide(down), "gelu", None)
    for count in (1, 3, 4, 8):
        parts = x.float().unflatten(1, (count, -1))
        moments = torch.stack((parts.mean(dim=2), parts.var(dim=2, correction=0) * parts.shape[2]), dim=2)
        comparable(run_wide_ffn(x, norm, *operands, residual=False, moments=moments), whole, truth)


def test_feed_forward_without_what_may_be_left_out() -> None:
    up, down = (FusedFactors(layer(architecture, torch.float16).factors) for architecture in BLOCKS[0])
    x = normal(500, 768, dtype=torch.float16)
    for norm in (None, Norm(None, None, 1e-6)):
        out = run_wide_ffn(x, norm, up.factors, None, down.factors, None, "gelu", None, residual=False)
        truth = plain_ffn(x.double(), norm, wide(up), wide(down), "gelu", None)
        comparable(out, plain_ffn(x, norm, up, down, "gelu", None), truth)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("architecture", GROUPS, ids=str)
@pytest.mark.parametrize(("rows", "mean"), [(197, 30.0), (8451, 0.0)])
def test_linears_that_share_x(dtype: torch.dtype, architecture: Architecture, rows: int, mean: float) -> None:
    x, norm = normal(rows, architecture.in_features, dtype=dtype, mean=mean), affine(architecture.in_features, dtype)
    group = [layer(architecture, dtype) for _ in range(3)]
    factors, biases = [factor for member in group for factor in member.factors], [m.bias for m in group if m.bias is not None]
    out = run_wide_group(x, norm, factors, biases, 3)
    truth = torch.cat([plain(plain_norm(x.double(), wide(norm)), wide(member)) for member in group], dim=1)
    comparable(out, torch.cat([plain(plain_norm(x, norm), member) for member in group], dim=1), truth)


def test_whole_operators_take_them() -> None:
    up, down = (layer(architecture, torch.float16) for architecture in BLOCKS[0])
    norm = affine(768, torch.float16)
    holder = normal(3001, 800, dtype=torch.float16, mean=30.0)
    x = holder[:, :768]
    assert len(way(x, FeedForward(norm, up, down)).launches()) == 5
    assert len(way(normal(192 * multiprocessors_of(0), 768, dtype=torch.float16), FeedForward(norm, up, down)).launches()) == 4
    out, truth = run(x, FeedForward(norm, up, down)), x.double() + plain_ffn(x.double(), wide(norm), wide(up), wide(down), "gelu", None)
    comparable(out, x + plain_ffn(x, norm, up, down, "gelu", None), truth)
    assert torch.equal(out, run(x.contiguous(), FeedForward(norm, up, down)))
    group = [layer(GROUPS[0], torch.float16) for _ in range(3)]
    found = way(x, NormLinears(norm, group))
    assert not isinstance(found, str) and len(found.launches()) == 1
    truth = torch.cat([plain(plain_norm(x.double(), wide(norm)), wide(member)) for member in group], dim=1)
    comparable(run(x, NormLinears(norm, group)), torch.cat([plain(plain_norm(x, norm), member) for member in group], dim=1), truth)


@pytest.mark.parametrize(("linears", "few", "many"), [(3, 1800, 2100), (1, 3200, 3500)])
def test_many_rows_of_linears_that_share_x_take_one_launch(linears: int, few: int, many: int) -> None:
    norm, group = affine(768, torch.float16), [layer(GROUPS[0], torch.float16) for _ in range(linears)]
    x = normal(many, 768, dtype=torch.float16, mean=3.0)
    compiled = torch.compile(lambda x: run(x, NormLinears(norm, group)), fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, launches in ((few, 3), (many, 1)):  # compiled once, for any number of rows
        own = x[:rows]
        found = way(own, NormLinears(norm, group))
        assert not isinstance(found, str) and len(found.launches()) == launches
        out = run(own, NormLinears(norm, group))
        truth = torch.cat([plain(plain_norm(own.double(), wide(norm)), wide(member)) for member in group], dim=1)
        comparable(out, torch.cat([plain(plain_norm(own, norm), member) for member in group], dim=1), truth)
        assert torch.equal(compiled(own), out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(own, NormLinears(norm, group))
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, out)


@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_moments_that_a_residual_sum_leaves_behind(mean: float) -> None:
    up, down = (layer(architecture, torch.float16) for architecture in BLOCKS[0])
    norm, dense = affine(768, torch.float16), Dense(normal(768, 768, dtype=torch.float16, deviation=0.03), None)
    x, residual = normal(43, 197, 768, dtype=torch.float16), normal(43, 197, 768, dtype=torch.float16, mean=mean)
    assert not leaves_moments(x[:1], LinearResidual(dense, residual[:1]))
    assert leaves_moments(x, LinearResidual(dense, residual))
    y, moments = run_with_moments(x, LinearResidual(dense, residual))
    assert torch.equal(y, run(x, LinearResidual(dense, residual)))
    truth = y.double() + plain_ffn(y.double(), wide(norm), wide(up), wide(down), "gelu", None)
    comparable(run(y, FeedForward(norm, up, down, moments=moments)), run(y, FeedForward(norm, up, down)), truth)


def test_rows_may_be_one_and_the_same() -> None:
    group = [layer(GROUPS[0], torch.float16) for _ in range(3)]
    factors = [factor for member in group for factor in member.factors]
    x = normal(1, 768, dtype=torch.float16)
    out = run_wide_group(x.expand(70, -1), affine(768, torch.float16), factors, [], 3)
    assert torch.equal(out, out[:1].expand(70, -1)) and bool(out.isfinite().all())
    assert run_wide_group(x.as_strided((1, 768), (1, 1)), None, factors, [], 3).shape == (1, 2304)


def test_a_changed_weight_is_seen_and_graphs_replay() -> None:
    up, down = (layer(architecture, torch.float16) for architecture in BLOCKS[2])
    x = normal(300, 96, dtype=torch.float16)

    def run() -> Tensor:
        return run_wide_ffn(x, None, up.factors, up.bias, down.factors, down.bias, "gelu", None, residual=True)

    before = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, before)
    with torch.no_grad():
        down.factors[0].zero_()
    assert down.bias is not None
    assert torch.equal(run(), (x.float() + down.bias.float()).half())


def test_the_operators_are_well_behaved() -> None:
    up, down = (layer(architecture, torch.float16) for architecture in BLOCKS[2])
    x = normal(70, 96, dtype=torch.float16)
    norm = affine(96, torch.float16)
    arguments = (x, norm.weight, norm.bias, 1e-6, list(up.factors), up.bias, list(down.factors), down.bias, "gelu", None, True)
    torch.library.opcheck(torch.ops.flysurgery.wide_ffn.default, arguments)
    x, norm, group = normal(70, 256, dtype=torch.float16), affine(256, torch.float16), [layer(monarch(256, 256), torch.float16)] * 2
    factors, biases = [factor for member in group for factor in member.factors], [member.bias for member in group]
    torch.library.opcheck(torch.ops.flysurgery.wide_group.default, (x, norm.weight, None, 1e-6, factors, biases, 2))
    assert run_wide_group(x[:0], norm, factors, [], 2).shape == (0, 512)
