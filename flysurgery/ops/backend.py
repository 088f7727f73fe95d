"""A multiplication as plain data, and what a backend is: a name, an answer to what it can run, and the multiplication."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flysurgery.factors import architecture_of
from flysurgery.patterns import Architecture, Pattern
from flysurgery.torch_state import is_tracing, tf32_allowed


@dataclass(frozen=True)
class Problem:
    """One multiplication ``y = x W^T + bias`` with W a product of factors, or by several such ``linears`` of one architecture.

    It holds everything that a backend's answer may depend on. ``rows`` is the number of rows of x once all leading dimensions are
    flattened, and None while a graph is traced: the choice must then hold for any number of rows. ``tracing`` asks for operators that a
    graph can hold: PyTorch's own, or registered ones. ``requires_grad`` asks for gradients with respect to x, the factors and the bias.
    ``allow_tf32`` says whether float32 products may round their inputs to TF32 (CUDA only).
    """

    architecture: Architecture
    rows: int | None
    dtype: torch.dtype
    device_type: str
    bias: bool = False
    requires_grad: bool = False
    tracing: bool = False
    allow_tf32: bool = False
    linears: int = 1


def problem_of(
    x: Tensor,  # shape: (*batch, in_features)
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left to right as in W = K_1 K_2
    bias: Tensor | None = None,  # shape: (out_features,)
    dtype: torch.dtype | None = None,
    beside: Sequence[Tensor] = (),
) -> Problem:
    """Describe the multiplication of these tensors under the present settings of PyTorch.

    ``dtype`` is what x will be cast to, if to anything; ``beside`` are the weights of other linears in the same call.
    """
    tensors = (x, *factors, *beside) if bias is None else (x, *factors, bias, *beside)
    tracing, architecture = is_tracing(*tensors), architecture_of(factors)
    return Problem(
        architecture=architecture,
        rows=None if tracing else x.numel() // architecture.in_features,
        dtype=dtype or x.dtype,
        device_type=x.device.type,
        bias=bias is not None,
        requires_grad=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors),
        tracing=tracing,
        allow_tf32=x.device.type == "cuda" and tf32_allowed(),
    )


Runner = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]
"""Multiplies x of any leading dimensions by linears, whose outputs lie side by side: all their factors in order, left to right, and one
bias for each or none."""


class Backend:
    """One way to multiply. A new one gives ``name``, ``can_run`` and ``linear`` or ``bind``, and takes its place in ``BACKENDS``.

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
        return None

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
        return self.bind(factors, bias)(x)

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

    def prepare(self, factor: Tensor) -> Tensor:  # shape: (a, b, c, d)
        """Bring a factor into the backend's storage; differentiable where ``can_run`` promises gradients."""
        return factor

    def multiply(self, x: Tensor, prepared: Tensor, pattern: Pattern) -> Tensor:  # shapes: (rows, a*c*d) -> (rows, a*b*d)
        """Multiply the rows of x by one prepared factor."""
        raise NotImplementedError

    def bind(self, factors: Sequence[Tensor], bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        steps = [(self.prepare(factor), pattern) for factor, pattern in zip(factors, architecture_of(factors), strict=True)]

        def bound(x: Tensor) -> Tensor:
            for prepared, pattern in reversed(steps):
                x = self.multiply(x, prepared, pattern)
            return x if bias is None else x + bias

        return bound
