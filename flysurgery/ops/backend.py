"""What a backend is: a name, an answer to what it can run, and the multiplication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from flysurgery.factors import architecture_of
from flysurgery.ops.problem import Problem
from flysurgery.patterns import Pattern

Runner = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]
"""Multiplies x of any leading dimensions by linears, whose outputs lie side by side: all their factors in order, left to right, and one
bias for each or none."""


class Backend:
    """One way to multiply. A new one gives ``name``, ``can_run`` and ``linear``, and takes its place in ``BACKENDS``.

    Everywhere below, x has two dimensions, any number of rows, zero included, and any strides. Results are fresh
    tensors and inputs stay as they are. Sizes, dtypes and devices have been checked.
    """

    name: str
    rounds = False
    """Whether operands may be wider than the problem says, as autocast leaves them. Autocast then stays on."""
    groups = False
    """Whether ``can_run`` and ``runner`` take problems of several linears that share x."""

    def can_run(self, problem: Problem) -> str | None:
        """None when the result will be correct, gradients included where asked for; otherwise the reason why not.

        The answer is remembered: it may depend on the problem and the machine alone.
        """
        raise NotImplementedError

    def advise_against(self, problem: Problem) -> str | None:
        """Why a backend further down the list is known to be faster here; None when none is."""
        return None

    def remark(self, problem: Problem) -> str | None:
        """A remark on how a problem is run, such as the number of launches."""
        return None

    def linear(
        self,
        x: Tensor,  # shape: (rows, in_features)
        factors: Sequence[Tensor],  # shapes: (a, b, c, d), left to right
        bias: Tensor | None,  # shape: (out_features,)
    ) -> Tensor:  # shape: (rows, out_features)
        """Multiply by all factors, the last one first, and add the bias."""
        raise NotImplementedError

    def runner(self, problem: Problem) -> Runner:
        """``linear`` for calls that the problem describes, with x of any leading dimensions."""
        return self._flattened

    def _flattened(self, x: Tensor, factors: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
        product = self.linear(x.reshape(-1, x.shape[-1]), factors, biases[0] if biases else None)
        return product.reshape(*x.shape[:-1], product.shape[-1])

    def bind(self, factors: Sequence[Tensor], bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Give ``linear`` for fixed weights, brought into the backend's own storage once."""
        return partial(self.linear, factors=factors, bias=bias)


class FactorwiseBackend(Backend):
    """A backend that multiplies by one factor at a time, each in a storage of the backend's own."""

    def prepare(
        self,
        factor: Tensor,  # shape: (a, b, c, d)
    ) -> Tensor:
        """Bring a factor into the backend's storage; differentiable where ``can_run`` promises gradients."""
        raise NotImplementedError

    def multiply(
        self,
        x: Tensor,  # shape: (rows, a*c*d)
        prepared: Tensor,
        pattern: Pattern,
    ) -> Tensor:  # shape: (rows, a*b*d)
        """Multiply the rows of x by one prepared factor."""
        raise NotImplementedError

    def linear(self, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return self.bind(factors, bias)(x)

    def bind(self, factors: Sequence[Tensor], bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        steps = [(self.prepare(factor), pattern) for factor, pattern in zip(factors, architecture_of(factors), strict=True)]

        def bound(x: Tensor) -> Tensor:
            for prepared, pattern in reversed(steps):
                x = self.multiply(x, prepared, pattern)
            return x if bias is None else x + bias

        return bound
