"""Transformer blocks, and halves and rows of them, made of fused modules and the blocks' own attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from flysurgery import ops
from flysurgery.inference.attending import Attending
from flysurgery.inference.fused_modules import FeedForwardStep, LinearResidualStep
from flysurgery.inference.operands import watched
from flysurgery.inference.standin import Condition, StandIn


@dataclass(frozen=True)
class Given:
    """An argument that the block passes on to its attention, by its position behind the first or by its name."""

    key: int | str

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Its value in a call of the block."""
        return args[self.key] if isinstance(self.key, int) else kwargs[self.key]


@dataclass(frozen=True)
class Handed:
    """The arguments of an attention behind the first: values, and ``Given`` ones."""

    positional: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The attention's arguments in a call of the block with these behind its first."""
        positional = [each.of(args, kwargs) if isinstance(each, Given) else each for each in self.positional]
        return positional, {name: each.of(args, kwargs) if isinstance(each, Given) else each for name, each in self.named}


@dataclass(frozen=True)
class Form:
    """How a block is called behind its first argument: the values seen, or ``Tensor`` where a tensor came.

    ``handed`` is what each of its attentions, by name, is called with.
    """

    positional: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]
    handed: dict[str, Handed]

    def fits(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call is of this form."""
        if len(args) != len(self.positional) or len(kwargs) != len(self.named):
            return False
        named = all(name in kwargs and _alike(seen, kwargs[name]) for name, seen in self.named)
        return named and all(map(_alike, self.positional, args))


class FusedPart:
    """One part of a block: ``step(x)``."""

    def __init__(self, step: nn.Module) -> None:
        self.step = step

    def __call__(self, x: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        return self.step(x)


class FusedAttended(FusedPart):
    """``x + scale*attention(norm(x))``; ``step`` computes everything behind attention.

    ``attention`` is a view of the block's own attention module without the output projection. Where ``norm`` is None, it includes the
    norm. ``attending`` replaces its call of PyTorch's attention.
    """

    def __init__(
        self, norm: nn.Module | None, attention: nn.Module, attending: Attending | None, step: LinearResidualStep, handed: Handed
    ) -> None:
        super().__init__(step)
        self.out = step
        self.norm, self.attention, self.attending, self.handed = norm, attention, attending, handed

    def attended(self, x: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """What ``step`` takes beside x."""
        positional, named = self.handed.of(args, kwargs)
        with self.attending or nullcontext():
            return self.attention(x if self.norm is None else self.norm(x), *positional, **named)

    def __call__(self, x: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        return self.out(self.attended(x, args, kwargs), x)


class FusedPair(FusedPart):
    """A part with attention and the feed-forward part behind it, whose norm reads the moments that the first part's kernel writes."""

    def __init__(self, first: FusedAttended, step: FeedForwardStep) -> None:
        super().__init__(step)
        self.first, self.out, self.then = first, first.out, step

    def __call__(self, x: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        attended = self.first.attended(x, args, kwargs)
        if self.then.reads_moments(x) and self.out.leaves_moments(attended, x):
            return self.then(*self.out.with_moments(attended, x))
        return self.then(self.out(attended, x))


def paired(parts: Iterable[FusedPart]) -> list[FusedPart]:
    """The same parts, with attention and feed-forward joined to a ``FusedPair`` where possible: only a dense layer gives moments."""
    found: list[FusedPart] = []
    for part in parts:
        before = found[-1] if found else None
        if isinstance(before, FusedAttended) and type(before.out.linear) is nn.Linear and isinstance(part.step, FeedForwardStep):
            found[-1] = FusedPair(before, part.step)
        else:
            found.append(part)
    return found


class FusedBlock(StandIn):
    """Residual sums of attention and feed-forward groups, one after the other, by fused modules.

    The original block serves calls of another form than the proven one, in training mode, or with hooks inside. A compiler calls a block
    that only launches kernels as one operator, which takes Python less time than one operator for each launch.
    """

    def __init__(self, original: nn.Module, parts: Sequence[FusedPart], form: Form, condition: Condition) -> None:
        super().__init__(original, condition)
        self.form = form
        self._parts = tuple(paired(parts))  # in a tuple, so that they are no children
        self._repeating = ops.Repeating()
        self._sums = all(isinstance(part.step, FeedForwardStep | LinearResidualStep) for part in self._parts)
        self.seal = ops.Seal(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.seal = ops.Seal(self)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        others = args[1:]
        if len(args) == 1 and not kwargs and self._sums and self._repeating.repeats and self.seal.applies(args[0]):
            return self.seal(args[0])
        if not args or not self.condition.holds() or not self.form.fits(others, kwargs):
            return self.plain(*args, **kwargs)
        if others or kwargs or watched():
            return self._fused(args[0], others, kwargs)
        return self._repeating(self._fused, self.original.modules, args[0])

    def _fused(self, x: Tensor, others: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = MappingProxyType({})) -> Tensor:
        for part in self._parts:
            x = part(x, others, kwargs)
        return x


def _alike(seen: Any, value: Any) -> bool:
    return isinstance(value, Tensor) if seen is Tensor else value is seen or (type(value) is type(seen) and value == seen)
