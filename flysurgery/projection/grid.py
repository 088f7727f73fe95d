"""The grid of disjoint blocks, row class by column class, into which the product of two factors falls."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flysurgery.patterns import Architecture


@dataclass(frozen=True)
class Grid:
    """The blocks of ``K_1 K_2`` for one architecture of two factors, of any pair of patterns.

    Row class ``i*d1 + j`` holds the rows ``(i*b1 + p)*d1 + j``, column class ``i*d2 + j`` the columns ``(i*c2 + q)*d2 + j``. The block of
    row class r and column class s has the shape (b1, c2) and a rank of at most ``ranks[r, s]``.
    """

    architecture: Architecture

    @property
    def row_classes(self) -> int:
        """Their number, a1*d1."""
        left = self.architecture.patterns[0]
        return left.a * left.d

    @property
    def column_classes(self) -> int:
        """Their number, a2*d2."""
        right = self.architecture.patterns[1]
        return right.a * right.d

    def ranks(self) -> Tensor:  # shape: (row classes, column classes), int64
        """The number of inner indices that lie in both classes."""
        left, right = self.architecture.patterns
        inner = torch.arange(left.in_features)
        row_class = inner // (left.c * left.d) * left.d + inner % left.d
        column_class = inner // (right.b * right.d) * right.d + inner % right.d
        cells = torch.bincount(row_class * self.column_classes + column_class, minlength=self.row_classes * self.column_classes)
        return cells.reshape(self.row_classes, self.column_classes)

    def rows(self) -> Tensor:  # shape: (out_features,)
        """The row numbers, class after class."""
        left = self.architecture.patterns[0]
        return torch.arange(left.out_features).reshape(left.a, left.b, left.d).permute(0, 2, 1).reshape(-1)

    def columns(self) -> Tensor:  # shape: (in_features,)
        """The column numbers, class after class."""
        right = self.architecture.patterns[1]
        return torch.arange(right.in_features).reshape(right.a, right.c, right.d).permute(0, 2, 1).reshape(-1)

    def gather(
        self,
        matrix: Tensor,  # shape: (out_features, in_features)
    ) -> Tensor:  # shape: (row classes, b1, in_features), columns class after class
        """The rows of each class, in the order of ``rows`` and ``columns``."""
        sorted_matrix = matrix[self.rows().to(matrix.device)][:, self.columns().to(matrix.device)]
        return sorted_matrix.reshape(self.row_classes, -1, matrix.shape[1])

    def scatter(
        self,
        blocks: Tensor,  # shape: (row classes, b1, in_features)
    ) -> Tensor:  # shape: (out_features, in_features)
        """The inverse of ``gather``."""
        flat = blocks.reshape(-1, blocks.shape[-1])
        rows, columns = self.rows().to(blocks.device), self.columns().to(blocks.device)
        return flat[torch.argsort(rows)][:, torch.argsort(columns)]
