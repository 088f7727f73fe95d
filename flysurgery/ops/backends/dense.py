"""The dense product: the factors are multiplied out, and their zeros take part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor
from torch.nn.functional import linear

from flysurgery.factors import factors_to_dense
from flysurgery.ops.backend import Backend
from flysurgery.ops.problem import Problem


class DenseBackend(Backend):
    """``F.linear`` with the densified product. Without ``bind`` it densifies at every call, which costs more than it saves."""

    name = "dense"

    def can_run(self, problem: Problem) -> str | None:
        return None

    def linear(self, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return linear(x, factors_to_dense(factors), bias)

    def bind(self, factors: Sequence[Tensor], bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        return partial(linear, weight=factors_to_dense(factors), bias=bias)
