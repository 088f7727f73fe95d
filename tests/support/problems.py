"""The problems that every backend is tried on: patterns, numbers of rows, and the kinds of numbers in x."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flysurgery.patterns import Architecture, Pattern
from tests.support.tolerance import Arithmetic, power_above

BLOCKS, RESIDUES, SIZES = (1, 2, 6), (1, 2, 3, 5), ((3, 5), (16, 16), (48, 192), (64, 64), (192, 48))
PATTERNS = tuple(Pattern(a, b, c, d) for a, d, (b, c) in itertools.product(BLOCKS, RESIDUES, SIZES))

ARCHITECTURES = tuple(
    Architecture.of(*patterns)
    for patterns in (
        [(1, 192, 48, 2), (2, 48, 192, 1)],  # the square, up and down layers of ViT-S/16 in Gonon et al. 2024
        [(1, 768, 192, 2), (6, 64, 64, 1)],
        [(1, 128, 128, 3), (6, 64, 256, 1)],  # not chainable
        [(1, 96, 96, 4), (4, 96, 96, 1)],  # Monarch with four blocks
        [(1, 24, 16, 1), (1, 16, 40, 1)],  # low rank
        [(2, 3, 4, 3), (1, 8, 5, 3)],  # right factor with d > 1, sizes off every tile
        [(3, 2, 4, 2), (2, 3, 5, 4), (2, 5, 6, 4)],  # three factors, each with a > 1 and d > 1
    )
)

SMALL_ROWS = (0, 1, 7, 64, 129)
LARGE_ROWS = (25088, 25216)
"""Batches of 128 images at 196 and 197 tokens. For GPUs only: on two CPU cores they take minutes and run the same code."""


def in_third(pattern: Pattern, turn: int) -> bool:
    """Whether a pattern is in one of three parts of ``PATTERNS``, in each of which every pair of a, d and (b, c) occurs."""
    return (BLOCKS.index(pattern.a) + RESIDUES.index(pattern.d) + SIZES.index((pattern.b, pattern.c)) + turn) % 3 == 0


INPUTS = ("normal", "ranged", "cancelling", "zero", "largest")


def all_pairs(first: Sequence[Any], second: Sequence[Any], third: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    """Triples in which every two values of different axes meet, for tests to which three at once matter no more than two.

    The third axis, whose values take turns, must be the shortest.
    """
    assert len(third) <= min(len(first), len(second))
    return [(one, two, third[(n + m) % len(third)]) for n, one in enumerate(first) for m, two in enumerate(second)]


def make_factor(pattern: Pattern, mode: Arithmetic, *, device: str = "cpu", seed: int = 0) -> Tensor:
    """Draw a factor whose outputs are about as large as its inputs."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(pattern.factor_shape, generator=generator, dtype=torch.float64) / pattern.c**0.5
    return values.to(device, mode.dtype)


def make_factors(architecture: Architecture, mode: Arithmetic, *, device: str = "cpu") -> list[Tensor]:
    """One factor for each pattern, left to right."""
    return [make_factor(pattern, mode, device=device, seed=index) for index, pattern in enumerate(architecture)]


def make_vector(size: int, mode: Arithmetic, *, device: str = "cpu") -> Tensor:
    """Draw a bias."""
    return torch.randn(size, generator=torch.Generator().manual_seed(99), dtype=torch.float64).to(device, mode.dtype)


def make_input(rows: int, features: int, mode: Arithmetic, *, device: str = "cpu") -> Tensor:  # shape: (rows, features)
    """Draw x from the standard normal distribution."""
    generator = torch.Generator().manual_seed(rows * 7919 + features)
    return torch.randn(rows, features, generator=generator, dtype=torch.float64).to(device, mode.dtype)


def make_case(kind: str, pattern: Pattern, rows: int, mode: Arithmetic, *, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Draw x and a factor for it, x of one of the kinds in ``INPUTS``."""
    x, factor = make_input(rows, pattern.in_features, mode), make_factor(pattern, mode)
    if kind == "ranged":  # rows scaled by powers of two
        x *= torch.exp2(torch.arange(rows) % 17 - 8.0)[:, None].to(mode.dtype)
    elif kind == "cancelling":  # pairs of products nearly do
        pairs = pattern.c // 2
        terms = x.view(rows, pattern.a, pattern.c, pattern.d)
        terms[:, :, 1 : 2 * pairs : 2] = -terms[:, :, 0 : 2 * pairs : 2] * (1 + 2.0**-6)
        factor[:, :, 1 : 2 * pairs : 2] = factor[:, :, 0 : 2 * pairs : 2]
    elif kind == "zero":
        x.zero_()
    elif kind == "largest":  # that the arithmetic keeps, once in each row, against factors of at most 1/2
        x.zero_()
        info, widest = torch.finfo(mode.dtype), 127 if mode.dtype == torch.float32 else 1023
        largest = info.max if info.bits == 16 else 2.0**widest * (2 - 2.0 ** (1 - mode.exact_bits))
        x[torch.arange(rows), torch.arange(rows) % pattern.in_features] = largest
        factor.clamp_(-0.5, 0.5)
    return x.to(device), factor.to(device)


def make_integers(shape: Sequence[int], *, seed: int, mode: Arithmetic, device: str = "cpu") -> Tensor:
    """Draw from {-1, 0, 1}: sums of up to 2^exact_bits products are exact in any order."""
    return torch.randint(-1, 2, tuple(shape), generator=torch.Generator().manual_seed(seed)).to(device, mode.dtype)


def keep_bits(values: Tensor, bits: int, floor: float = 0.0) -> Tensor:
    """Round to a number of significand bits, so that an arithmetic of that many takes the values in unchanged.

    With a ``floor``, round to multiples of twice that of the largest value as well, so that nothing lies below it.
    """
    mantissa, exponent = torch.frexp(values.double())
    kept = torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)
    if floor:
        unit = 2 * floor * power_above(values.abs().amax())
        kept = (kept / unit).round() * unit
    return kept.to(values.dtype)
