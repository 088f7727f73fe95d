"""The grid of disjoint blocks, row class by column class, into which the product of two factors falls."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flysurgery.patterns import Architecture, Pattern


@dataclass(frozen=True)
class Classes:
    """The classes of one side of a product: of its rows, by the pattern of K_1, or of its columns, by that of K_2 transposed.

    Class ``i*d + j`` holds the features ``(i*b + p)*d + j`` and the inner indices ``(i*c + q)*d + j``. A feature and an inner index of one
    class meet in the support, and those of two classes don't.
    """

    pattern: Pattern

    @property
    def count(self) -> int:
        """Their number, a*d."""
        return self.pattern.a * self.pattern.d

    @property
    def of_features(self) -> Tensor:  # shape: (features,)
        return self._of(self.pattern.b)

    @property
    def of_inner(self) -> Tensor:  # shape: (inner,)
        return self._of(self.pattern.c)

    def order(self) -> Tensor:  # shape: (features,)
        """The features, class after class."""
        return torch.argsort(self.of_features, stable=True)

    def _of(self, length: int) -> Tensor:
        index = torch.arange(self.count * length)
        return index // (length * self.pattern.d) * self.pattern.d + index % self.pattern.d


@dataclass(frozen=True)
class Grid:
    """The blocks of ``K_1 K_2`` for one architecture of two factors, of any pair of patterns.

    The block of a row class and a column class has the shape (b1, c2), and a rank of at most the number of inner indices in both.
    """

    architecture: Architecture

    @property
    def rows(self) -> Classes:
        return Classes(self.architecture.patterns[0])

    @property
    def columns(self) -> Classes:
        return Classes(self.architecture.patterns[1].transpose)

    def block_of_inner(self) -> Tensor:  # shape: (inner,)
        """The block of each inner index, counted row by row."""
        return self.rows.of_inner * self.columns.count + self.columns.of_inner

    def ranks(self) -> Tensor:  # shape: (row classes, column classes), int64
        sizes = self.rows.count, self.columns.count
        return torch.bincount(self.block_of_inner(), minlength=sizes[0] * sizes[1]).reshape(sizes)

    def gather(
        self,
        matrix: Tensor,  # shape: (out_features, in_features)
    ) -> Tensor:  # shape: (row classes, b1, in_features)
        """The matrix with its rows and columns sorted by their class."""
        rows, columns = (side.order().to(matrix.device) for side in (self.rows, self.columns))
        return matrix[rows][:, columns].unflatten(0, (self.rows.count, -1))

    def scatter(
        self,
        blocks: Tensor,  # shape: (row classes, b1, in_features)
    ) -> Tensor:  # shape: (out_features, in_features)
        """The inverse of ``gather``."""
        rows, columns = (torch.argsort(side.order()).to(blocks.device) for side in (self.rows, self.columns))
        return blocks.flatten(0, 1)[rows][:, columns]
