"""Supports written out as 0/1 matrices by Kronecker products, and what can be counted on them."""

from collections.abc import Iterator
from functools import reduce

import numpy as np

from flysurgery.patterns import Architecture, Pattern


def support(pattern: Pattern) -> np.ndarray:
    """``I_a ⊗ 1_{b×c} ⊗ I_d`` as integers."""
    a, b, c, d = pattern.factor_shape
    identities = np.eye(a, dtype=np.int64), np.eye(d, dtype=np.int64)
    return np.kron(np.kron(identities[0], np.ones((b, c), dtype=np.int64)), identities[1])


def path_counts(architecture: Architecture) -> np.ndarray:
    """For each entry of W, the number of ways through the inner sizes: the product of the supports."""
    return reduce(np.matmul, map(support, architecture))


def blocks(architecture: Architecture) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """For two factors: rows with equal support, met with columns of equal support, and the number of inner indices in both."""
    left, right = map(support, architecture)
    row_kinds, row_kind = np.unique(left, axis=0, return_inverse=True)
    column_kinds, column_kind = np.unique(right.T, axis=0, return_inverse=True)
    for r, row in enumerate(row_kinds):
        for c, column in enumerate(column_kinds):
            yield np.flatnonzero(row_kind.ravel() == r), np.flatnonzero(column_kind.ravel() == c), int(row @ column)
