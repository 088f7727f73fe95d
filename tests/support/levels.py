"""The levels of the policy, each as one check of a multiplication ``run(x, factors, bias)``."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flysurgery.patterns import Architecture, Pattern
from tests.support.oracle import dense, product
from tests.support.problems import keep_bits, make_case, make_factor, make_factors, make_input, make_integers, make_vector
from tests.support.tolerance import FP64, Arithmetic, assert_bounded, assert_comparable, assert_equal

Run = Callable[[Tensor, Sequence[Tensor], Tensor | None], Tensor]


def check_identity(run: Run, pattern: Pattern, mode: Arithmetic, device: str = "cpu") -> None:
    """Level 0: the identity as input gives the transposed matrix, bit by bit, in numbers that the arithmetic takes in unchanged.

    Where the identity is large, all blocks and residue classes, which meet in no output, get their ones in the same rows.
    """
    factor = keep_bits(make_factor(pattern, mode, device=device), mode.exact_bits, mode.floor)
    identity = torch.eye(pattern.in_features, dtype=mode.dtype, device=device)
    if pattern.in_features <= 512:
        assert_equal(run(identity, [factor], None), dense(factor).mT)
    else:
        ones = identity.view(pattern.a, pattern.c, pattern.d, pattern.in_features).sum(dim=(0, 2))  # shape: (c, in_features)
        assert_equal(run(ones, [factor], None), product(ones, [factor]))


def check_integers(run: Run, architecture: Architecture, rows: int, mode: Arithmetic, device: str = "cpu") -> None:
    """Level 0: small integers, whose sums are exact in any order.

    For several factors x has a single one in each row, as sums of sums would need more bits than a 16-bit dtype has.
    """
    factors = [make_integers(pattern.factor_shape, seed=index, mode=mode, device=device) for index, pattern in enumerate(architecture)]
    bias = make_integers((architecture.out_features,), seed=98, mode=mode, device=device)
    if len(architecture) == 1:
        x = make_integers((rows, architecture.in_features), seed=97, mode=mode, device=device)
    else:
        x = torch.eye(architecture.in_features, dtype=mode.dtype, device=device)
    assert_equal(run(x, factors, bias), product(x, factors, bias))


def check_bound(run: Run, kind: str, pattern: Pattern, rows: int, mode: Arithmetic, device: str = "cpu") -> None:
    """Level 1, for one factor and each kind of input."""
    x, factor = make_case(kind, pattern, rows, mode, device=device)
    assert_bounded(run(x, [factor], None), x, [factor], None, mode)


def check_layer(
    run: Run, yardstick: Run, architecture: Architecture, rows: int, mode: Arithmetic, device: str = "cpu", *, bias_apart: bool = False
) -> None:
    """Levels 1 and 2, for a whole layer with bias."""
    factors = make_factors(architecture, mode, device=device)
    bias = make_vector(architecture.out_features, mode, device=device)
    x = make_input(rows, architecture.in_features, mode, device=device)
    out = run(x, factors, bias)
    assert_bounded(out, x, factors, bias, mode, bias_apart=bias_apart)
    if mode is not FP64:  # which the oracle has itself
        assert_comparable(out, yardstick(x, factors, bias), x, factors, bias, mode)
