"""The policy itself: multiplications that are wrong in a known way are rejected by some level, correct ones by none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from flysurgery.patterns import Architecture, Pattern
from tests.support.levels import Run, check_bound, check_identity, check_integers, check_layer
from tests.support.problems import INPUTS, keep_bits
from tests.support.tolerance import BF16, FP16, FP32, FP32_BY_FP16_PAIRS, TF32, Arithmetic, power_above

PATTERN = Pattern(1, 16, 48, 2)
ROWS = 129

ALL = [FP32, FP32_BY_FP16_PAIRS, TF32, FP16, BF16]

Sum = Callable[[Tensor], Tensor]  # shapes: (terms, ...) -> (...), float32


def sequential(terms: Tensor) -> Tensor:
    total = torch.zeros_like(terms[0])
    for term in terms:
        total = total + term
    return total


def blocked(terms: Tensor) -> Tensor:
    return sequential(torch.stack([sequential(part) for part in terms.split(16)]))


def in_reverse(terms: Tensor) -> Tensor:
    return sequential(terms.flip(0))


def even_and_odd(terms: Tensor) -> Tensor:
    return sequential(terms[0::2]) + sequential(terms[1::2])


def in_storage(dtype: torch.dtype) -> Sum:
    def add(terms: Tensor) -> Tensor:
        total = torch.zeros_like(terms[0], dtype=dtype)
        for term in terms:
            total = (total.float() + term).to(dtype)
        return total.float()

    return add


def without_last(terms: Tensor) -> Tensor:
    return sequential(terms[:-1]) if len(terms) > 1 else torch.zeros_like(terms[0])


def to_nearest(total: Tensor, dtype: torch.dtype) -> Tensor:
    return total.to(dtype)


def towards_zero(total: Tensor, dtype: torch.dtype) -> Tensor:
    nearest = total.to(dtype)
    inwards = torch.nextafter(nearest, torch.zeros_like(nearest))
    return torch.where(nearest.float().abs() > total.abs(), inwards, nearest)


def through_bf16(total: Tensor, dtype: torch.dtype) -> Tensor:
    return total.bfloat16().to(dtype)


def in_pairs(values: Tensor) -> tuple[list[Tensor], Tensor]:  # values and scale, shapes: (rows, n), (rows, 1)
    """``hi`` and ``lo`` in fp16 and their scale: a row's largest value as low as the policy's floor allows, in [2^7, 2^8)."""
    scale = 2.0**8 / power_above(values.abs().amax(1, keepdim=True)).clamp_min(2.0**-100)
    scaled = (values * scale).float()
    hi = scaled.half().float()
    return [hi, (scaled - hi).half().float()], scale


def emulate(
    mode: Arithmetic,
    add: Sum = sequential,
    *,
    store: Callable[[Tensor, torch.dtype], Tensor] = to_nearest,
    spoil: Callable[[Tensor], None] | None = None,
    input_bits: int | None = None,
) -> Run:
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
        out = store(total if bias is None else total + bias.float(), mode.dtype)
        if spoil is not None:
            spoil(out)
        return out

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
@pytest.mark.parametrize("add", [sequential, blocked, in_reverse, even_and_odd])
def test_correct_variants_pass_every_level(mode: Arithmetic, add: Sum) -> None:
    assert failed_levels(emulate(mode, add), mode) == set()


def one_bad_row(out: Tensor) -> None:
    out[-1] = 0 if out[-1].any() else 1


def one_bad_element(out: Tensor) -> None:
    out[-1, -1] = torch.nextafter(out[-1, -1], torch.tensor(torch.inf, dtype=out.dtype))


MUTANTS = {
    "dropped term": lambda mode: emulate(mode, without_last),
    "bad row": lambda mode: emulate(mode, spoil=one_bad_row),
    "bad element": lambda mode: emulate(mode, spoil=one_bad_element),
    "bf16 detour": lambda mode: emulate(mode, store=through_bf16),
}


@pytest.mark.parametrize("mode", ALL, ids=lambda mode: mode.name)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_rejected(mode: Arithmetic, mutant: str) -> None:
    harmless = mutant == "bf16 detour" and mode is BF16
    assert bool(failed_levels(MUTANTS[mutant](mode), mode)) is not harmless


@pytest.mark.parametrize("mode", [FP16, BF16], ids=lambda mode: mode.name)
def test_sums_in_half_precision_are_rejected(mode: Arithmetic) -> None:
    assert "layer" in failed_levels(emulate(mode, in_storage(mode.dtype)), mode)


@pytest.mark.parametrize("mode", [FP16, BF16], ids=lambda mode: mode.name)
def test_truncation_is_rejected(mode: Arithmetic) -> None:
    assert "layer" in failed_levels(emulate(mode, store=towards_zero), mode)


@pytest.mark.parametrize("mode", [FP32, FP32_BY_FP16_PAIRS], ids=lambda mode: mode.name)
def test_silent_tf32_is_rejected(mode: Arithmetic) -> None:
    assert failed_levels(emulate(mode, input_bits=11), mode) >= {"identity", "normal", "layer"}


def test_values_above_the_floor_come_through_pairs_unchanged() -> None:
    values = torch.randn(1, 1 << 16, generator=torch.Generator().manual_seed(0)) ** 5  # over many powers of two
    kept = keep_bits(values, FP32_BY_FP16_PAIRS.exact_bits, FP32_BY_FP16_PAIRS.floor)
    for given, same in ((kept, True), (values, False)):
        (hi, lo), scale = in_pairs(given)
        assert torch.equal((hi.double() + lo) / scale, given.double()) is same


def test_a_yardstick_that_is_not_what_it_claims_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the yardstick is not float32"):
        check_layer(emulate(FP32), emulate(FP32, input_bits=11), Architecture((PATTERN,)), ROWS, FP32)
