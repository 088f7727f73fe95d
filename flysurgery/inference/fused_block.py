"""Blocks made of fused modules and their own attention: whole ones, halves and rows of them, and modules that are one group."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from flysurgery import ops
from flysurgery.inference.fused_modules import AttentionStep, FeedForwardStep, LinearResidualStep, Step, watched
from flysurgery.inference.graph import attention_operands
from flysurgery.inference.groups import Arguments, Form, Given
from flysurgery.inference.standin import Condition, StandIn

_NO_ARGUMENTS: Arguments = {}


class Attending(TorchFunctionMode):
    """A block in which ``step`` computes the attention of calls without mask and dropout and with the scale that it was made for."""

    def __init__(self, step: AttentionStep) -> None:
        super().__init__()
        self.step = step

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        named = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            operands = attention_operands(*args, **named)
            if operands is not None and named.get("scale") == self.step.softmax_scale:
                return self.step(*operands)
        return func(*args, **named)


class FusedAttended:
    """``x + scale*attention(norm(x))``, and ``then``, if any, the feed-forward part behind it. ``out`` computes all behind attention.

    ``attention`` is a view of the block's own attention module without the output projection, called with ``handed`` behind its first
    argument. Where ``norm`` is None, it includes the norm. ``attending`` replaces its call of PyTorch's attention.
    """

    def __init__(
        self, norm: nn.Module | None, attention: nn.Module, attending: Attending | None, out: LinearResidualStep, handed: Arguments
    ) -> None:
        self.norm, self.attention, self.attending, self.out = norm, attention, attending, out
        self.then: FeedForwardStep | None = None
        self._positional = [value for key, value in handed.items() if isinstance(key, int)]
        self._named = {key: value for key, value in handed.items() if isinstance(key, str)}

    def __call__(self, x: Tensor, arguments: Arguments) -> Tensor:
        positional = [_present(value, arguments) for value in self._positional]
        named = {key: _present(value, arguments) for key, value in self._named.items()}
        with self.attending or nullcontext():
            attended = self.attention(x if self.norm is None else self.norm(x), *positional, **named)
        if self.then is None:
            return self.out(attended, x)
        if self.out.leaves_moments(attended, x) and self.then.reads_moments(x):  # the norm of the next part needs them
            return self.then(*self.out.with_moments(attended, x))
        return self.then(self.out(attended, x))


class FusedBlock(StandIn):
    """The parts of a block, one after the other, by fused modules.

    The original block serves calls of another form than the proven one, in training mode, or with hooks inside. A compiler calls a block
    that only launches kernels as one operator, which takes Python less time than one operator for each launch.
    """

    def __init__(self, original: nn.Module, parts: Sequence[Step | FusedAttended], form: Form, condition: Condition) -> None:
        super().__init__(original, condition)
        self.form = form
        self._parts = tuple(parts)  # in a tuple, so that they are no children
        self._repeating = ops.Repeating()
        # Sums have the shape of their input, which a seal needs.
        self._sums = all(isinstance(part, FusedAttended) or (isinstance(part, FeedForwardStep) and part.residual) for part in self._parts)
        self.seal = ops.Seal(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.seal = ops.Seal(self)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        alone = len(args) == 1 and not kwargs
        if alone and self._sums and self._repeating.repeats and self.seal.applies(args[0]):
            return self.seal(args[0])
        arguments: Arguments = _NO_ARGUMENTS if alone else {**dict(enumerate(args[1:])), **kwargs}
        if not args or not self.condition.holds() or not self.form.fits(arguments):
            return self.plain(*args, **kwargs)
        if not alone or watched() or torch.is_grad_enabled():
            return self._fused(args[0], arguments)
        return self._repeating(self._fused, self.original.modules, args[0])

    def _fused(self, x: Tensor, arguments: Arguments = _NO_ARGUMENTS) -> Tensor:
        for part in self._parts:
            x = part(x, arguments) if isinstance(part, FusedAttended) else part(x)
        return x


def _present(value: Any, arguments: Arguments) -> Any:
    return arguments[value.key] if isinstance(value, Given) else value
