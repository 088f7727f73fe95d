"""The one policy on how far a multiplication may be from the truth. No other tolerance stands in any test.

Level 0: on data whose products and sums are exact in any order, results are equal.
Level 1: every element lies within a bound that follows from the arithmetic, with no factor for comfort.
Level 2: over many elements, the error is no larger than that of PyTorch in the same arithmetic, times a small factor.
Each level sees what the others miss, so a backend has to pass all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.oracle import absolute_product, product

MIN_OUTPUTS = 4096
"""Level 2 compares root mean squares, which mean little over fewer outputs."""


@dataclass(frozen=True)
class Arithmetic:
    """How a multiplication rounds: the storage dtype, and the constants of levels 1 and 2.

    ``floor`` is what may be lost of any input beside ``e_in``, relative to the power of two above the largest one that shares its scale: a
    block of x in a row, a whole row of an intermediate, a whole factor.
    """

    name: str
    dtype: torch.dtype
    e_in: float  # the relative error of a product through the rounding of its two inputs
    u_acc: float  # that of an addition
    u_out: float  # that of the rounding to storage
    eta: float  # the absolute error where results are subnormal
    k: float  # the factor of level 2
    typical: float  # the relative rms error that a correct result has, to within a factor of 5
    exact_bits: int  # significand bits that inputs keep
    floor: float = 0.0


# The oracle sums in float64 itself, so the two errors add up; hence twice the unit roundoff, and a result rounded in storage.
FP64 = Arithmetic("float64", torch.float64, 0.0, 2.0**-52, 0.0, 0.0, 16.0, 2e-16, 53)
FP32 = Arithmetic("float32", torch.float32, 0.0, 2.0**-24, 0.0, 0.0, 16.0, 1e-7, 24)
# Each input, scaled by a power of two, becomes hi + lo in fp16, each rounded to nearest. |v - hi| is at most 2^-11 |v| and what is
# left out of lo 2^-11 of that: 2^-22 |v|. Of the four products hi·hi, hi·lo and lo·hi are kept, and lo·lo is at most 2^-22 of the
# whole. Together at most 3·2^-22, and 2^-40 for products of these. Where hi or lo is subnormal in fp16, 2^-25 is lost instead. The
# largest input that shares the scale lies in [2^7, 2^16): the kernel for single factors starts at the least, to leave room for
# what comes later. So 2^-25/2^7 = 2^-32 of it. TF32 grade rounds to hi alone: 2^-11 |v|, and the same floor.
PAIRS_FLOOR = 2.0**-32
FP32_BY_FP16_PAIRS = Arithmetic(
    "float32 by fp16 pairs", torch.float32, 3 * 2.0**-22 + 2.0**-40, 2.0**-23, 0.0, 0.0, 16.0, 1e-7, 22, PAIRS_FLOOR
)
TF32 = Arithmetic("tf32", torch.float32, 2 * 2.0**-11 + 2.0**-22, 2.0**-23, 0.0, 0.0, 1.5, 3e-4, 11, PAIRS_FLOOR)
FP16 = Arithmetic("float16", torch.float16, 0.0, 2.0**-23, 2.0**-11, 2.0**-24, 1.25, 2e-4, 11)
BF16 = Arithmetic("bfloat16", torch.bfloat16, 0.0, 2.0**-23, 2.0**-8, 0.0, 1.25, 1.7e-3, 8)

OF_DTYPE = {mode.dtype: mode for mode in (FP64, FP32, FP16, BF16)}
ARITHMETICS = {"fp16": FP16, "bf16": BF16, "tf32": TF32, "fp32": FP32_BY_FP16_PAIRS}
"""How our kernels compute in each mode that they are asked for by name."""


def bound(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None, mode: Arithmetic, *, bias_apart: bool = False) -> Tensor:
    """Level 1: the largest error that each output may have, in float64.

    For one factor, ``E + u_out*(|y| + E) + eta`` with ``E = (e_in + (1 + e_in)*g)*S``, ``g = n*u_acc/(1 - n*u_acc)``, S the product
    of absolute values and n the number of terms, a bias being one more; and what ``floor`` takes from x and the factor. For
    several factors the bound of one is the uncertainty of the next one's input. ``bias_apart``: the bias is added to a result
    that was rounded to storage before.
    """
    values, error = x.double(), torch.zeros_like(x, dtype=torch.float64)
    for factor in reversed(factors):
        fused_bias = bias if factor is factors[0] and not bias_apart else None
        inherited = absolute_product(error, factor)
        magnitude = absolute_product(values.abs() + error, factor)
        if mode.floor:
            inherited += _below_floor(values.abs() + error, factor, mode.floor, shared=factor is not factors[-1])
        values = product(values, [factor])
        if fused_bias is not None:
            values, magnitude = values + fused_bias.double(), magnitude + fused_bias.double().abs()
        error = _rounded(values, inherited, magnitude, factor.shape[2] + (fused_bias is not None), mode)
    if bias is not None and bias_apart:
        values = values + bias.double()
        error = error + max(mode.u_out, mode.u_acc) * (values.abs() + error)
    return error


def _rounded(values: Tensor, inherited: Tensor, magnitude: Tensor, terms: int, mode: Arithmetic) -> Tensor:
    growth = terms * mode.u_acc / (1 - terms * mode.u_acc)
    error = inherited + (mode.e_in + (1 + mode.e_in) * growth) * magnitude
    return error + mode.u_out * (values.abs() + error) + mode.eta


def _below_floor(x: Tensor, factor: Tensor, floor: float, *, shared: bool) -> Tensor:  # shapes: (rows, features)
    """What the smallest inputs may lose, summed; x are magnitudes. ``shared``: all blocks of a row of x have one scale."""
    blocks = x.unflatten(1, (1 if shared else factor.shape[0], -1))
    lost_x = (floor * power_above(blocks.amax(2, keepdim=True))).expand_as(blocks).flatten(1)
    lost_factor = (floor * power_above(factor.double().abs().amax())).expand_as(factor)
    return absolute_product(lost_x, factor) + absolute_product(x, lost_factor) + absolute_product(lost_x, lost_factor)


def power_above(magnitudes: Tensor) -> Tensor:
    """The smallest powers of two that are larger; 0 for 0."""
    return torch.where(magnitudes > 0, torch.exp2(torch.frexp(magnitudes.double()).exponent.double()), 0.0)


def assert_equal(out: Tensor, expected: Tensor) -> None:
    """Level 0: no element differs, and none is NaN."""
    wrong = (out.double() != expected.double()).nonzero()
    assert out.shape == expected.shape, f"expected shape {tuple(expected.shape)}, got {tuple(out.shape)}"
    assert len(wrong) == 0, f"{len(wrong)} of {out.numel()} elements differ, the first at {wrong[0].tolist()}"


def assert_bounded(
    out: Tensor, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None, mode: Arithmetic, *, bias_apart: bool = False
) -> None:
    """Level 1, on every element."""
    _assert_within(out, product(x, factors, bias), bound(x, factors, bias, mode, bias_apart=bias_apart), mode)


STEEPEST = 1.13
"""Above the largest slope of GELU (1.1290), its tanh form (1.1289) and SiLU (1.0998)."""
EVALUATED = 2.0**-21
"""What evaluating one of these in float32 may add, relative to its argument: a few operations and a function within 2 ulp of 1."""


def assert_epilogue_bounded(
    out: Tensor,
    x: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor,
    activation: Callable[[Tensor], Tensor],
    residual: Tensor | None,
    mode: Arithmetic,
) -> None:
    """Level 1 for ``activation(product + bias) + residual``, the product allowed the rounding to storage that one pass spares it."""
    before, error = product(x, factors, bias), bound(x, factors, bias, mode)
    truth = activation(before)
    error = STEEPEST * error + EVALUATED * (before.abs() + error)
    if residual is not None:
        truth = truth + residual.double()
        error = error + mode.u_acc * (truth.abs() + error)
    _assert_within(out, truth, error + mode.u_out * (truth.abs() + error) + mode.eta, mode)


def assert_epilogue_comparable(out: Tensor, yardstick: Tensor, truth: Tensor, mode: Arithmetic) -> None:
    """Level 2 after an epilogue: ``truth`` is in float64, ``yardstick`` the same steps by PyTorch in the same arithmetic."""
    _assert_comparable(out, yardstick, truth, mode, 1.2 * mode.k)


def assert_factor_gradient_bounded(
    gradient: Tensor, index: int, x: Tensor, factors: Sequence[Tensor], dy: Tensor, mode: Arithmetic
) -> None:
    """Level 1 for the gradient with respect to ``factors[index]``: a sum over rows of products of what enters and leaves it.

    What enters comes from x through the factors to the right, what leaves comes from dy through the factors to the
    left, transposed; the bounds of both are carried into the sum.
    """
    right, left = list(factors[index + 1 :]), [factor.transpose(1, 2) for factor in reversed(factors[:index])]
    entering, entering_error = product(x, right), bound(x, right, None, mode)
    leaving, leaving_error = product(dy, left), bound(dy, left, None, mode)
    a, b, c, d = gradient.shape

    def over_rows(left: Tensor, right: Tensor) -> Tensor:
        return torch.einsum("ripj,riqj->ipqj", left.view(-1, a, b, d), right.view(-1, a, c, d))

    truth = over_rows(leaving, entering)
    high = over_rows(leaving.abs() + leaving_error, entering.abs() + entering_error)
    inherited = high - over_rows(leaving.abs(), entering.abs())
    _assert_within(gradient, truth, _rounded(truth, inherited, high, x.shape[0], mode), mode)


def assert_comparable(out: Tensor, yardstick: Tensor, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None, mode: Arithmetic) -> None:
    """Level 2: the rms error is at most ``k`` times that of ``yardstick``, PyTorch's result in the same arithmetic."""
    truth = product(x, factors, bias)
    relative = _rms(yardstick.double() - truth) / _rms(truth)
    if not mode.typical / 5 <= relative <= mode.typical * 5:
        raise RuntimeError(f"the yardstick is not {mode.name}: its relative rms error is {relative:.2g}, not about {mode.typical:.2g}")
    _assert_comparable(out, yardstick, truth, mode, mode.k * (1.2 if len(factors) > 1 else 1.0))


def _assert_comparable(out: Tensor, yardstick: Tensor, truth: Tensor, mode: Arithmetic, k: float) -> None:
    assert out.numel() >= MIN_OUTPUTS, f"level 2 needs {MIN_OUTPUTS} outputs, got {out.numel()}"
    measured, allowed = _rms(out.double() - truth), _rms(yardstick.double() - truth)
    assert measured <= k * allowed, f"{mode.name}: the rms error is {measured / allowed:.3g} times PyTorch's, allowed are {k:.3g}"


def _assert_within(out: Tensor, truth: Tensor, error: Tensor, mode: Arithmetic) -> None:
    assert out.shape == truth.shape, f"expected shape {tuple(truth.shape)}, got {tuple(out.shape)}"
    excess = (out.double() - truth).abs() / error.clamp_min(torch.finfo(torch.float64).tiny)
    worst = excess.nan_to_num(nan=torch.inf).max().item() if out.numel() else 0.0
    assert worst <= 1.0, f"{mode.name}: an element errs by {worst:.3g} times what the arithmetic can explain"


def _rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()
