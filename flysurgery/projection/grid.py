"""The grid of disjoint blocks, row class by column class, into which the product of two factors falls."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flysurgery.patterns import Architecture


@dataclass(frozen=True)
class Grid:
    """The blocks of ``K_1 K_2`` for one architecture of two factors, of any pair of patterns.

    Row class ``i*d1 + j`` holds the rows ``(i*b1 + p)*d1 + j``, column class ``i*d2 + j`` the columns ``(i*c2 + q)*d2 + j``. An inner index
    lies in the row class that its column of K_1 touches, and in the column class that its row of K_2 touches. The block of row class r and
    column class s has the shape (b1, c2) and a rank of at most ``ranks[r, s]``, the number of inner indices in both.
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
        cell = self.row_class_of_inner() * self.column_classes + self.column_class_of_inner()
        cells = torch.bincount(cell, minlength=self.row_classes * self.column_classes)
        return cells.reshape(self.row_classes, self.column_classes)

    def row_class_of_inner(self) -> Tensor:  # shape: (inner,)
        left = self.architecture.patterns[0]
        return _class_of(left.a, left.c, left.d)

    def column_class_of_inner(self) -> Tensor:  # shape: (inner,)
        right = self.architecture.patterns[1]
        return _class_of(right.a, right.b, right.d)

    def row_class_of(self) -> Tensor:  # shape: (out_features,)
        left = self.architecture.patterns[0]
        return _class_of(left.a, left.b, left.d)

    def column_class_of(self) -> Tensor:  # shape: (in_features,)
        right = self.architecture.patterns[1]
        return _class_of(right.a, right.c, right.d)

    def rows(self) -> Tensor:  # shape: (out_features,)
        return torch.argsort(self.row_class_of(), stable=True)

    def columns(self) -> Tensor:  # shape: (in_features,)
        return torch.argsort(self.column_class_of(), stable=True)

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


def _class_of(a: int, length: int, d: int) -> Tensor:
    """The class ``i*d + j`` of each index ``(i*length + p)*d + j``."""
    index = torch.arange(a * length * d)
    return index // (length * d) * d + index % d
