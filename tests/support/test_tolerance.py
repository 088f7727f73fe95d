"""The policy itself: multiplications that are wrong in a known way are rejected by some level, correct ones by none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import Tensor

from flysurgery.patterns import Architecture, Pattern
from tests.support.levels import Run, check_bound, check_identity, check_integers, check_layer
from tests.support.problems import INPUTS, PATTERNS, all_pairs, in_third, keep_bits
from tests.support.tolerance import BF16, FP16, FP32, FP32_BY_FP16_PAIRS, TF32, Arithmetic, power_above

PATTERN = Pattern(1, 16, 48, 2)
ROWS = 129

ALL = [FP32, FP32_BY_FP16_PAIRS, TF32, FP16, BF16]

Sum = Callable[[Tensor], Tensor]  # shapes: (terms, ...) -> (...), float32
Store = Callable[[Tensor, torch.dtype], Tensor]


def sequential(terms: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    total = torch.zeros_like(terms[0], dtype=dtype)
    for term in terms:
        total = (total.float() + term).to(dtype)
    return total.float()


def blocked(terms: Tensor) -> Tensor:
    return sequential(torch.stack([sequential(part) for part in terms.split(16)]))


def towards_zero(total: Tensor, dtype: torch.dtype) -> Tensor:
    nearest = total.to(dtype)
    inwards = torch.nextafter(nearest, torch.zeros_like(nearest))
    return torch.where(nearest.float().abs() > total.abs(), inwards, nearest)


def one_bad_row(total: Tensor, dtype: torch.dtype) -> Tensor:
    out = total.to(dtype)
    out[-1] = 0 if out[-1].any() else 1
    return out


def one_bad_element(total: Tensor, dtype: torch.dtype) -> Tensor:
    out = total.to(dtype)
    out[-1, -1] = torch.nextafter(out[-1, -1], torch.tensor(torch.inf, dtype=dtype))
    return out


def in_pairs(values: Tensor) -> tuple[list[Tensor], Tensor]:  # values and scale, shapes: (rows, n), (rows, 1)
    """``hi`` and ``lo`` in fp16 and their scale: a row's largest value as low as the policy's floor allows, in [2^7, 2^8)."""
    scale = 2.0**8 / power_above(values.abs().amax(1, keepdim=True)).clamp_min(2.0**-100)
    scaled = (values * scale).float()
    hi = scaled.half().float()
    return [hi, (scaled - hi).half().float()], scale


def emulate(mode: Arithmetic, add: Sum = sequential, *, store: Store = Tensor.to, input_bits: int | None = None) -> Run:
    """A multiplication in the given arithmetic: products in float32, ``add`` for the sums, ``store`` for the rounding."""
    bits = input_bits or (11 if mode is TF32 else None)

    def taken_in(values: Tensor) -> tuple[list[Tensor], Tensor | float]:
        if bits is not None:
            return [keep_bits(values.float(), bits)], 1.0
        return in_pairs(values) if mode is FP32_BY_FP16_PAIRS else ([values.float()], 1.0)

    def run(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        (factor,) = factors
        a, _, c, d = factor.shape
        lefts, left_scale = taken_in(x)
        rights, right_scale = taken_in(factor.reshape(1, -1))
        products = [
            left.view(-1, a, 1, c, d) * right.view(factor.shape)  # shape: (rows, a, b, c, d)
            for m, left in enumerate(lefts)
            for n, right in enumerate(rights)
            if m + n < 2
        ]
        total = (add(torch.cat(products, dim=3).movedim(3, 0)).flatten(1) / left_scale / right_scale).float()
        return store(total if bias is None else total + bias.float(), mode.dtype)

    return run


def failed_levels(run: Run, mode: Arithmetic) -> set[str]:
    architecture = Architecture((PATTERN,))
    checks: dict[str, Callable[[], None]] = {
        "identity": lambda: check_identity(run, PATTERN, mode),
        "integers": lambda: check_integers(run, architecture, ROWS, mode),
        "layer": lambda: check_layer(run, emulate(mode, blocked), architecture, ROWS, mode),
        **{kind: lambda kind=kind: check_bound(run, kind, PATTERN, ROWS, mode) for kind in INPUTS},
    }
    failed = set()
    for name, check in checks.items():
        try:
            check()
        except AssertionError:
            failed.add(name)
    return failed


@pytest.mark.parametrize("mode", ALL, ids=lambda mode: mode.name)
def test_correct_variants_pass_every_level(mode: Arithmetic) -> None:
    orders: list[Sum] = [
        sequential,
        blocked,
        lambda terms: sequential(terms.flip(0)),
        lambda terms: sequential(terms[0::2]) + sequential(terms[1::2]),
    ]
    assert [failed_levels(emulate(mode, add), mode) for add in orders] == [set()] * 4


MUTANTS: list[tuple[str, Sequence[Arithmetic], set[str], Callable[[Arithmetic], Run]]] = [
    ("dropped term", ALL, set(), lambda mode: emulate(mode, lambda terms: sequential(terms[:-1]))),
    ("bad row", ALL, set(), lambda mode: emulate(mode, store=one_bad_row)),
    ("bad element", ALL, set(), lambda mode: emulate(mode, store=one_bad_element)),
    ("bf16 detour", ALL[:-1], set(), lambda mode: emulate(mode, store=lambda total, dtype: total.bfloat16().to(dtype))),
    ("sums in half precision", [FP16, BF16], {"layer"}, lambda mode: emulate(mode, lambda terms: sequential(terms, mode.dtype))),
    ("truncation", [FP16, BF16], {"layer"}, lambda mode: emulate(mode, store=towards_zero)),
    ("silent tf32", [FP32, FP32_BY_FP16_PAIRS], {"identity", "normal", "layer"}, lambda mode: emulate(mode, input_bits=11)),
]


@pytest.mark.parametrize(("_name", "modes", "levels", "mutant"), MUTANTS, ids=[each[0] for each in MUTANTS])
def test_mutants_are_rejected(_name: str, modes: Sequence[Arithmetic], levels: set[str], mutant: Callable[[Arithmetic], Run]) -> None:
    for mode in modes:
        failed = failed_levels(mutant(mode), mode)
        assert failed and failed >= levels, mode.name


def test_values_above_the_floor_come_through_pairs_unchanged() -> None:
    values = torch.randn(1, 1 << 16, generator=torch.Generator().manual_seed(0)) ** 5  # over many powers of two
    kept = keep_bits(values, FP32_BY_FP16_PAIRS.exact_bits, FP32_BY_FP16_PAIRS.floor)
    for given, same in ((kept, True), (values, False)):
        (hi, lo), scale = in_pairs(given)
        assert torch.equal((hi.double() + lo) / scale, given.double()) is same


def test_a_yardstick_that_is_not_what_it_claims_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the yardstick is not float32"):
        check_layer(emulate(FP32), emulate(FP32, input_bits=11), Architecture((PATTERN,)), ROWS, FP32)


def test_covering_sets_leave_out_no_pair_of_values() -> None:
    def pairs(cases: Iterable[tuple[object, ...]]) -> set[tuple[object, ...]]:
        """Every two axes with the values that some case has there."""
        return {(n, m, case[n], case[m]) for case in cases for n, m in itertools.combinations(range(len(case)), 2)}

    thirds = [[(p.a, p.d, (p.b, p.c)) for p in PATTERNS if in_third(p, turn)] for turn in range(3)]
    whole = [(p.a, p.d, (p.b, p.c)) for p in PATTERNS]
    assert sorted(itertools.chain(*thirds)) == sorted(whole) and all(pairs(third) == pairs(whole) for third in thirds)
    for sizes in ((3, 3, 3), (6, 3, 3), (3, 5, 3), (4, 3, 2)):
        axes = [range(size) for size in sizes]
        cases = all_pairs(*axes)
        assert pairs(cases) == pairs(itertools.product(*axes)) and len(cases) == sizes[0] * sizes[1]
