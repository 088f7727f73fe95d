"""Feed-forward blocks by the kernels that have the whole block: against float64, beside PyTorch's operators in the same arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops import FeedForward, FusedFactors, Norm, reason, run, way
from flysurgery.patterns import Architecture
from flysurgery.patterns.catalog import gonon, low_rank, monarch
from tests.gpu.gpu_blocks import wide
from tests.support.rounding import rounding_as
from tests.support.tolerance import ARITHMETICS

pytestmark = pytest.mark.gpu

GONON, MONARCH = (gonon(1536, 384), gonon(384, 1536)), (monarch(1536, 384), monarch(384, 1536))
SMALL, SMALL_GONON = (monarch(768, 192), monarch(192, 768)), (gonon(768, 192), gonon(192, 768))
LOW_RANK, WIDE = (low_rank(1536, 384, 96), low_rank(384, 1536, 96)), (gonon(3072, 768), gonon(768, 3072))
FLOATS, HALVES = ("tf32", "fp32"), ("fp16", "bf16")
K = {"fp16": 1.25 * 1.2, "bf16": 1.25 * 1.2} | {mode: ARITHMETICS[mode].k for mode in FLOATS}
"""Level 2 of the tolerance policy, for a product of factors."""
Architectures = tuple[Architecture, Architecture]
Block = tuple[Norm, FusedFactors, FusedFactors, Tensor]
AnyBlock = tuple["Norm | None", FusedFactors, FusedFactors, "Tensor | None"]
in_floats = pytest.mark.parametrize("mode", FLOATS, indirect=True)
in_halves = pytest.mark.parametrize("mode", HALVES, indirect=True)


@pytest.fixture(autouse=True)
def any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, too, by the kernel that has the whole block."""
    monkeypatch.setattr("flysurgery.ops.feed_forward.takes_few_rows", lambda *_: False)


def make_block(architectures: Architectures, mode: str, seed: int = 5) -> Block:
    make, dtype = torch.Generator("cuda").manual_seed(seed), ARITHMETICS[mode].dtype

    def normal(*shape: int, deviation: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=make, device="cuda") * deviation + mean).to(dtype)

    def layer(architecture: Architecture) -> FusedFactors:
        factors = tuple(normal(*pattern.factor_shape, deviation=pattern.c**-0.5) for pattern in architecture)
        return FusedFactors(factors, normal(architecture.out_features, deviation=0.3))

    up, down = architectures
    norm = Norm(normal(up.in_features, deviation=0.2, mean=1.0), normal(up.in_features, deviation=0.2), 1e-6)
    return norm, layer(up), layer(down), normal(down.out_features)


def rows_of(rows: int, features: int, mode: str, mean: float = 0.0) -> Tensor:
    make = torch.Generator("cuda").manual_seed(rows)
    return (torch.randn(rows, features, generator=make, device="cuda") + mean).to(ARITHMETICS[mode].dtype)


def check(x: Tensor, block: AnyBlock, mode: str, activation: str = "gelu", residual: bool = True, k: float | None = None) -> None:
    """Over all outputs, and of each row, whose error no other row makes up for."""
    norm, up, down, scale = block
    if mode in FLOATS:
        assert way(x, FeedForward(norm, up, down, activation, scale, residual)).launches() == ("the whole block",)
    out, k = run(x, FeedForward(norm, up, down, activation, scale, residual)), k or K[mode]
    exact_norm, exact_up, exact_down, exact_scale = wide(block)
    truth = FeedForward(exact_norm, exact_up, exact_down, activation, exact_scale, residual).plainly(x.double())
    yardstick = FeedForward(norm, up, down, activation, scale, residual).plainly(x)
    assert out.dtype == x.dtype and out.shape == yardstick.shape
    assert bool(out.isfinite().all())
    error, allowed = ((value.double() - truth).square().mean().sqrt() for value in (out, yardstick))
    assert error <= k * allowed, f"rms error {float(error):.3g}, PyTorch's is {float(allowed):.3g}"
    worst = ((out.double() - truth).square().mean(-1).sqrt() / (yardstick.double() - truth).square().mean().sqrt()).max()
    assert worst <= 4 * k, f"one row errs by {float(worst):.3g} times PyTorch's rms error"


CASES = [(mode, block, (1, 75, 197, 25217)) for mode in ARITHMETICS for block in (GONON, MONARCH, SMALL)]
CASES += [(mode, block, (1, 197, 25217)) for mode in FLOATS for block in (SMALL_GONON, LOW_RANK)]
CASES += [(mode, block, (197,)) for mode in HALVES for block in (SMALL_GONON, WIDE)]
CASES += [("fp16", block, (25210, 60001)) for block in (GONON, SMALL)]  # several rounds on the multiprocessors


@pytest.mark.parametrize(("mode", "architectures", "counts"), CASES, ids=str, indirect=["mode"])
def test_any_number_of_rows(mode: str, architectures: Architectures, counts: tuple[int, ...]) -> None:
    block = make_block(architectures, mode)
    for rows in counts:
        check(rows_of(rows, architectures[0].in_features, mode, mean=6.0 * (rows == 25210)), block, mode)


OPTIONS = [
    ("gelu", True, True, True),
    ("gelu", False, False, False),
    ("gelu_tanh", True, False, True),
    ("gelu_tanh", False, True, False),
    ("silu", True, True, False),
    ("silu", False, False, True),
]


@in_halves
@pytest.mark.parametrize(("activation", "residual", "with_norm", "with_scale"), OPTIONS)
def test_all_pairs_of_options(mode: str, activation: str, residual: bool, with_norm: bool, with_scale: bool) -> None:
    norm, up, down, scale = make_block(MONARCH, mode)
    check(rows_of(130, 384, mode), (norm if with_norm else None, up, down, scale if with_scale else None), mode, activation, residual)


@in_floats
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_activations_without_scale_and_residual(activation: str, mode: str) -> None:
    norm, up, down, _ = make_block(SMALL, mode)
    check(rows_of(131, 192, mode), (norm, up, down, None), mode, activation, residual=False)


@pytest.mark.parametrize("mode", ["bf16"], indirect=True)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_many_rows_in_bfloat16(activation: str, mode: str) -> None:
    check(rows_of(25216, 384, mode), make_block(MONARCH, mode), mode, activation, k=1.25)


@in_halves
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_hidden_units_far_from_zero(activation: str, mode: str) -> None:
    norm, up, down, scale = make_block(MONARCH, mode)
    up.factors[0].mul_(100)
    check(rows_of(130, 384, mode), (norm, up, down, scale), mode, activation)


def test_norm_and_layers_without_parameters(mode: str) -> None:
    _, up, down, _ = make_block(SMALL, mode)
    check(rows_of(64, 192, mode), (Norm(None, None, 1e-6), FusedFactors(up.factors), FusedFactors(down.factors), None), mode)


@pytest.mark.parametrize("mode", ["fp16", *FLOATS], indirect=True)
@pytest.mark.parametrize("mean", [30.0, 1000.0])
def test_rows_far_from_zero(mean: float, mode: str) -> None:
    architectures = GONON if mode == "fp16" else SMALL
    check(rows_of(197, architectures[0].in_features, mode, mean), make_block(architectures, mode), mode)


@in_floats
@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_rows_and_weights_of_any_size(size: float, mode: str) -> None:
    """Factors that undo each other's size, and rows of that size, which the norm undoes."""
    norm, up, down, scale = make_block(SMALL, mode)
    for factor, by in zip((*up.factors, *down.factors), (1 / size, size, 1 / size, size), strict=True):
        factor.mul_(by)
    check(rows_of(64, 192, mode) * min(size, 1e5), (norm, up, down, scale), mode)


@in_floats
def test_one_row_decides_nothing_for_others(mode: str) -> None:
    """A row of one large element is the longest that a norm gives; equal elements give none; infinities stay where they are."""
    norm, up, down, scale = make_block(GONON, mode)
    x = rows_of(197, 384, mode)
    expected = run(x, FeedForward(norm, up, down, "gelu", scale))
    x[3], x[5, 17], x[7] = 0.25, 1e15, 0.0
    x[7, 9] = torch.inf
    out = run(x, FeedForward(norm, up, down, "gelu", scale))
    others = [n for n in range(197) if n not in (3, 5, 7)]
    assert torch.equal(out[others], expected[others])
    assert not bool(out[7].isfinite().any())
    check(x[[3, 5]], (norm, up, down, scale), mode, residual=False)


def test_the_largest_halves_can_be_normalized() -> None:
    x = rows_of(64, 384, "fp16")
    x[:, 0], x[:, 1:9] = 65504.0, -65504.0
    check(x, make_block(GONON, "fp16"), "fp16", residual=False)


def test_a_tiny_scale_is_not_lost() -> None:
    norm, up, down, _ = make_block(MONARCH, "fp16")
    x, scale = rows_of(64, 384, "fp16"), torch.full((384,), 1e-6, device="cuda")
    out = run(x, FeedForward(norm, up, down, "gelu", scale, residual=False))
    truth = FeedForward(norm, up, down, "gelu", None, residual=False).plainly(x).double() * 1e-6
    assert (out.double() - truth).abs().max() <= 2.0**-24 + 1e-2 * truth.abs().max()


@pytest.mark.parametrize("architectures", [GONON, MONARCH])
def test_strides_batches_and_runs_on_all_multiprocessors_are_bit_equal(architectures: Architectures, mode: str) -> None:
    norm, up, down, scale = make_block(architectures, mode)
    x = rows_of(25216, 384, mode)
    out = run(x, FeedForward(norm, up, down, "gelu", scale))
    for _ in range(20):
        assert torch.equal(out, run(x, FeedForward(norm, up, down, "gelu", scale)))
    assert torch.equal(out[-197:], run(x[-197:], FeedForward(norm, up, down, "gelu", scale)))
    assert torch.equal(out.view(128, 197, 384), run(x.view(128, 197, 384), FeedForward(norm, up, down, "gelu", scale)))
    holder = torch.full((25216, 400), torch.nan, device="cuda", dtype=x.dtype)
    holder[:, :384] = x
    assert torch.equal(out, run(holder[:, :384], FeedForward(norm, up, down, "gelu", scale)))
    assert run(x[:0], FeedForward(norm, up, down, "gelu", scale)).shape == (0, 384)


@pytest.mark.parametrize("mode", ["fp16"], indirect=True)
def test_a_changed_weight_is_seen(mode: str) -> None:
    norm, up, down, scale = make_block(SMALL, mode)
    x = rows_of(64, 192, mode)
    run(x, FeedForward(norm, up, down, "gelu", scale))
    with torch.no_grad():
        down.factors[0].mul_(2)
        assert norm.weight is not None
        norm.weight.mul_(0.5)
    check(x, (norm, up, down, scale), mode)


@in_floats
def test_the_mode_is_that_of_the_call(mode: str) -> None:
    norm, up, down, scale = make_block(SMALL, mode)
    x = rows_of(64, 192, mode)
    out = run(x, FeedForward(norm, up, down, "gelu", scale))
    with rounding_as("fp32" if mode == "tf32" else "tf32"):
        assert not torch.equal(out, run(x, FeedForward(norm, up, down, "gelu", scale)))


@pytest.mark.parametrize("mode", ["fp16", *FLOATS], indirect=True)
def test_graphs_and_compilers(mode: str) -> None:
    norm, up, down, scale = make_block(SMALL, mode)
    x = rows_of(394, 192, mode)
    expected = run(x, FeedForward(norm, up, down, "gelu", scale))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, FeedForward(norm, up, down, "gelu", scale))
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)
    compiled = torch.compile(lambda x: run(x, FeedForward(norm, up, down, "gelu", scale)), fullgraph=True)
    assert torch.equal(compiled(x), expected)


@pytest.mark.parametrize("rows", [197, 25216])
def test_a_chain_of_launches_that_begin_early(rows: int) -> None:
    """Launches that begin while the one before still runs see its results, eager and in a graph."""
    (norm, up, down, scale), x = make_block(GONON, "fp16"), rows_of(rows, 384, "fp16")

    def chain(pause: Callable[[], None]) -> Tensor:
        value = x
        for _ in range(6):
            value = run(value, FeedForward(norm, up, down, "gelu", scale))
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


def test_what_it_refuses() -> None:
    norm, up, down, scale = make_block(SMALL, "fp16")
    x = rows_of(8, 192, "fp16")
    assert reason(x, FeedForward(norm, up, down, "gelu", scale)) is None
    assert "float64" in str(reason(x.double(), FeedForward(norm, up, down, "gelu", scale)))
    assert "shape (192,)" in str(reason(x, FeedForward(norm, up, down, "gelu", scale[:64])))
    with pytest.raises(BackendError, match="no gradients"):
        run(x.clone().requires_grad_(), FeedForward(norm, up, down, "gelu", scale))
