"""Leave out the tokens that a forward never reads: behind the last attention, classifiers often read the first token alone."""

import inspect
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from flysurgery.inference.clock import rehearsed
from flysurgery.inference.find_groups import Findings
from flysurgery.inference.fused_modules import watched
from flysurgery.inference.graph import is_norm, operators
from flysurgery.inference.match import Attended, FeedForwardGroup
from flysurgery.inference.standin import Condition, StandInMethod
from flysurgery.walker import Survey, name_of, shape_of


class FirstTokens:
    """The first ``count`` tokens of each sample, which alone the model reads behind ``linear``, that of its last attention in ``block``."""

    def __init__(self, block: str, linear: str, count: int) -> None:
        self.block, self.linear, self.count = block, linear, count

    def asked(self) -> bool:
        """Whether the forward that runs now reads no others, so that they may be left out.

        Gradient checkpointing computes again outside of the forward, so there none are.
        """
        checkpointed = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # pyright: ignore[reportAttributeAccessIssue]
        return _asked.get() == (self, torch.is_grad_enabled()) and not checkpointed and not watched()


_asked: ContextVar[tuple[FirstTokens, bool] | None] = ContextVar("asked", default=None)


def last_reading(found: Findings, *, trains: bool) -> FirstTokens | None:
    """The first tokens that alone reach the model's result from its last attention; None where others do, or no proven block has it.

    Behind it may stand feed-forward groups of its block and layer norms over features: they compute each token by itself. The forward must
    run the same operators with the first tokens alone, store none of its values, and with ``trains`` be the same in training mode.
    """
    for block, parts in found.blocks.items():
        attended = [part for part in parts if isinstance(part, Attended)]
        if not attended or not block:
            continue
        out, groups = attended[-1].out, [part for part in parts if isinstance(part, FeedForwardGroup)]
        count = _count_read(out.tail.result, {node for group in groups for node in (*group.nodes, *group.tail.nodes)})
        if count:
            tokens = FirstTokens(block, out.linear, count)
            return tokens if _suffices(found.seen, tokens, trains) else None
    return None


def _count_read(value: Node, grouped: set[Node]) -> int:
    """How many first tokens are read of a value, through groups and norms; 0 where others may be read too."""
    count, front = 0, [value]
    while front:
        node = front.pop()
        shape = shape_of(node) or ()
        for user in node.users:
            token = user.args[2] if name_of(user) == "select" and user.args[1] == 1 else None
            if user in grouped or is_norm(user):
                front.append(user)
            elif len(shape) == 3 and isinstance(token, int) and 0 <= token < shape[1]:
                count = max(count, token + 1)
            else:
                return 0
    return count


def _suffices(seen: Survey, tokens: FirstTokens, trains: bool) -> bool:
    """Whether a forward in which the block gives the first tokens alone is the same but for shapes: Python code may read these too."""
    if not all(isinstance(each, Tensor) for each in seen.example):
        return False
    block, kept = seen.double.get_submodule(tokens.block), list[object]()
    # In training mode a forward may write to buffers, and casts are those of autocast without a cache.
    with rehearsed(seen.double) if trains else nullcontext():
        whole = operators(seen, kept)
        hook = block.register_forward_hook(lambda module, args, result: result[:, : tokens.count])
        try:
            if kept or _without_shapes(operators(seen)) != _without_shapes(whole):
                return False
            hook.remove()
            if not trains:
                return True
            seen.double.train()
            return operators(seen) == whole
        except Exception:  # the forward may raise anything
            return False
        finally:
            hook.remove()
            seen.double.eval()


def _without_shapes(notes: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
    return [tuple(each for each in note if not isinstance(each, tuple)) for note in notes if note[0] != "aten.slice.Tensor"]


class Unchanged(Condition):
    """Also whether ``readers`` have the classes, children and attributes that they had then. An attribute's own contents may change."""

    def __init__(self, covered: Iterable[nn.Module], readers: Sequence[nn.Module], *, itself: nn.Module, trains: bool) -> None:
        super().__init__(covered, readers, itself=itself, trains=trains)
        self._readers = readers

    def _find_places(self) -> None:
        super()._find_places()
        others = {*vars(nn.Module())}  # attributes of every module, such as its hooks and children, which are looked at already
        self._looked_at += [(each, None, name) for each in self._readers for name in vars(each) if name not in others]

    def holds(self) -> bool:
        try:
            return super().holds()
        except (RuntimeError, ValueError):  # another tensor or array, of which some numbers are equal
            return False

    def _current(self) -> list[Any]:
        counts = [(type(each), len(vars(each)), len(each._modules)) for each in self._readers]
        return [*super()._current(), *counts]


class FirstTokensForward(StandInMethod):
    """The forward of a model in which ``tokens`` alone are computed behind the last attention, for tensors of ``shapes`` in a batch.

    Other methods, such as ``forward_features``, and the modules themselves give all tokens. So does the forward where hooks would see
    that tokens are missing, where images have another size, and where an attribute such as ``global_pool`` has changed.
    """

    def __init__(self, module: nn.Module, condition: Condition, tokens: FirstTokens, shapes: list[torch.Size]) -> None:
        super().__init__(module, "forward", module, condition)
        self.tokens, self._shapes = tokens, shapes
        self.__signature__ = inspect.signature(type(module).forward.__get__(module))

    @property
    def __code__(self) -> CodeType:
        """That of the model's own forward, for the exporter."""
        return type(self.module).forward.__code__

    def on(self, holder: nn.Module) -> StandInMethod:
        return FirstTokensForward(holder, self.condition, self.tokens, self._shapes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self.module).forward
        fits = not kwargs and [each.shape[1:] if isinstance(each, Tensor) and each.dim() else None for each in args] == self._shapes
        if not fits or torch.compiler.is_compiling() or not self.condition.holds():
            return forward(self.module, *args, **kwargs)
        before = _asked.set((self.tokens, torch.is_grad_enabled()))
        try:
            return forward(self.module, *args)
        finally:
            _asked.reset(before)
