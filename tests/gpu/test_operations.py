"""Parts of blocks by their kernels on the GPU: against float64, beside PyTorch's own operators in the same dtype.

Norms with linears, linears with a residual, gated and plain feed-forward blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from flysurgery.errors import BackendError
from flysurgery.gpu.factor_by_factor import run_wide_ffn, run_wide_group
from flysurgery.gpu.gated import run_gated
from flysurgery.ops import (
    Dense,
    FeedForward,
    LinearResidual,
    Norm,
    NormLinears,
    choose_launches,
    leaves_moments,
    reason,
    run,
    run_with_moments,
    way,
)
from flysurgery.patterns import Architecture, gonon, low_rank, monarch
from tests.support.blocks import (
    K_FP32,
    K,
    Kind,
    Make,
    added,
    behind_a_norm,
    block,
    check,
    check_replay,
    comparable,
    inputs_of,
    normal,
    three,
    wide,
)
from tests.support.problems import all_pairs
from tests.support.rounding import rounding_as
from tests.support.tolerance import ARITHMETICS

pytestmark = pytest.mark.gpu

HALF, FLOATS, HALVES, MODES = torch.float16, ("tf32", "fp32"), ("fp16", "bf16"), ("fp16", "bf16", "fp32")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


@pytest.fixture
def in_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, too, by the kernel that has the whole block."""
    monkeypatch.setattr("flysurgery.ops.feed_forward.takes_few_rows", lambda *_: False)
    monkeypatch.setattr(choose_launches, "_decided", {})


def factor_by_factor(x: Tensor, given: Any) -> Tensor:
    if isinstance(given, NormLinears):
        return run_wide_group(x, given.norm, given.group)  # pyright: ignore[reportArgumentType] - of factors alone
    return run_wide_ffn(x, *given[:5], residual=x if given.residual else None, moments=given.moments)[0]


@dataclass(frozen=True)
class Case:
    """An operation in some modes, how many rows it is tried on, and how these are drawn.

    Attributes:
        whole: the kernel that has the whole block is to take it, however few the rows are.
        call: what computes it; other than ``run`` it takes no batches.
        k: how much larger than PyTorch's its error may be; by default what the policy says.
    """

    name: str
    make: Make
    rows: tuple[int, ...]
    modes: tuple[str, ...] = MODES
    mean: float = 0.0
    deviation: float = 1.0
    whole: bool = False
    call: Callable[[Tensor, Any], Tensor] = run
    k: float | None = None

    def __str__(self) -> str:
        return f"{self.name}-{self.rows}-{self.mean:g}"


def gated(name: str, features: int, hidden: int, *options: str, gate: int = 0) -> Make:
    """Layers up, of two or packed in one, and down; converted, dense, or one of each."""
    kinds: dict[str, Callable[[int, int], Kind]] = {"dense": lambda outputs, inputs: (inputs, outputs), "monarch": monarch}
    up, down, form = name.split("-")
    apart = [kinds[each](hidden, features) for each in (("dense", "monarch") if up == "mixed" else (up, up))]
    return block(
        [kinds[up](2 * hidden, features)] if form == "packed" else apart, kinds[down](features, hidden), "silu", *options, gate=gate
    )


DRAWN = ((1, 0.0, 1.0), (197, 50.0, 1.0), (1009, 100.0, 1.0), (211, 0.5, 2e-3), (25216, 0.0, 1.0))
"""How many rows, their mean and deviation."""
KINDS = {gonon(384, 384): (394,), gonon(384, 1536): (394,), monarch(384, 384): (394,)}
KINDS |= {(192, 192): (197,), (768, 768): (1009, 6337), (384, 384): (25216,)}
"""Of linears whose outputs are added to a residual, and rows for each."""
UP_DOWN = [(up, down) for down in ((1536, 384), gonon(384, 1536)) for up in ((384, 1536), gonon(1536, 384))]
GATED = ("dense-dense-packed", "dense-dense-apart", "monarch-monarch-packed", "monarch-monarch-apart", "mixed-monarch-apart")
MORE = {"nothing": (384, 1024, "inner", "scale"), "norm inside": (192, 512, "scale"), "layer scale": (384, 1024, "inner")}
ACTIVATED = ("gelu", "gelu_tanh", "silu")
CASES = [
    Case("three behind a norm, in TF32", three(gonon(384, 384)), (1009,), ("tf32",), 100.0, k=K_FP32),
    Case("architectures and biases not the same", behind_a_norm(gonon(384, 384), monarch(384, 384), unbiased=[1]), (1009,)),
    Case("one behind a plain norm", behind_a_norm(gonon(384, 384), plain=True), (1009,), ("bf16", "fp32")),
    Case("dense behind a norm", behind_a_norm((384, 1152)), (1009,), ("fp16", "fp32")),
    Case("factors beside a dense layer", behind_a_norm(monarch(384, 384, 8), monarch(384, 384, 8), (384, 384)), (197, 1009), ("bf16",)),
    Case("wide ones behind a norm, factor by factor", three(gonon(768, 768)), (1800,), ("fp16",), 30.0),
    Case("wide ones behind a norm, in one launch", three(gonon(768, 768)), (2100,), ("fp16",), 30.0),
    Case("gated and wide", gated("monarch-monarch-packed", 1536, 4096, "inner"), (257,), ("bf16",)),
]
for kind, (rows, mean, deviation), mode in all_pairs((gonon(384, 384), monarch(768, 768), monarch(192, 192)), DRAWN, MODES):
    CASES.append(Case(f"three behind a norm {kind}", three(kind), (rows,), (mode,), mean, deviation))
for kind, mode, scaled in all_pairs([*KINDS], MODES, (False, True)):
    CASES.append(Case(f"added {kind}", added(kind, scaled), KINDS[kind], (mode,)))
for kinds, activation, mode in all_pairs(UP_DOWN, ACTIVATED, MODES):
    CASES.append(Case(f"block {kinds}, {activation}", block(*kinds, activation, "scale"), (394,), (mode,)))
for name, more, mode in all_pairs(GATED, [*MORE], MODES):
    CASES.append(Case(f"gated {name}, {more}", gated(name, *MORE[more], gate=int(more == "layer scale")), (591,), (mode,)))
for name, mode in zip(GATED, ("fp32", "fp16", "bf16"), strict=False):
    CASES.append(Case(f"gated {name}", gated(name, 192, 512, "inner", "scale", "residual"), (8, 1009), (mode,), 3.0))
for activation, mode in zip(ACTIVATED, MODES, strict=True):
    differing = block([gonon(1536, 384), monarch(1536, 384)], gonon(384, 1536), activation, "norm", "inner", "scale", gate=1)
    CASES.append(Case(f"gate and value differ, {activation}", differing, (1009,), (mode,)))

GONON, MONARCH = (gonon(1536, 384), gonon(384, 1536)), (monarch(1536, 384), monarch(384, 1536))
SMALL, SMALL_GONON = (monarch(768, 192), monarch(192, 768)), (gonon(768, 192), gonon(192, 768))
LOW_RANK, WIDE = (low_rank(1536, 384, 96), low_rank(384, 1536, 96)), (gonon(3072, 768), gonon(768, 3072))
UNEVEN = Architecture.of((2, 96, 32, 2), (2, 32, 24, 2)), Architecture.of((1, 32, 32, 3), (3, 32, 128, 1))
JOINED = Architecture.of((1, 256, 128, 3), (2, 192, 64, 1)), Architecture.of((1, 64, 128, 2), (2, 128, 384, 1))


def whole(make: Make, rows: tuple[int, ...], modes: tuple[str, ...] = (*HALVES, *FLOATS), mean: float = 0.0) -> None:
    """By the kernel that has the whole block, which in floats rounds as its arithmetic does."""
    for mode in modes:
        known = ARITHMETICS[mode].k if mode in FLOATS else None
        CASES.append(Case(f"whole block {len(CASES)}", make, rows, (mode,), mean, whole=True, k=known))


for mode, kinds in zip(ARITHMETICS, (GONON, MONARCH, GONON, MONARCH), strict=True):
    whole(block(*kinds), (1, 75, 197, 25217), (mode,))
whole(block(*SMALL), (197,), HALVES)
whole(block(*MONARCH), (197,), ("fp16", "tf32"))
whole(block(*SMALL_GONON), (1, 197))
whole(block(*LOW_RANK), (1, 197), FLOATS)
whole(block(*WIDE), (197, 3001), HALVES)
whole(block(*SMALL, "gelu", "scale", bare=True), (64,), ("bf16", "fp32"))
for kinds, rows, mean in [(GONON, 25210, 6.0), (GONON, 60001, 0.0), (SMALL, 25210, 6.0), (SMALL, 60001, 0.0)]:
    whole(block(*kinds), (rows,), ("fp16",), mean)  # several rounds on the multiprocessors
for mean in (30.0, 1000.0):
    whole(block(*GONON), (197,), ("fp16",), mean)
    whole(block(*SMALL), (197,), FLOATS, mean)
for turn, activation in enumerate(ACTIVATED):
    whole(block(*SMALL, activation, "scale", "residual"), (131,), (FLOATS[turn % 2],))
    whole(block(*MONARCH, activation, hidden=100), (130,), (HALVES[turn % 2],))
    whole(block(*MONARCH, activation), (25216,), (HALVES[(turn + 1) % 2],))
for turn, options in enumerate(
    ("gelu norm scale residual", "gelu_tanh norm", "gelu_tanh scale residual", "silu scale", "silu norm residual")
):
    whole(block(*MONARCH, *options.split()), (130,), (HALVES[turn % 2],))  # all pairs of what may be left out

APART = [
    (block(*WIDE, "silu"), "fp16", 25200, 0.0),  # which almost fill a round of the kernel for the factors around an activation
    (block(*WIDE, "silu"), "bf16", 1, 0.0),
    (block(monarch(3072, 768), monarch(768, 3072), "gelu_tanh"), "fp16", 8451, 0.0),
    (block(*UNEVEN, "silu"), "fp16", 197, 0.0),
    (block(*UNEVEN, "gelu_tanh"), "bf16", 8451, 0.0),
    (block(*JOINED), "fp16", 197, 0.0),
    (block(*JOINED, "gelu_tanh"), "bf16", 50000, 0.0),
    (block(*WIDE, "gelu", "norm", "scale", "residual", bare=True), "fp16", 500, 0.0),
    (block(*WIDE, "gelu", "scale", "residual", bare=True), "fp16", 500, 0.0),
    *((three(gonon(768, 768)), mode, 197, 30.0) for mode in HALVES),
    *((three(monarch(384, 384)), mode, 8451, 0.0) for mode in HALVES),
]
CASES += [
    Case(f"factor by factor {n}", make, (rows,), (mode,), mean, call=factor_by_factor) for n, (make, mode, rows, mean) in enumerate(APART)
]


@pytest.mark.parametrize(("mode", "case"), [(mode, case) for case in CASES for mode in case.modes], indirect=["mode"], ids=str)
def test_beside_float64_in_graphs_and_with_changed_weights(mode: str, case: Case, request: pytest.FixtureRequest) -> None:
    """Of rows between which lies NaN, in a batch, and of none."""
    dtype = ARITHMETICS[mode].dtype
    if case.whole:
        request.getfixturevalue("in_one_kernel")
    for rows in case.rows:
        operation = case.make(dtype, rows)
        holder = torch.full((rows, inputs_of(operation) + 16), torch.nan, device="cuda", dtype=dtype)
        x = holder[:, :-16].copy_(normal(*holder[:, :-16].shape, dtype=dtype, mean=case.mean, deviation=case.deviation))
        if case.whole and mode in FLOATS:
            found = way(x, operation)
            assert not isinstance(found, str) and found.launches() == ("the whole block",)

        def checked(x: Tensor = x, operation: Any = operation) -> Tensor:
            check_replay(lambda: case.call(x, operation))
            return check(x, operation, case.k, None if case.call is run else case.call(x, operation), each_row=case.whole)

        out = checked()
        for cut in (lambda rows: rows[:0], lambda rows: rows[None]) if case.call is run else (lambda rows: rows[:0],):
            given = operation._replace(residual=cut(operation.residual)) if isinstance(operation, LinearResidual) else operation
            found = case.call(cut(x), given)
            assert torch.equal(found, cut(out)) if case.whole else found.shape == cut(out).shape
        if rows == case.rows[0]:
            for tensor in operation.tensors:
                tensor.neg_()
            operation.tensors[-1].mul_(2)  # the product of two that are negated stays
            assert not torch.equal(checked(), out)


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, torch.float32])
def test_rows_whose_first_values_stand_apart(dtype: torch.dtype) -> None:
    """What differs from the mean of the row's first values, 16 at least, is summed and, where x is halves, rounded."""
    x, operation = normal(331, 384, dtype=dtype), behind_a_norm(*[gonon(384, 384)] * 3, plain=True)(dtype, 331)
    x[:, :16] += 200
    check(x, operation, K_FP32 * 384 / 16 if dtype == torch.float32 else K * (384 / 16) ** 0.5)


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


def test_moments_may_come_in_parts_and_from_a_residual_sum() -> None:
    x, operation = normal(500, 768, dtype=HALF, mean=30.0), block(*WIDE, "gelu", "scale", "residual")(HALF, 500)
    whole, truth = factor_by_factor(x, operation), wide(operation).plainly(x.double())
    for count in (1, 3, 8):
        parts = x.float().unflatten(1, (count, -1))
        moments = torch.stack((parts.mean(dim=2), parts.var(dim=2, correction=0) * parts.shape[2]), dim=2)
        comparable(factor_by_factor(x, operation._replace(moments=moments)), whole, truth)
    x, residual = normal(43, 197, 768, dtype=HALF), normal(43, 197, 768, dtype=HALF, mean=30.0)
    product = LinearResidual(Dense(normal(768, 768, dtype=HALF, deviation=0.03), None), residual)
    assert not leaves_moments(x[:1], product._replace(residual=residual[:1]))
    assert leaves_moments(x, product)
    y, moments = run_with_moments(x, product)
    assert torch.equal(y, run(x, product))
    operation = operation._replace(residual=True)
    comparable(run(y, operation._replace(moments=moments)), run(y, operation), wide(operation).plainly(y.double()))


def test_rows_that_overlap_or_are_one() -> None:
    norm, group = three(gonon(768, 768))(HALF, 1)
    x = normal(1, 768, dtype=HALF)
    same = run_wide_group(x.expand(70, -1), norm, group)
    assert torch.equal(same, same[:1].expand(70, -1)) and bool(same.isfinite().all())
    assert run_wide_group(x.as_strided((1, 768), (1, 1)), None, group).shape == (1, 3 * 768)


def whole_block(kinds: tuple[Architecture, Architecture], mode: str, rows: int, features: int) -> tuple[Tensor, FeedForward]:
    dtype = ARITHMETICS[mode].dtype
    return normal(rows, features, dtype=dtype), block(*kinds)(dtype, rows)


in_floats = pytest.mark.parametrize("mode", FLOATS, indirect=True)
whole_blocks = pytest.mark.usefixtures("in_one_kernel")


@whole_blocks
@in_floats
@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_rows_and_weights_of_any_size(size: float, mode: str) -> None:
    """Factors that undo each other's size, and rows of that size, which the norm undoes."""
    x, operation = whole_block(SMALL, mode, 64, 192)
    for factor, by in zip((*operation.up.tensors[:2], *operation.down.tensors[:2]), (1 / size, size, 1 / size, size), strict=True):
        factor.mul_(by)
    check(x * min(size, 1e5), operation, ARITHMETICS[mode].k, each_row=True)


@whole_blocks
@in_floats
def test_one_row_decides_nothing_for_others_and_the_mode_is_that_of_the_call(mode: str) -> None:
    """A row of one large element is the longest that a norm gives; equal elements give none; infinities stay where they are."""
    x, operation = whole_block(GONON, mode, 197, 384)
    expected = run(x, operation)
    with rounding_as("fp32" if mode == "tf32" else "tf32"):
        assert not torch.equal(expected, run(x, operation))
    x[3], x[5, 17], x[7] = 0.25, 1e15, 0.0
    x[7, 9] = torch.inf
    out = run(x, operation)
    others = [n for n in range(len(x)) if n not in (3, 5, 7)]
    assert torch.equal(out[others], expected[others])
    assert not bool(out[7].isfinite().any())
    operation = operation._replace(residual=False)
    check(x[[3, 5]], operation, ARITHMETICS[mode].k, each_row=True)


@whole_blocks
def test_the_largest_halves_can_be_normalized_and_a_tiny_scale_is_not_lost() -> None:
    x, operation = whole_block(GONON, "fp16", 64, 384)
    operation = operation._replace(residual=False)
    small, truth = operation._replace(scale=torch.full((384,), 1e-6, device="cuda")), operation._replace(scale=None)
    expected = truth.plainly(x).double() * 1e-6
    assert (run(x, small).double() - expected).abs().max() <= 2.0**-24 + 1e-2 * expected.abs().max()
    x[:, 0], x[:, 1:9] = 65504.0, -65504.0
    check(x, operation, each_row=True)


@whole_blocks
def test_batches_parts_and_runs_on_all_multiprocessors_are_bit_equal(mode: str) -> None:
    x, operation = whole_block(GONON if mode in HALVES else MONARCH, mode, 25216, 384)
    out = run(x, operation)
    for _ in range(20):
        assert torch.equal(out, run(x, operation))
    assert torch.equal(out[-197:], run(x[-197:], operation))
    assert torch.equal(out.view(128, 197, 384), run(x.view(128, 197, 384), operation))
    holder = torch.full((25216, 400), torch.nan, device="cuda", dtype=x.dtype)
    assert torch.equal(out, run(holder[:, :384].copy_(x), operation))


CHAINS = [(mode, rows) for n, mode in enumerate(ARITHMETICS) for m, rows in enumerate((197, 394, 25216)) if (n + m) % 3]


@pytest.mark.parametrize(("mode", "rows"), CHAINS, indirect=["mode"])
def test_a_chain_of_launches_that_begin_early(mode: str, rows: int) -> None:
    """They see the results of those before, eager and in a graph, with a copy and another stream between."""
    dtype, side, norm = ARITHMETICS[mode].dtype, torch.cuda.Stream(), Norm(torch.ones(384, device="cuda"), None, 1e-6)
    up, down, square = (Dense(normal(*size, dtype=dtype, deviation=0.05)) for size in ((1536, 384), (384, 1536), (384, 384)))
    x, factors = whole_block(GONON, mode, rows, 384)

    def chain(pause: Callable[[], None]) -> Tensor:
        def step(x: Tensor, operation: Any) -> Tensor:
            y = run(x, operation)
            pause()
            return y

        value = x
        for _ in range(3):
            value = step(value, FeedForward(norm, up, down))
            copied = torch.empty_like(value).copy_(value)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                other = run(copied, NormLinears(norm, [square]))
            torch.cuda.current_stream().wait_stream(side)
            value = step(other.clone(), LinearResidual(square, value))
            value = step(step(value, NormLinears(norm, [square])), LinearResidual(square, value))
            value = step(step(value, factors), factors)
        return value

    expected = chain(torch.cuda.synchronize)
    assert bool(expected.isfinite().all())
    assert torch.equal(chain(lambda: None), expected)
    check_replay(lambda: chain(lambda: None))


def test_what_needs_gradients_or_float64_is_refused() -> None:
    x, operation = normal(8, 384, dtype=HALF), three(gonon(384, 384))(HALF, 8)
    assert reason(x, operation) is None
    assert "no gradients" in str(reason(x.clone().requires_grad_(), operation)) and "float64" in str(reason(x.double(), operation))
    with pytest.raises(BackendError, match="no gradients"):
        run(x.requires_grad_(), operation)
