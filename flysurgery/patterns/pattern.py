"""A Kronecker-sparse factor's support as four integers, and a product of such factors, as its patterns from left to right."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

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
        if any(type(n) is not int or n < 1 for n in self.factor_shape):
            raise PatternError(f"a pattern (a, b, c, d) takes four positive integers, got {self.factor_shape}")
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


@dataclass(frozen=True)
class Architecture:
    """The patterns of ``W = K_1 K_2 ... K_L``, left to right; a row x meets the last one first.

    Raises:
        PatternError: there is no pattern, or two neighbours disagree about the size between them.

    Source: Gonon et al. 2024, arXiv:2405.15013, Definition 2.1.
    """

    patterns: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        if not self.patterns:
            raise PatternError("an architecture needs at least one pattern, got none")
        for left, right in pairwise(self.patterns):
            if left.in_features != right.out_features:
                raise PatternError(
                    f"neighbouring patterns must agree on the size between them: {left} takes {left.in_features} "
                    f"features and {right} gives {right.out_features}"
                )

    @classmethod
    def of(cls, *patterns: Sequence[int]) -> Architecture:
        """Build from plain tuples: ``Architecture.of((1, 192, 48, 2), (2, 48, 192, 1))``."""
        return cls.from_json(patterns)

    @classmethod
    def from_json(cls, rows: object) -> Architecture:
        """Build from a list of four-integer lists, as plans and checkpoints hold it."""
        if not isinstance(rows, list | tuple) or not all(isinstance(row, list | tuple) and len(row) == 4 for row in rows):
            raise PatternError(f"an architecture is a list of patterns of four integers, got {rows!r}")
        return cls(tuple(Pattern(*row) for row in rows))

    @classmethod
    def parse(cls, text: str) -> Architecture:
        """Read ``"(1,192,48,2),(2,48,192,1)"``, the form that ``str`` writes."""
        body = r"\(\s*\d+\s*,\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\)"
        if not isinstance(text, str) or not re.fullmatch(rf"\s*{body}(\s*,\s*{body})*\s*", text):
            raise PatternError(f"expected patterns such as '(1,192,48,2),(2,48,192,1)', got '{text}'")
        return cls(tuple(Pattern(*map(int, re.findall(r"\d+", group))) for group in re.findall(body, text)))

    def to_json(self) -> list[list[int]]:
        """The inverse of ``from_json``."""
        return [list(pattern.factor_shape) for pattern in self.patterns]

    def __str__(self) -> str:
        return ",".join(str(pattern) for pattern in self.patterns)

    def __len__(self) -> int:
        return len(self.patterns)

    def __iter__(self) -> Iterator[Pattern]:
        return iter(self.patterns)

    @property
    def out_features(self) -> int:
        """Number of rows of W."""
        return self.patterns[0].out_features

    @property
    def in_features(self) -> int:
        """Number of columns of W."""
        return self.patterns[-1].in_features

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of W, ``(out_features, in_features)``."""
        return (self.out_features, self.in_features)

    @property
    def inner_features(self) -> tuple[int, ...]:
        """Sizes between neighbouring factors, left to right."""
        return tuple(pattern.in_features for pattern in self.patterns[:-1])

    @property
    def num_parameters(self) -> int:
        """Number of stored weights, the sum of the factors' nonzeros."""
        return sum(pattern.nnz for pattern in self.patterns)

    @property
    def density(self) -> float:
        """Stored weights over entries of W; above 1 where the factors are larger than W."""
        return self.num_parameters / (self.out_features * self.in_features)

    @property
    def flops_per_row(self) -> int:
        """Floating-point operations that one row of x costs."""
        return 2 * self.num_parameters

    @property
    def transpose(self) -> Architecture:
        """The architecture of ``Wᵀ``: the transposed patterns in reverse order."""
        return Architecture(tuple(pattern.transpose for pattern in reversed(self.patterns)))

    @property
    def is_chainable(self) -> bool:
        """Whether every pair of neighbours is chainable.

        (a1,b1,c1,d1),(a2,b2,c2,d2) are chainable when a1 divides a2, d2 divides d1, and the rank
        ``r = b2*d2/d1 = a1*c1/a2`` is a whole number. Deep projections have a guarantee only then.

        Source: Le, Zheng, Riccietti and Gribonval 2024, arXiv:2411.04506.
        """
        return not any(
            right.a % left.a or left.d % right.d or (left.a * left.c) % right.a or (right.b * right.d) % left.d
            for left, right in pairwise(self.patterns)
        )


def product_pattern(left: Pattern, right: Pattern) -> Pattern:
    """The support of the product of a chainable pair, ``(a1, b1*d1/d2, a2*c2/a1, d2)``, which is a pattern again.

    Raises:
        PatternError: the sizes between them disagree, or the pair is not chainable, so that no pattern describes its product.

    Source: Le, Zheng, Riccietti and Gribonval 2024, arXiv:2411.04506.
    """
    if not Architecture((left, right)).is_chainable:
        raise PatternError(f"the product of {left} and {right} has no pattern of its own: the pair is not chainable")
    return Pattern(left.a, left.b * left.d // right.d, right.a * right.c // left.a, right.d)


def check_fits(architecture: Architecture, out_features: int, in_features: int) -> None:
    """Raise ``PatternError`` with both sizes unless the architecture describes an ``out x in`` matrix."""
    if architecture.shape != (out_features, in_features):
        raise PatternError(
            f"architecture {architecture} describes a {architecture.out_features}x{architecture.in_features} matrix, "
            f"the layer is {out_features}x{in_features}"
        )
