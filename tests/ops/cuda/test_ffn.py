"""The fused feed-forward block on the GPU: against float64, beside PyTorch's own operators in the same dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops import FusedFactors, Norm, composed, ffn, ffn_reason
from flysurgery.patterns import Architecture
from flysurgery.patterns.catalog import gonon, monarch

pytestmark = pytest.mark.gpu

K = 1.25 * 1.2
"""Level 2 of the tolerance policy, for a product of factors in half precision."""

GONON, MONARCH = (gonon(1536, 384), gonon(384, 1536)), (monarch(1536, 384), monarch(384, 1536))
SMALL = (monarch(768, 192), monarch(192, 768))
SMALL_GONON, WIDE = (gonon(768, 192), gonon(192, 768)), (gonon(3072, 768), gonon(768, 3072))
Block = tuple[Norm, FusedFactors, FusedFactors, Tensor]


@pytest.fixture(autouse=True)
def any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, too, by the kernel that has the whole block."""
    monkeypatch.setattr("flysurgery.ops.feed_forward.takes_few_rows", lambda *_: False)


def make_block(architectures: tuple[Architecture, Architecture], dtype: torch.dtype, seed: int = 5) -> Block:
    make = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, deviation: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=make, device="cuda") * deviation + mean).to(dtype)

    def layer(architecture: Architecture) -> FusedFactors:
        factors = tuple(normal(*pattern.factor_shape, deviation=pattern.c**-0.5) for pattern in architecture)
        return FusedFactors(factors, normal(architecture.out_features, deviation=0.3))

    up, down = architectures
    norm = Norm(normal(up.in_features, deviation=0.2, mean=1.0), normal(up.in_features, deviation=0.2), 1e-6)
    return norm, layer(up), layer(down), normal(down.out_features)


def rows_of(rows: int, features: int, dtype: torch.dtype, mean: float = 0.0) -> Tensor:
    make = torch.Generator("cuda").manual_seed(rows)
    return (torch.randn(rows, features, generator=make, device="cuda") + mean).to(dtype)


def widened(norm: Norm | None, up: FusedFactors, down: FusedFactors, scale: Tensor | None) -> tuple[object, ...]:
    def wide(part: FusedFactors) -> FusedFactors:
        return FusedFactors(tuple(f.double() for f in part.factors), None if part.bias is None else part.bias.double())

    def wide_or_none(part: Tensor | None) -> Tensor | None:
        return None if part is None else part.double()

    exact = None if norm is None else Norm(wide_or_none(norm.weight), wide_or_none(norm.bias), norm.eps)
    return exact, wide(up), wide(down), None if scale is None else scale.double()


def check_graphs_and_compilers(block: Block, x: Tensor) -> None:
    norm, up, down, scale = block
    expected = ffn(x, norm, up, down, "gelu", scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ffn(x, norm, up, down, "gelu", scale)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)
    compiled = torch.compile(lambda x: ffn(x, norm, up, down, "gelu", scale), fullgraph=True)
    assert torch.equal(compiled(x), expected)


def check_chain(block: Block, x: Tensor) -> None:
    """Launches that begin while the one before still runs see its results, eager and in a graph."""
    norm, up, down, scale = block

    def chain(pause: Callable[[], None]) -> Tensor:
        value = x
        for _ in range(6):
            value = ffn(value, norm, up, down, "gelu", scale)
            pause()
        return value

    expected = chain(torch.cuda.synchronize)
    assert bool(expected.isfinite().all())
    assert torch.equal(chain(lambda: None), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(lambda: None)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


def check(
    x: Tensor, block: tuple[Norm | None, FusedFactors, FusedFactors, Tensor | None], activation: str, residual: bool = True, k: float = K
) -> None:
    norm, up, down, scale = block
    out = ffn(x, norm, up, down, activation, scale, residual)
    exact_norm, exact_up, exact_down, exact_scale = widened(*block)
    truth = composed.ffn(x.double(), exact_norm, exact_up, exact_down, activation, exact_scale, residual)  # type: ignore[arg-type]
    yardstick = composed.ffn(x, norm, up, down, activation, scale, residual)
    assert out.dtype == x.dtype and out.shape == yardstick.shape
    assert bool(out.isfinite().all())
    error, allowed = ((value.double() - truth).square().mean().sqrt() for value in (out, yardstick))
    assert error <= k * allowed, f"rms error {float(error):.3g}, PyTorch's is {float(allowed):.3g}"
    worst = ((out.double() - truth).square().mean(-1).sqrt() / (yardstick.double() - truth).square().mean().sqrt()).max()
    assert worst <= 4 * k, f"one row errs by {float(worst):.3g} times PyTorch's rms error"


@pytest.mark.parametrize("architectures", [GONON, MONARCH, SMALL])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 75, 197, 25216])
def test_any_number_of_rows(architectures: tuple[Architecture, Architecture], dtype: torch.dtype, rows: int) -> None:
    check(rows_of(rows, architectures[0].in_features, dtype), make_block(architectures, dtype), "gelu")


@pytest.mark.parametrize("architectures", [GONON, MONARCH])
@pytest.mark.parametrize("seed", [6, 7, 8])
def test_odd_rows_on_all_multiprocessors(architectures: tuple[Architecture, Architecture], seed: int) -> None:
    check(rows_of(25216 - seed, 384, torch.float16, mean=seed), make_block(architectures, torch.float16, seed), "gelu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("architectures", [SMALL_GONON, WIDE])
def test_other_widths(architectures: tuple[Architecture, Architecture], dtype: torch.dtype) -> None:
    norm, up, down, _ = make_block(architectures, dtype)
    check(rows_of(197, architectures[0].in_features, dtype), (norm, up, down, None), "gelu")


@pytest.mark.parametrize(
    ("activation", "residual", "with_norm", "with_scale"),
    [
        ("gelu", True, True, True),
        ("gelu", False, False, False),
        ("gelu_tanh", True, False, True),
        ("gelu_tanh", False, True, False),
        ("silu", True, True, False),
        ("silu", False, False, True),
    ],
)
def test_all_pairs_of_options(activation: str, residual: bool, with_norm: bool, with_scale: bool) -> None:
    norm, up, down, scale = make_block(MONARCH, torch.float16)
    check(rows_of(130, 384, torch.float16), (norm if with_norm else None, up, down, scale if with_scale else None), activation, residual)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_activations_in_bfloat16(activation: str) -> None:
    check(rows_of(25216, 384, torch.bfloat16), make_block(MONARCH, torch.bfloat16), activation, k=1.25)


@pytest.mark.parametrize("architectures", [GONON, SMALL])
def test_several_rounds(architectures: tuple[Architecture, Architecture]) -> None:
    check(rows_of(60001, architectures[0].in_features, torch.float16), make_block(architectures, torch.float16), "gelu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("architectures", [GONON, MONARCH])
def test_runs_on_all_multiprocessors_are_bit_equal(architectures: tuple[Architecture, Architecture], dtype: torch.dtype) -> None:
    norm, up, down, scale = make_block(architectures, dtype)
    x = rows_of(25216, 384, dtype)
    first = ffn(x, norm, up, down, "gelu", scale)
    for _ in range(20):
        assert torch.equal(first, ffn(x, norm, up, down, "gelu", scale))
    assert torch.equal(first[-197:], ffn(x[-197:], norm, up, down, "gelu", scale))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hidden_units_far_from_zero(activation: str, dtype: torch.dtype) -> None:
    norm, up, down, scale = make_block(MONARCH, dtype)
    up.factors[0].mul_(100)
    check(rows_of(130, 384, dtype), (norm, up, down, scale), activation)


def test_norm_and_layers_without_parameters() -> None:
    _, up, down, _ = make_block(SMALL, torch.float16)
    check(rows_of(64, 192, torch.float16), (Norm(None, None, 1e-6), FusedFactors(up.factors), FusedFactors(down.factors), None), "gelu")


@pytest.mark.parametrize("mean", [30.0, 1000.0])
def test_rows_far_from_zero(mean: float) -> None:
    check(rows_of(197, 384, torch.float16, mean), make_block(GONON, torch.float16), "gelu")


def test_the_largest_halves_can_be_normalized() -> None:
    x = rows_of(64, 384, torch.float16)
    x[:, 0], x[:, 1:9] = 65504.0, -65504.0
    check(x, make_block(GONON, torch.float16), "gelu", residual=False)


def test_a_tiny_scale_is_not_lost() -> None:
    norm, up, down, _ = make_block(MONARCH, torch.float16)
    scale = torch.full((384,), 1e-6, device="cuda")
    out = ffn(rows_of(64, 384, torch.float16), norm, up, down, "gelu", scale, residual=False)
    truth = composed.ffn(rows_of(64, 384, torch.float16), norm, up, down, "gelu", None, residual=False).double() * 1e-6
    assert (out.double() - truth).abs().max() <= 2.0**-24 + 1e-2 * truth.abs().max()


def test_strided_rows_batches_and_second_runs_are_bit_equal() -> None:
    norm, up, down, scale = make_block(GONON, torch.bfloat16)
    x = rows_of(600, 384, torch.bfloat16)
    out = ffn(x, norm, up, down, "gelu", scale)
    assert torch.equal(out, ffn(x, norm, up, down, "gelu", scale))
    assert torch.equal(out.view(2, 300, 384), ffn(x.view(2, 300, 384), norm, up, down, "gelu", scale))
    wide = torch.full((600, 400), torch.nan, device="cuda", dtype=torch.bfloat16)
    wide[:, :384] = x
    assert torch.equal(out, ffn(wide[:, :384], norm, up, down, "gelu", scale))
    assert ffn(x[:0], norm, up, down, "gelu", scale).shape == (0, 384)


def test_a_changed_weight_is_seen() -> None:
    norm, up, down, scale = make_block(SMALL, torch.float16)
    x = rows_of(64, 192, torch.float16)
    ffn(x, norm, up, down, "gelu", scale)
    with torch.no_grad():
        down.factors[0].mul_(2)
        assert norm.weight is not None
        norm.weight.mul_(0.5)
    check(x, (norm, up, down, scale), "gelu")


def test_graphs_and_compilers() -> None:
    check_graphs_and_compilers(make_block(GONON, torch.float16), rows_of(394, 384, torch.float16))


@pytest.mark.parametrize("rows", [197, 25216])
def test_a_chain_of_launches_that_begin_early(rows: int) -> None:
    check_chain(make_block(GONON, torch.float16), rows_of(rows, 384, torch.float16))


def test_what_it_refuses() -> None:
    norm, up, down, scale = make_block(SMALL, torch.float16)
    x = rows_of(8, 192, torch.float16)
    assert ffn_reason(x, norm, up, down, "gelu", scale) is None
    assert "float64" in str(ffn_reason(x.double(), norm, up, down, "gelu", scale))
    assert "shape (192,)" in str(ffn_reason(x, norm, up, down, "gelu", scale[:64]))
    with pytest.raises(BackendError, match="no gradients"):
        ffn(x.clone().requires_grad_(), norm, up, down, "gelu", scale)
