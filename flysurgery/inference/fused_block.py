"""A whole transformer block out of fused modules and its own attention."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from flysurgery.inference.attending import Attending
from flysurgery.inference.standing import Condition, StandIn
from flysurgery.inference.steps import Step


@dataclass(frozen=True)
class Given:
    """An argument of the attention that is one of the block's: by its position behind the first, or by its name."""

    key: int | str


@dataclass(frozen=True)
class Form:
    """How a block is called behind its first argument, and what it hands on to its attention.

    ``positional`` and ``named`` hold the values seen, or ``Tensor`` where a tensor came; ``attention_positional`` and
    ``attention_named`` a ``Given`` or a value.
    """

    positional: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()
    attention_positional: tuple[Any, ...] = ()
    attention_named: tuple[tuple[str, Any], ...] = ()

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is of this form."""
        if len(args) != len(self.positional) or len(kwargs) != len(self.named):
            return False
        if not all(_alike(seen, value) for seen, value in zip(self.positional, args, strict=True)):
            return False
        return all(name in kwargs and _alike(seen, kwargs[name]) for name, seen in self.named)

    def handed_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The attention's arguments behind its first."""

        def value(each: Any) -> Any:
            if not isinstance(each, Given):
                return each
            return args[each.key] if isinstance(each.key, int) else kwargs[each.key]

        return [value(each) for each in self.attention_positional], {name: value(each) for name, each in self.attention_named}


class FusedBlock(StandIn):
    """``x = x + scale*attention(norm(x)); x = x + scale*ffn(norm(x))`` by fused modules.

    ``attention`` is a view of the block's own attention module that leaves out the output projection, and does the norm before it
    itself where ``norm`` is None; ``attending`` does what it asks of PyTorch's attention. Calls of another form than the one that was
    proven, in training mode, or with hooks inside go to the original block.
    """

    def __init__(
        self,
        original: nn.Module,
        norm: nn.Module | None,
        attention: nn.Module,
        attending: Attending | None,
        out: Step,
        feed_forward: Step,
        form: Form,
        condition: Condition,
    ) -> None:
        super().__init__(original)
        self.form, self.condition = form, condition
        self._steps = (norm, attention, attending, out, feed_forward)  # in a tuple, so that they are no children

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.condition.obstacle() is not None or not self.form.fits(args, kwargs):
            return self.original.forward(x, *args, **kwargs)
        norm, attention, attending, out, feed_forward = self._steps
        positional, named = self.form.handed_on(args, kwargs)
        with attending or nullcontext():
            attended = attention(x if norm is None else norm(x), *positional, **named)
        return feed_forward(out(attended, x))


def _alike(seen: Any, value: Any) -> bool:
    return isinstance(value, Tensor) if seen is Tensor else value is seen or (type(value) is type(seen) and value == seen)
