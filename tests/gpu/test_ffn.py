"""Feed-forward blocks by the kernels that have the whole block: against float64, beside PyTorch's operators in the same arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops import FeedForward, FusedFactors, Norm, reason, run, way
from flysurgery.patterns import Architecture
from flysurgery.patterns.catalog import gonon, low_rank, monarch
from tests.gpu.gpu_blocks import K, affine, check_replay, layer, normal
from tests.gpu.gpu_blocks import check as check_operation
from tests.support.rounding import rounding_as
from tests.support.tolerance import ARITHMETICS

pytestmark = pytest.mark.gpu

GONON, MONARCH = (gonon(1536, 384), gonon(384, 1536)), (monarch(1536, 384), monarch(384, 1536))
SMALL, SMALL_GONON = (monarch(768, 192), monarch(192, 768)), (gonon(768, 192), gonon(192, 768))
LOW_RANK, WIDE = (low_rank(1536, 384, 96), low_rank(384, 1536, 96)), (gonon(3072, 768), gonon(768, 3072))
FLOATS, HALVES = ("tf32", "fp32"), ("fp16", "bf16")
Architectures = tuple[Architecture, Architecture]
in_floats = pytest.mark.parametrize("mode", FLOATS, indirect=True)


@pytest.fixture(autouse=True)
def any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, too, by the kernel that has the whole block."""
    monkeypatch.setattr("flysurgery.ops.feed_forward.takes_few_rows", lambda *_: False)


def make_block(architectures: Architectures, mode: str, activation: str = "gelu") -> FeedForward:
    torch.manual_seed(5)
    dtype, (up, down) = ARITHMETICS[mode].dtype, architectures
    layers = layer(up, dtype), layer(down, dtype)
    return FeedForward(affine(up.in_features, dtype), *layers, activation, normal(down.out_features, dtype=dtype))


def rows_of(rows: int, features: int, mode: str, mean: float = 0.0) -> Tensor:
    torch.manual_seed(rows)
    return normal(rows, features, dtype=ARITHMETICS[mode].dtype, mean=mean)


def check(x: Tensor, block: FeedForward, mode: str, k: float | None = None) -> None:
    if mode in FLOATS:
        found = way(x, block)
        assert not isinstance(found, str) and found.launches() == ("the whole block",)
    check_operation(x, block, k or (ARITHMETICS[mode].k if mode in FLOATS else K), each_row=True)


class Case(NamedTuple):
    """A block in some modes, how many rows it is tried on, the mean of these, and what is changed in it."""

    modes: tuple[str, ...]
    architectures: Architectures
    rows: tuple[int, ...]
    activation: str = "gelu"
    mean: float = 0.0
    change: Callable[[FeedForward], FeedForward] = lambda block: block
    k: float | None = None


def without(*left_out: str) -> Callable[[FeedForward], FeedForward]:
    """What a block may do without."""
    return lambda block: block._replace(**{name: False if name == "residual" else None for name in left_out})


def bare(block: FeedForward) -> FeedForward:
    """Norm and layers without parameters."""
    up, down = (FusedFactors(layer.factors) for layer in (block.up, block.down) if isinstance(layer, FusedFactors))
    return FeedForward(Norm(None, None, 1e-6), up, down)


def with_large_hidden_units(block: FeedForward) -> FeedForward:
    assert isinstance(block.up, FusedFactors)
    block.up.factors[0].mul_(100)
    return block


CASES = [Case((mode,), block, (1, 75, 197, 25217)) for mode, block in zip(ARITHMETICS, (GONON, MONARCH, GONON, MONARCH), strict=True)]
CASES += [Case((*ARITHMETICS,), SMALL, (197,)), Case(("fp16", "tf32"), MONARCH, (197,))]
CASES += [Case(FLOATS, block, (1, 197)) for block in (SMALL_GONON, LOW_RANK)]
CASES += [Case(HALVES, block, (197,)) for block in (SMALL_GONON, WIDE)]
# several rounds on the multiprocessors
CASES += [Case(("fp16",), block, (rows,), mean=6.0 * (rows == 25210)) for block in (GONON, SMALL) for rows in (25210, 60001)]
CASES += [Case(("fp16",), GONON, (197,), mean=mean) for mean in (30.0, 1000.0)]
CASES += [Case(FLOATS, SMALL, (197,), mean=mean) for mean in (30.0, 1000.0)] + [Case((*ARITHMETICS,), SMALL, (64,), change=bare)]
for name in ("gelu", "gelu_tanh", "silu"):
    CASES += [Case(FLOATS, SMALL, (131,), name, change=without("scale", "residual")), Case(("bf16",), MONARCH, (25216,), name, k=1.25)]
    CASES += [Case(HALVES, MONARCH, (130,), name, change=with_large_hidden_units)]
CASES += [  # all pairs of what may be left out
    Case(HALVES, MONARCH, (130,), "gelu", change=without("norm", "scale", "residual")),
    Case(HALVES, MONARCH, (130,), "gelu_tanh", change=without("norm")),
    Case(HALVES, MONARCH, (130,), "gelu_tanh", change=without("scale", "residual")),
    Case(HALVES, MONARCH, (130,), "silu", change=without("scale")),
    Case(HALVES, MONARCH, (130,), "silu", change=without("norm", "residual")),
]


@pytest.mark.parametrize(("mode", "case"), [(mode, case) for case in CASES for mode in case.modes], indirect=["mode"])
def test_beside_float64(mode: str, case: Case) -> None:
    block = case.change(make_block(case.architectures, mode, case.activation))
    for rows in case.rows:
        check(rows_of(rows, case.architectures[0].in_features, mode, case.mean), block, mode, case.k)


@in_floats
@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_rows_and_weights_of_any_size(size: float, mode: str) -> None:
    """Factors that undo each other's size, and rows of that size, which the norm undoes."""
    block = make_block(SMALL, mode)
    assert isinstance(block.up, FusedFactors) and isinstance(block.down, FusedFactors)
    for factor, by in zip((*block.up.factors, *block.down.factors), (1 / size, size, 1 / size, size), strict=True):
        factor.mul_(by)
    check(rows_of(64, 192, mode) * min(size, 1e5), block, mode)


@in_floats
def test_one_row_decides_nothing_for_others(mode: str) -> None:
    """A row of one large element is the longest that a norm gives; equal elements give none; infinities stay where they are."""
    block, x = make_block(GONON, mode), rows_of(197, 384, mode)
    expected = run(x, block)
    x[3], x[5, 17], x[7] = 0.25, 1e15, 0.0
    x[7, 9] = torch.inf
    out = run(x, block)
    others = [n for n in range(197) if n not in (3, 5, 7)]
    assert torch.equal(out[others], expected[others])
    assert not bool(out[7].isfinite().any())
    check(x[[3, 5]], block._replace(residual=False), mode)


def test_the_largest_halves_can_be_normalized_and_a_tiny_scale_is_not_lost() -> None:
    x = rows_of(64, 384, "fp16")
    x[:, 0], x[:, 1:9] = 65504.0, -65504.0
    check(x, make_block(GONON, "fp16")._replace(residual=False), "fp16")
    x, block = rows_of(64, 384, "fp16"), make_block(MONARCH, "fp16")._replace(residual=False)
    out = run(x, block._replace(scale=torch.full((384,), 1e-6, device="cuda")))
    truth = block._replace(scale=None).plainly(x).double() * 1e-6
    assert (out.double() - truth).abs().max() <= 2.0**-24 + 1e-2 * truth.abs().max()


def test_strides_batches_and_runs_on_all_multiprocessors_are_bit_equal(mode: str) -> None:
    block, x = make_block(GONON if mode in HALVES else MONARCH, mode), rows_of(25216, 384, mode)
    out = run(x, block)
    for _ in range(20):
        assert torch.equal(out, run(x, block))
    assert torch.equal(out[-197:], run(x[-197:], block))
    assert torch.equal(out.view(128, 197, 384), run(x.view(128, 197, 384), block))
    holder = torch.full((25216, 400), torch.nan, device="cuda", dtype=x.dtype)
    holder[:, :384] = x
    assert torch.equal(out, run(holder[:, :384], block))
    assert run(x[:0], block).shape == (0, 384)


@pytest.mark.parametrize("mode", ["fp16", *FLOATS], indirect=True)
def test_a_changed_weight_is_seen_and_graphs_give_the_same(mode: str) -> None:
    block, x = make_block(SMALL, mode), rows_of(394, 192, mode)
    check_replay(lambda: run(x, block))
    assert isinstance(block.down, FusedFactors) and block.norm is not None and block.norm.weight is not None
    with torch.no_grad():
        block.down.factors[0].mul_(2)
        block.norm.weight.mul_(0.5)
    check(x, block, mode)


@in_floats
def test_the_mode_is_that_of_the_call(mode: str) -> None:
    block, x = make_block(SMALL, mode), rows_of(64, 192, mode)
    out = run(x, block)
    with rounding_as("fp32" if mode == "tf32" else "tf32"):
        assert not torch.equal(out, run(x, block))


@pytest.mark.parametrize("rows", [197, 25216])
def test_a_chain_of_launches_that_begin_early(rows: int) -> None:
    """Launches that begin while the one before still runs see its results, eager and in a graph."""
    block, x = make_block(GONON, "fp16"), rows_of(rows, 384, "fp16")

    def chain(pause: Callable[[], None]) -> Tensor:
        value = x
        for _ in range(6):
            value = run(value, block)
            pause()
        return value

    expected = chain(torch.cuda.synchronize)
    assert bool(expected.isfinite().all())
    assert torch.equal(chain(lambda: None), expected)
    check_replay(lambda: chain(lambda: None))


def test_what_it_refuses() -> None:
    block, x = make_block(SMALL, "fp16"), rows_of(8, 192, "fp16")
    assert reason(x, block) is None
    assert "float64" in str(reason(x.double(), block))
    assert "shape (192,)" in str(reason(x, block._replace(scale=torch.ones(64, device="cuda").half())))
    with pytest.raises(BackendError, match="no gradients"):
        run(x.clone().requires_grad_(), block)
