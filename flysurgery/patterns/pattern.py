"""One Kronecker-sparse factor's support, as four integers."""

from __future__ import annotations

from dataclasses import dataclass

from flysurgery.errors import PatternError

MAX_FEATURES = 1 << 24
"""Largest accepted side of a matrix. Plans come from files, so sizes are bounded before anything is allocated."""


@dataclass(frozen=True, order=True)
class Pattern:
    """The support ``I_a ⊗ 1_{b×c} ⊗ I_d`` of a Kronecker-sparse factor.

    The matrix K has shape ``(a*b*d, a*c*d)``, ``a*b*c*d`` nonzeros, and
    ``K[(i*b + p)*d + j, (i*c + q)*d + j] = factor[i, p, q, j]``.

    Raises:
        PatternError: an entry is no positive integer, or a side of the matrix exceeds ``MAX_FEATURES``.

    Source: Gonon et al. 2024, arXiv:2405.15013, Definition 2.1.
    """

    a: int
    b: int
    c: int
    d: int

    def __post_init__(self) -> None:
        entries = self.factor_shape
        if any(type(n) is not int or n < 1 for n in entries):
            raise PatternError(f"a pattern (a, b, c, d) takes four positive integers, got {entries}")
        if max(self.shape) > MAX_FEATURES:
            raise PatternError(f"pattern {self} describes a matrix of shape {self.shape}; no side may exceed {MAX_FEATURES}")

    def __str__(self) -> str:
        return f"({self.a},{self.b},{self.c},{self.d})"

    @property
    def factor_shape(self) -> tuple[int, int, int, int]:
        """Shape of the canonical storage, ``(a, b, c, d)``."""
        return (self.a, self.b, self.c, self.d)

    @property
    def out_features(self) -> int:
        """Number of rows of the matrix, ``a*b*d``."""
        return self.a * self.b * self.d

    @property
    def in_features(self) -> int:
        """Number of columns of the matrix, ``a*c*d``."""
        return self.a * self.c * self.d

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix, ``(out_features, in_features)``."""
        return (self.out_features, self.in_features)

    @property
    def nnz(self) -> int:
        """Number of nonzeros, which is the number of parameters, ``a*b*c*d``."""
        return self.a * self.b * self.c * self.d

    @property
    def density(self) -> float:
        """Share of entries in the support, ``1 / (a*d)``."""
        return 1.0 / (self.a * self.d)

    @property
    def flops_per_row(self) -> int:
        """Floating-point operations that one row of x costs, a multiplication and an addition a nonzero."""
        return 2 * self.nnz

    @property
    def transpose(self) -> Pattern:
        """The pattern of the transposed matrix, ``(a, c, b, d)``."""
        return Pattern(self.a, self.c, self.b, self.d)
