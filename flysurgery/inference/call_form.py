"""How a block is called in the trace, and what it passes on to its attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from flysurgery.inference.graph import Calls, UnfitError
from flysurgery.inference.groups import Arguments, Attended, BlockPart, FeedForwardGroup, Form, Given, NormModule, Patches

_SWITCHES = (bool, str, type(None))


def form_of(fqn: str, parts: Sequence[BlockPart], calls: Mapping[str, Calls]) -> Form:
    """The form of the only call of the block ``fqn``; ``UnfitError`` where a fused block cannot replace it."""
    attentions = [part for part in parts if isinstance(part, Attended)]
    alone = [part.fqn for part in parts if isinstance(part, NormModule | Patches)]
    alone += [part.norm for part in attentions if part.norm is not None]
    once = [fqn, *map(_reader, parts), *(part.attention for part in attentions)]
    once += [part.projection.norm.fqn for part in attentions if part.projection is not None]
    if any(calls[each].count != 1 for each in once):
        raise UnfitError("calls", "it is called more than once in one forward")
    own, arguments = calls[fqn], _behind_first(calls[fqn])
    if own.first_input is None or calls[_reader(parts[0])].first_input is not own.first_input or not isinstance(own.result, Tensor):
        raise UnfitError("call-form", "its first argument is not its input")
    foreign = next((each for each in arguments.values() if not isinstance(each, (*_SWITCHES, Tensor))), None)
    if foreign is not None:
        raise UnfitError("call-form", f"it is called with a {type(foreign).__name__}")
    if not all(calls[each].one_of_one_tensor for each in alone):
        raise UnfitError("call-form", "one of its modules is not called with one tensor alone, for another one")
    handed = {}
    for part in attentions:
        normed = None if part.norm is None else calls[part.norm].result
        handed[part.attention] = _handed_to(calls[part.attention], normed, arguments)
    return Form({key: Tensor if isinstance(value, Tensor) else value for key, value in arguments.items()}, handed)


def _reader(part: BlockPart) -> str:
    """The module that reads the part's input."""
    if isinstance(part, Attended):
        return part.norm or part.attention
    return part.norm.fqn if isinstance(part, FeedForwardGroup) else part.fqn


def _handed_to(attention: Calls, normed: object, arguments: Arguments) -> Arguments:
    """The arguments of an attention besides its input, which is ``normed`` if there is a norm: switches, or tensors of the block's."""
    x, given = attention.first_input, {id(value): Given(key) for key, value in arguments.items() if isinstance(value, Tensor)}
    if not isinstance(attention.result, Tensor):
        raise UnfitError("call-form", "its attention gives more than one tensor")
    if not isinstance(x, Tensor) or id(x) in given or (normed is not None and x is not normed):
        raise UnfitError("call-form", "its attention's first argument is not its input or the normed input")
    handed = _behind_first(attention)
    for value in handed.values():
        if isinstance(value, Tensor) and id(value) not in given:
            raise UnfitError("call-form", "its attention takes a tensor that is not one of its own arguments")
        if not isinstance(value, (*_SWITCHES, Tensor)):
            raise UnfitError("call-form", f"its attention is called with a {type(value).__name__}, which may be the input's size")
    return {key: given.get(id(value), value) for key, value in handed.items()}


def _behind_first(calls: Calls) -> Arguments:
    return {**dict(enumerate(calls.args[1:])), **calls.kwargs}
