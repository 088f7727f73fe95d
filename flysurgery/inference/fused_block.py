"""Fused forwards of transformer blocks, of their halves, and of several blocks in a row; and how they may be called."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from flysurgery import ops
from flysurgery.inference.first_tokens import FirstTokens
from flysurgery.inference.fused_modules import Step, under_autocast, watched
from flysurgery.inference.graph import Calls, UnfitError
from flysurgery.inference.match import Attended, BlockPart, reader_of
from flysurgery.inference.standin import Condition, StandIn
from flysurgery.walker import name_of, shape_of

_SWITCHES = (bool, str, type(None))

Arguments = Mapping[int | str, Any]
"""The arguments of a call behind the first: positional ones by number, from 0, and named ones by name."""
_NO_ARGUMENTS: Arguments = {}


@dataclass(frozen=True)
class Given:
    """An argument that a block passes on to its attention, by its key among the block's arguments."""

    key: int | str


@dataclass(frozen=True)
class Form:
    """How a block is called: its arguments in the trace, with ``Tensor`` where a tensor came.

    ``handed`` is what each of its attentions, by name, is called with: values, and ``Given`` ones.
    """

    arguments: Arguments
    handed: Mapping[str, Arguments]

    def fits(self, arguments: Arguments) -> bool:
        """Whether a call is of this form."""
        same = len(arguments) == len(self.arguments)
        return same and all(key in arguments and _alike(seen, arguments[key]) for key, seen in self.arguments.items())


def form_of(fqn: str, parts: Sequence[BlockPart], calls: Mapping[str, Calls]) -> Form:
    """The form of the only call of the block ``fqn``; ``UnfitError`` where a fused block cannot replace it."""
    attentions = [part for part in parts if isinstance(part, Attended)]
    alone = [part for part in parts if isinstance(part, str)] + [part.norm for part in attentions if part.norm is not None]
    once = [fqn, *map(reader_of, parts), *(part.attention for part in attentions)]
    once += [part.projection.norm.fqn for part in attentions if part.projection is not None]
    if any(len(calls[name]) != 1 for name in once):
        raise UnfitError("calls", "it is called more than once in one forward")
    own, reader = calls[fqn], calls[reader_of(parts[0])]
    arguments = _behind_first(own)
    if own.first_input is None or reader.first_input is not own.first_input or not isinstance(own.first_result, Tensor):
        raise UnfitError("call-form", "its first argument is not its input")
    foreign = next((each for each in arguments.values() if not isinstance(each, (*_SWITCHES, Tensor)) and not _is_number(each)), None)
    if foreign is not None:
        raise UnfitError("call-form", f"it is called with a {type(foreign).__name__}")
    if not all(calls[name].one_of_one_tensor and isinstance(calls[name].first_result, Tensor) for name in alone):
        raise UnfitError("call-form", "one of its modules is not called with one tensor alone, for another one")
    handed = {}
    for part in attentions:
        normed = None if part.norm is None else calls[part.norm].first_result
        handed[part.attention] = _handed_to(calls[part.attention], normed, arguments)
    return Form({key: Tensor if isinstance(value, Tensor) else value for key, value in arguments.items()}, handed)


def _handed_to(attention: Calls, normed: object, arguments: Arguments) -> Arguments:
    """The arguments of an attention besides its input, which is ``normed`` if there is a norm: values, or arguments of the block."""
    x, given = attention.first_input, {id(value): Given(key) for key, value in arguments.items() if isinstance(value, Tensor)}
    if not isinstance(attention.first_result, Tensor):
        raise UnfitError("call-form", "its attention gives more than one tensor")
    if not isinstance(x, Tensor) or id(x) in given or (normed is not None and x is not normed):
        raise UnfitError("call-form", "its attention's first argument is not its input or the normed input")
    handed = _behind_first(attention)
    for value in handed.values():
        if isinstance(value, Tensor):
            if id(value) not in given:
                raise UnfitError("call-form", "its attention takes a tensor that is not one of its own arguments")
        elif not isinstance(value, (*_SWITCHES, int, float, tuple)):
            raise UnfitError("call-form", f"its attention is called with a {type(value).__name__}")
        elif not isinstance(value, _SWITCHES) and not any(_is_number(each) and each == value for each in arguments.values()):
            raise UnfitError("call-form", "its attention takes a number that is not one of its own arguments, and may be the input's size")
    return {key: given.get(id(value), value) for key, value in handed.items()}


def _behind_first(calls: Calls) -> Arguments:
    args, kwargs, _ = calls[0]
    return {**dict(enumerate(args[1:])), **kwargs}


def _is_number(value: Any) -> bool:
    """Whether it is a number or several, such as the size of a grid of tokens."""
    return all(isinstance(each, (bool, int, float)) for each in (value if isinstance(value, tuple) else (value,)))


def _alike(seen: Any, value: Any) -> bool:
    return isinstance(value, Tensor) if seen is Tensor else value is seen or (type(value) is type(seen) and value == seen)


class Attending(TorchFunctionMode):
    """A block in which ``step`` computes attention of its own scale, without mask and dropout."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        named = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            operands = _operands(*args, **named)
            if operands is not None and named.get("scale") == self.step.given.scale:
                return self.step(*operands)
        return func(*args, **named)


def attention_among(nodes: Iterable[Node]) -> Node | None:
    """The only call of scaled_dot_product_attention, without mask and dropout; None where there is no such call."""
    calls = [node for node in nodes if name_of(node) == functional.scaled_dot_product_attention.__name__]
    if len(calls) != 1 or _operands(*calls[0].args, **calls[0].kwargs) is None:
        return None
    return calls[0] if all(len(shape_of(node) or ()) == 4 for node in calls[0].args[:3] if isinstance(node, Node)) else None


def _operands(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    *,
    scale: Any = None,
    enable_gqa: Any = False,
) -> tuple[Any, Any, Any] | None:
    """The operands of a call of scaled_dot_product_attention; None where the call does more than the kernel."""
    return None if attn_mask is not None or dropout_p or is_causal or enable_gqa else (query, key, value)


@dataclass(eq=False)
class FusedAttended:
    """``x + scale*attention(norm(x))``, a part of a block; ``step`` computes everything behind attention.

    ``attention`` is a view of the block's own attention module without the output projection, called with ``handed`` behind its first
    argument. Where ``norm`` is None, it includes the norm. ``attending`` replaces its call of PyTorch's attention, ``first`` its norm and
    projection, if any. ``tokens`` are those that a model's forward may read behind the part; None for all. ``then`` is the feed-forward
    part behind it, if any, whose norm may read the moments that the kernel of ``step`` writes.
    """

    norm: nn.Module | None
    attention: nn.Module
    attending: Attending | None
    first: Step | None
    step: Step
    handed: Arguments
    tokens: FirstTokens | None
    then: Step | None = None

    def attended(self, x: Tensor, arguments: Arguments) -> tuple[Tensor, Tensor]:
        """What ``step`` takes: the result of attention, and x, in whose place ``first`` may put another result."""
        handed = {key: arguments[value.key] if isinstance(value, Given) else value for key, value in self.handed.items()}
        positional = [value for key, value in handed.items() if isinstance(key, int)]
        named = {key: value for key, value in handed.items() if isinstance(key, str)}
        stream = SimpleNamespace(x=x)
        try:
            if self.first is not None:
                self.first.stream = stream
            with self.attending or nullcontext():
                y = self.attention(x if self.norm is None else self.norm(x), *positional, **named)
        finally:
            if self.first is not None:
                self.first.stream = None  # it would keep the graph of this call
        if self.tokens is not None and self.tokens.asked():
            return y[:, : self.tokens.count], stream.x[:, : self.tokens.count]
        return y, stream.x

    def __call__(self, x: Tensor, arguments: Arguments) -> Tensor:
        attended, x = self.attended(x, arguments)
        if self.then is None:
            return self.step(attended, x)
        if self.step.enabled and self.then.enabled and not under_autocast(x) and _reads_moments(self.then, x):
            sums = self.step.operation(attended, x)
            if not isinstance(sums, str) and ops.leaves_moments(attended, sums):
                return self.then(*ops.run_with_moments(attended, sums))
        return self.then(self.step(attended, x))


def _reads_moments(then: Step, x: Tensor) -> bool:
    """Whether a step can use the moments of the rows of its input, which are of the shape of x."""
    way = then.way(x)
    return not isinstance(way, str) and way.launches()[:1] == (ops.MOMENTS,)


class FusedBlock(StandIn):
    """Residual sums of attention and feed-forward groups, one after the other, by fused modules.

    Each part is a module of x, or a ``FusedAttended``. The original block serves calls of another form than the proven one, in training
    mode, or with hooks inside. A compiler does not trace it: compiled code calls it from Python, where it replays its launches.
    """

    def __init__(self, original: nn.Module, parts: Sequence[nn.Module | FusedAttended], form: Form, condition: Condition) -> None:
        super().__init__(original, condition)
        self.form = form
        self._parts = tuple(_joined(parts))  # in a tuple, so that they are no children
        self._tokens = next((part.tokens for part in parts if isinstance(part, FusedAttended) and part.tokens is not None), None)
        self._repeating = ops.Repeating(), ops.Repeating()  # for all tokens, and for the first ones

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's annotation
        alone = len(args) == 1 and not kwargs
        arguments: Arguments = _NO_ARGUMENTS if alone else {**dict(enumerate(args[1:])), **kwargs}
        if not args or not self.condition.holds() or not self.form.fits(arguments):
            return self.plain(*args, **kwargs)
        if not alone or watched() or torch.is_grad_enabled():
            return self._fused(args[0], arguments)
        repeating = self._repeating[self._tokens is not None and self._tokens.asked()]
        return repeating(self._fused, self.original.modules, args[0])

    def _fused(self, x: Tensor, arguments: Arguments = _NO_ARGUMENTS) -> Tensor:
        for part in self._parts:
            x = part(x, arguments) if isinstance(part, FusedAttended) else part(x)
        return x


def _joined(parts: Iterable[nn.Module | FusedAttended]) -> list[nn.Module | FusedAttended]:
    """The parts, of which one with attention also computes the feed-forward part behind it where that may read moments."""
    found: list[nn.Module | FusedAttended] = []
    for part in parts:
        before = found[-1] if found else None
        if isinstance(before, FusedAttended) and before.then is None and isinstance(part, Step) and _gives_moments(before.step, part):
            before.then = part
        else:
            found.append(part)
    return found


def _gives_moments(first: Step, then: Step) -> bool:
    return type(first.given.linear) is nn.Linear and isinstance(then.given, ops.FeedForward)
