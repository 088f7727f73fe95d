"""Gated feed-forward blocks on the GPU: against float64, beside PyTorch's own operators in the same dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from flysurgery.gpu.gated import run_gated
from flysurgery.ops import Dense, FeedForward, FusedFactors, Gated, Linear, reason, run
from flysurgery.patterns import gonon, monarch
from tests.gpu.gpu_blocks import DTYPES, affine, comparable, dense, layer, normal, wide
from tests.support.problems import all_pairs

pytestmark = pytest.mark.gpu

SIZES = [(384, 1024), (192, 512)]
"""Those of eva02's small and tiny models: inputs and hidden units."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


def block(kind: str, features: int, hidden: int, dtype: torch.dtype, gate: int = 0) -> tuple[Gated, Linear]:
    """Layers up, of two or packed in one, and down; converted, dense, or one of each."""
    up_kind, down_kind, form = kind.split("-")

    def linear(outputs: int, inputs: int, of: str) -> Linear:
        return dense(inputs, outputs, dtype) if of == "dense" else layer(monarch(outputs, inputs, 4), dtype)

    if form == "packed":
        return Gated((linear(2 * hidden, features, up_kind),), gate), linear(features, hidden, down_kind)
    kinds = ("dense", "monarch") if up_kind == "mixed" else (up_kind, up_kind)
    return Gated(tuple(linear(hidden, features, each) for each in kinds), gate), linear(features, hidden, down_kind)


KINDS = (
    "dense-dense-packed",
    "dense-dense-apart",
    "monarch-monarch-packed",
    "monarch-monarch-apart",
    "mixed-monarch-apart",
    "dense-monarch-packed",
)


@pytest.mark.parametrize(("kind", "more", "dtype"), all_pairs(KINDS, ("nothing", "norm inside", "layer scale"), DTYPES))
def test_blocks(kind: str, more: str, dtype: torch.dtype) -> None:
    features, hidden = SIZES[more == "norm inside"]
    gate = 1 if more == "layer scale" else 0
    up, down = block(kind, features, hidden, dtype, gate)
    x, norm = normal(3, 197, features, dtype=dtype), affine(features, dtype)
    inner = affine(hidden, dtype) if more == "norm inside" else None
    scale = normal(features, dtype=dtype, deviation=0.1) if more == "layer scale" else None
    assert reason(x, FeedForward(norm, up, down, "silu", scale, True, inner)) is None
    out = run(x, FeedForward(norm, up, down, "silu", scale, True, inner))
    truth = FeedForward(wide(norm), wide(up), wide(down), "silu", wide(scale), True, wide(inner)).plainly(x.double())
    comparable(out, FeedForward(norm, up, down, "silu", scale, True, inner).plainly(x), truth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 1009])
@pytest.mark.parametrize("kind", ["dense-dense-packed", "monarch-monarch-packed", "monarch-monarch-apart"])
def test_any_number_of_rows(dtype: torch.dtype, rows: int, kind: str) -> None:
    up, down = block(kind, 192, 512, dtype)
    x, norm = normal(rows, 192, dtype=dtype, mean=3.0), affine(192, dtype)
    truth = FeedForward(wide(norm), wide(up), wide(down), "silu", None, False).plainly(x.double())
    comparable(run(x, FeedForward(norm, up, down, "silu", None, False)), FeedForward(norm, up, down, "silu", None, False).plainly(x), truth)
    assert run(x[:0], FeedForward(norm, up, down, "silu", None, False)).shape == (0, 192)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_of_factors_that_differ_in_form(activation: str, dtype: torch.dtype) -> None:
    up = Gated((layer(gonon(1536, 384), dtype), layer(monarch(1536, 384, 4), dtype)), 1)
    down, x = layer(gonon(384, 1536), dtype), normal(1009, 384, dtype=dtype)
    truth = FeedForward(None, wide(up), wide(down), activation).plainly(x.double())
    comparable(run(x, FeedForward(None, up, down, activation)), FeedForward(None, up, down, activation).plainly(x), truth)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wide_block_goes_factor_by_factor(dtype: torch.dtype) -> None:
    up, down = Gated((layer(monarch(8192, 1536, 4), dtype),)), layer(monarch(1536, 4096, 4), dtype)
    x, norm, scale = normal(257, 1536, dtype=dtype), affine(1536, dtype), normal(1536, dtype=dtype, deviation=0.1)
    truth = FeedForward(wide(norm), wide(up), wide(down), "silu", scale.double()).plainly(x.double())
    comparable(run(x, FeedForward(norm, up, down, "silu", scale)), FeedForward(norm, up, down, "silu", scale).plainly(x), truth)


def test_a_graph_replays_and_new_weights_are_seen() -> None:
    up, down = block("monarch-monarch-packed", 384, 1024, torch.float16)
    x, norm = normal(394, 384, dtype=torch.float16), affine(384, torch.float16)
    before = run(x, FeedForward(norm, up, down, "silu"))
    first = up.members[0]
    assert isinstance(first, FusedFactors)
    with torch.no_grad():
        first.factors[0].mul_(-1)
    after = run(x, FeedForward(norm, up, down, "silu"))
    assert not torch.equal(before, after)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, FeedForward(norm, up, down, "silu"))
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, after)


@pytest.mark.parametrize("kind", ["dense-dense-packed", "monarch-monarch-packed", "monarch-monarch-apart"])
def test_compiled_in_one_graph(kind: str) -> None:
    up, down = block(kind, 192, 512, torch.float16)
    x, norm = normal(70, 192, dtype=torch.float16), affine(192, torch.float16)

    def block_of(x: Tensor) -> Tensor:
        return run(x, FeedForward(norm, up, down, "silu"))

    assert torch.equal(torch.compile(block_of, fullgraph=True, dynamic=True, backend="aot_eager")(x), block_of(x))


def test_reasons() -> None:
    x, (up, down) = normal(8, 384, dtype=torch.float16), block("dense-dense-apart", 384, 1024, torch.float16)
    assert "fit each other" in str(reason(x, FeedForward(None, up, dense(1000, 384, torch.float16), "silu")))
    assert "not 'relu'" in str(reason(x, FeedForward(None, up, down, "relu")))
    uneven = Gated((dense(384, 1024, torch.float16), Dense(normal(512, 384, dtype=torch.float16))))
    assert "as many outputs" in str(reason(x, FeedForward(None, uneven, dense(768, 384, torch.float16), "silu")))


def test_the_operators_are_well_behaved() -> None:
    x, both = normal(70, 384, dtype=torch.float16), layer(monarch(2048, 384, 4), torch.float16)
    torch.library.opcheck(
        torch.ops.flysurgery.fused_linears.default, (x, None, None, 1e-6, list(both.factors), [both.bias], 1, "silu", None, None, "fp16")
    )
    members = [dense(384, 1024, torch.float16) for _ in range(2)]
    weights, biases = [each.weight for each in members], [each.bias for each in members]
    torch.library.opcheck(torch.ops.flysurgery.dense_gated.default, (x, weights, biases, 0, "gelu", "fp16"))


def hidden_of(gate: Tensor, value: Tensor) -> Tensor:
    return torch.ops.flysurgery.gated(gate, value, "silu")


def test_the_product_with_a_gate_takes_halves_and_odd_places() -> None:
    holder = normal(300, 2 * 520 + 3, dtype=torch.bfloat16)
    for gate, value in ((holder[:, :520], holder[:, 520:1040]), (holder[:, 1:521], holder[:, 523:])):
        truth = torch.nn.functional.silu(gate.double()) * value.double()
        comparable(hidden_of(gate, value), torch.nn.functional.silu(gate) * value, truth)
    torch.library.opcheck(torch.ops.flysurgery.gated.default, (holder[:, :520], holder[:, 520:1040], "silu"))


def test_gelu_of_float32_is_as_exact_as_torchs() -> None:
    gate = torch.cat([torch.linspace(-12, 12, 1 << 16), torch.randn(1 << 16)]).cuda().view(-1, 512)
    truth = gelu(gate.double())

    def error(y: Tensor) -> float:
        return float((y.double() - truth).norm())

    assert error(run_gated(gate, torch.ones_like(gate), "gelu")) <= 1.05 * error(gelu(gate))


def test_gelu_of_what_is_not_finite() -> None:
    gate = torch.tensor([[torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 0.0, -1e-30, 7.0]], device="cuda")
    y = run_gated(gate, torch.ones_like(gate), "gelu")[0]
    assert not bool(y[:3].isfinite().any())
    assert torch.equal(y[3:], gelu(gate.double())[0, 3:].float())
