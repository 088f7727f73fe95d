"""How blocks and their attentions are called, found by one forward on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from flysurgery.errors import WalkError
from flysurgery.inference.fused_block import Form, Given, Handed
from flysurgery.inference.groups import Attended, Block, BlockPart, FeedForwardGroup, Lone
from flysurgery.surgery import Reason
from flysurgery.walker import Survey, one_line, run_fake

_SWITCHES = (bool, str, type(None))
_NUMBERS = (int, float, tuple)


@dataclass
class Seen:
    """The calls of one module: their arguments and results."""

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)

    @property
    def first_input(self) -> Any:
        """The first positional argument of the first call; None where there is none."""
        return self.calls[0][0][0] if self.calls and self.calls[0][0] else None

    @property
    def first_result(self) -> Any:
        """The result of the first call; None where there is none."""
        return self.results[0] if self.results else None


def watch(seen: Survey, methods: Iterable[str] = ()) -> dict[str, Seen]:
    """Run the surveyed stand-in once on fake tensors, and record the calls of every module, by its first name.

    Calls of ``methods`` of a class, if it has them, are recorded under the name that a child of that name would have.

    Raises:
        WalkError: the forward needs values of tensors, for example to select rows by them.
    """
    found = {fqn: Seen() for fqn, _ in seen.double.named_modules()}
    handles = []
    set_on = list[tuple[nn.Module, str]]()
    for fqn, module in seen.double.named_modules():
        notes = found[fqn]
        handles.append(module.register_forward_pre_hook(_note_call(notes), with_kwargs=True))
        handles.append(module.register_forward_hook(_note_result(notes)))
        for name in methods:
            if callable(getattr(type(module), name, None)) and name not in vars(module):
                notes = found[f"{fqn}.{name}".lstrip(".")] = Seen()
                vars(module)[name] = _noting(getattr(module, name), notes)
                set_on.append((module, name))
    try:
        run_fake(seen.double, seen.example)
    except Exception as error:  # the forward may raise anything, as in trace
        raise WalkError(
            f"{type(seen.double).__name__} cannot be walked, because it does not run without data: {one_line(error)}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
        for module, name in set_on:
            del vars(module)[name]
    return found


def _noting(method: Callable[..., Any], notes: Seen) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        notes.calls.append((args, kwargs))
        notes.results.append(method(*args, **kwargs))
        return notes.results[-1]

    return noted


def _note_call(notes: Seen) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        notes.calls.append((args, dict(kwargs)))

    return hook


def _note_result(notes: Seen) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        notes.results.append(result)

    return hook


def once_with_one_tensor(notes: Seen) -> bool:
    """Whether a module was called once, with one tensor and nothing else."""
    return len(notes.calls) == 1 and len(notes.calls[0][0]) == 1 and isinstance(notes.calls[0][0][0], Tensor) and not notes.calls[0][1]


def form_of(block: Block, calls: dict[str, Seen]) -> Form | Reason:
    """The form of the block's only call, or why a fused block cannot replace it."""
    called = [block.fqn, *(fqn for part in block.parts for fqn in _modules_of(part))]
    if any(len(calls[fqn].calls) != 1 for fqn in called):
        return Reason("calls", "it is called more than once in one forward")
    args, kwargs = calls[block.fqn].calls[0]
    if not args or calls[called[1]].first_input is not args[0] or not isinstance(calls[block.fqn].first_result, Tensor):
        return Reason("call-form", "its first argument is not its input")
    arguments: dict[int | str, Any] = {**dict(enumerate(args[1:])), **kwargs}
    given = {id(value): Given(key) for key, value in arguments.items() if isinstance(value, Tensor)}
    foreign = next((each for each in arguments.values() if not isinstance(each, (*_SWITCHES, Tensor)) and not _is_number(each)), None)
    if foreign is not None:
        return Reason("call-form", f"it is called with a {type(foreign).__name__}")
    lone = [fqn for part in block.parts for fqn in _lone_of(part)]
    if not all(once_with_one_tensor(calls[fqn]) and isinstance(calls[fqn].first_result, Tensor) for fqn in lone):
        return Reason("call-form", "one of its modules is not called with one tensor alone, for another one")
    handed: dict[str, Handed] = {}
    for part in block.parts:
        if isinstance(part, Attended):
            found = _handed_to(part, calls, given, [*arguments.values()])
            if isinstance(found, Reason):
                return found
            handed[part.attention] = found
    return Form(tuple(map(_kept, args[1:])), tuple((name, _kept(value)) for name, value in kwargs.items()), handed)


def _modules_of(part: BlockPart) -> list[str]:
    """The modules of a part that must be called once; the one that reads the part's input comes first."""
    if isinstance(part, Lone):
        return [part.fqn]
    if isinstance(part, FeedForwardGroup):
        return [part.norm.fqn]
    norms = [part.norm] if part.norm is not None else []
    return [*norms, part.attention, *([part.projection.norm.fqn] if part.projection is not None else [])]


def _lone_of(part: BlockPart) -> list[str]:
    """The modules of a part that are called as they are."""
    if isinstance(part, Attended):
        return [] if part.norm is None else [part.norm]
    return [part.fqn] if isinstance(part, Lone) else []


def _handed_to(part: Attended, calls: dict[str, Seen], given: dict[int, Given], arguments: list[Any]) -> Handed | Reason:
    """The arguments of an attention besides its input: values, or arguments of the block."""
    args, kwargs = calls[part.attention].calls[0]
    normed = None if part.norm is None else calls[part.norm].first_result
    if not isinstance(calls[part.attention].first_result, Tensor):
        return Reason("call-form", "its attention gives more than one tensor")
    if not args or not isinstance(args[0], Tensor) or id(args[0]) in given or (normed is not None and args[0] is not normed):
        return Reason("call-form", "its attention's first argument is not its input or the normed input")
    for value in (*args[1:], *kwargs.values()):
        if not isinstance(value, (*_SWITCHES, *_NUMBERS, Tensor)):
            return Reason("call-form", f"its attention is called with a {type(value).__name__}")
        if isinstance(value, Tensor) and id(value) not in given:
            return Reason("call-form", "its attention takes a tensor that is not one of its own arguments")
        if not isinstance(value, (*_SWITCHES, Tensor)) and not any(_is_number(each) and each == value for each in arguments):
            return Reason("call-form", "its attention takes a number that is not one of its own arguments, and may be the input's size")
    return Handed(
        tuple(given.get(id(value), value) for value in args[1:]),
        tuple((name, given.get(id(value), value)) for name, value in kwargs.items()),
    )


def _is_number(value: Any) -> bool:
    """Whether it is a number or several, such as the size of a grid of tokens."""
    return all(isinstance(each, (bool, int, float)) for each in (value if isinstance(value, tuple) else (value,)))


def _kept(value: Any) -> Any:
    return Tensor if isinstance(value, Tensor) else value
