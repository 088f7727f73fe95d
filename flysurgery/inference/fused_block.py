"""Blocks made of fused modules and their own attention: whole ones, halves and rows of them, and modules that are one group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from flysurgery import ops
from flysurgery.inference.fused_modules import AttentionStep, FeedForwardStep, LinearResidualStep, watched
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


class FusedPart:
    """One part of a block: ``step(x)``."""

    def __init__(self, step: nn.Module) -> None:
        self.step = step

    def __call__(self, x: Tensor, arguments: Arguments) -> Tensor:
        return self.step(x)


class FusedAttended(FusedPart):
    """``x + scale*attention(norm(x))``; ``step`` computes everything behind attention.

    ``attention`` is a view of the block's own attention module without the output projection, called with ``handed`` behind its first
    argument. Where ``norm`` is None, it includes the norm. ``attending`` replaces its call of PyTorch's attention.
    """

    def __init__(
        self, norm: nn.Module | None, attention: nn.Module, attending: Attending | None, step: LinearResidualStep, handed: Arguments
    ) -> None:
        super().__init__(step)
        self.out = step
        self.norm, self.attention, self.attending = norm, attention, attending
        self._positional = [value for key, value in handed.items() if isinstance(key, int)]
        self._named = {key: value for key, value in handed.items() if isinstance(key, str)}

    def attended(self, x: Tensor, arguments: Arguments) -> Tensor:
        """What ``step`` takes beside x."""
        positional = [_present(value, arguments) for value in self._positional]
        named = {key: _present(value, arguments) for key, value in self._named.items()}
        with self.attending or nullcontext():
            return self.attention(x if self.norm is None else self.norm(x), *positional, **named)

    def __call__(self, x: Tensor, arguments: Arguments) -> Tensor:
        return self.out(self.attended(x, arguments), x)


class FusedPair(FusedPart):
    """A part with attention and the feed-forward part behind it, whose norm reads the moments that the first part's kernel writes."""

    def __init__(self, first: FusedAttended, step: FeedForwardStep) -> None:
        super().__init__(step)
        self.first, self.out, self.then = first, first.out, step

    def __call__(self, x: Tensor, arguments: Arguments) -> Tensor:
        attended = self.first.attended(x, arguments)
        if self.then.reads_moments(x) and self.out.leaves_moments(attended, x):
            return self.then(*self.out.with_moments(attended, x))
        return self.then(self.out(attended, x))


class FusedBlock(StandIn):
    """The parts of a block, one after the other, by fused modules.

    The original block serves calls of another form than the proven one, in training mode, or with hooks inside. A compiler calls a block
    that only launches kernels as one operator, which takes Python less time than one operator for each launch.
    """

    def __init__(self, original: nn.Module, parts: Sequence[FusedPart], form: Form, condition: Condition) -> None:
        super().__init__(original, condition)
        self.form = form
        self._parts = tuple(_paired(parts))  # in a tuple, so that they are no children
        self._repeating = ops.Repeating()
        self._sums = all(isinstance(part.step, FeedForwardStep | LinearResidualStep) for part in self._parts)
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
            x = part(x, arguments)
        return x


def _paired(parts: Iterable[FusedPart]) -> list[FusedPart]:
    """The same parts, with attention and feed-forward joined to a ``FusedPair`` where possible: only a dense layer gives moments."""
    found: list[FusedPart] = []
    for part in parts:
        before = found[-1] if found else None
        if isinstance(before, FusedAttended) and type(before.out.linear) is nn.Linear and isinstance(part.step, FeedForwardStep):
            found[-1] = FusedPair(before, part.step)
        else:
            found.append(part)
    return found


def _present(value: Any, arguments: Arguments) -> Any:
    return arguments[value.key] if isinstance(value, Given) else value
