"""How blocks and their attentions are called, seen in one forward on fake tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from flysurgery.inference.found import Block
from flysurgery.inference.fused_block import Form, Given
from flysurgery.surgery import Reason
from flysurgery.walker import Survey, run_fake

_PLAIN = (bool, int, float, str, type(None))


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


def watch(seen: Survey) -> dict[str, Seen]:
    """Run the surveyed stand-in once on fake tensors, and note the calls of every module, by its first name."""
    found = {fqn: Seen() for fqn, _ in seen.double.named_modules()}
    handles = []
    for fqn, module in seen.double.named_modules():
        notes = found[fqn]
        handles.append(module.register_forward_pre_hook(_note_call(notes), with_kwargs=True))
        handles.append(module.register_forward_hook(_note_result(notes)))
    try:
        run_fake(seen.double, seen.example)
    finally:
        for handle in handles:
            handle.remove()
    return found


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
    """The form of the block's one call, or why it cannot be called by a fused block."""
    outer, norm, inner = calls[block.fqn], calls[block.norm.fqn], calls[block.attention]
    if len(outer.calls) != 1 or len(norm.calls) != 1 or len(inner.calls) != 1:
        return Reason("calls", "it is called more than once in one forward")
    (args, kwargs), (inner_args, inner_kwargs) = outer.calls[0], inner.calls[0]
    starts_with_x = bool(args) and norm.calls[0][0][:1] and norm.calls[0][0][0] is args[0]
    if not starts_with_x or not inner_args or inner_args[0] is not norm.results[0] or not isinstance(outer.results[0], Tensor):
        return Reason("call-form", "its first argument, and its attention's, are not its input and the normed input")
    given = {id(value): Given(index) for index, value in enumerate(args[1:]) if isinstance(value, Tensor)}
    given |= {id(value): Given(name) for name, value in kwargs.items() if isinstance(value, Tensor)}
    kept: list[Any] = []
    for value in (*args[1:], *kwargs.values(), *inner_args[1:], *inner_kwargs.values()):
        if not isinstance(value, (*_PLAIN, Tensor)):
            return Reason("call-form", f"it is called with a {type(value).__name__}")
    for value in (*inner_args[1:], *inner_kwargs.values()):
        if isinstance(value, Tensor) and id(value) not in given:
            return Reason("call-form", "its attention takes a tensor that is not one of its own arguments")
        kept.append(given[id(value)] if isinstance(value, Tensor) else value)
    count = len(inner_args) - 1
    return Form(
        tuple(Tensor if isinstance(value, Tensor) else value for value in args[1:]),
        tuple((name, Tensor if isinstance(value, Tensor) else value) for name, value in kwargs.items()),
        tuple(kept[:count]),
        tuple(zip(inner_kwargs, kept[count:], strict=True)),
    )
