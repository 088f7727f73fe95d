"""Leave out the tokens that a forward never reads: behind the last attention, classifiers often read the first token alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node

from flysurgery.inference.find_groups import Findings
from flysurgery.inference.fused_modules import watched
from flysurgery.inference.graph import operators
from flysurgery.inference.match import Attended, FeedForwardGroup
from flysurgery.inference.standin import Condition, StandInMethod
from flysurgery.walker import Survey, name_of, shape_of

_SWITCHES = (bool, int, float, str, type(None))
_asked: ContextVar[tuple[FirstTokens, bool] | None] = ContextVar("asked", default=None)


class FirstTokens:
    """The first ``count`` tokens of each sample, and whether the forward that runs now reads no others."""

    def __init__(self, count: int) -> None:
        self.count = count

    def asked(self) -> bool:
        """Whether others may be left out. Gradient checkpointing computes again outside of the forward, so there none are."""
        checkpointed = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # pyright: ignore[reportAttributeAccessIssue]
        return _asked.get() == (self, torch.is_grad_enabled()) and not checkpointed and not watched()

    def of(self, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """These tokens of two values of shape (samples, tokens, features)."""
        return y[:, : self.count], x[:, : self.count]


class Reading(NamedTuple):
    """The block and the linear of the last attention, behind which ``readers``, by name, read the first ``number`` tokens alone."""

    block: str
    linear: str
    number: int
    readers: frozenset[str]


def last_reading(found: Findings, *, trains: bool) -> Reading | None:
    """The attention behind which only first tokens reach the model's result; None where others do, or no proven block has it.

    Behind it may stand feed-forward groups of its block and layer norms over features: they compute each token by itself. With ``trains``
    the forward must be the same in training mode.
    """
    for block in found.blocks.values():
        attended = [part for part in block.parts if isinstance(part, Attended)]
        if not attended or not block.fqn:
            continue
        groups = [part for part in block.parts if isinstance(part, FeedForwardGroup)]
        ends = _ends(attended[-1].out.tail.result, {node for group in groups for node in (*group.nodes, *group.tail.nodes)})
        if ends and not (trains and _differs_in_training(found.seen)):
            readers = {"", *(fqn for node in ends for fqn in found.around[node])}
            return Reading(block.fqn, attended[-1].out.linear, max(ends.values()) + 1, frozenset(readers))
    return None


def _ends(value: Node, grouped: set[Node]) -> dict[Node, int]:
    """The nodes that read one token each, through groups and norms, and its index; empty where others read the value too."""
    ends, front = dict[Node, int](), [value]
    while front:
        node = front.pop()
        shape = shape_of(node) or ()
        for user in node.users:
            token = user.args[2] if name_of(user) == "select" and user.args[1] == 1 else None
            if user in grouped or _is_norm(user):
                front.append(user)
            elif len(shape) == 3 and isinstance(token, int) and 0 <= token < shape[1]:
                ends[user] = token
            else:
                return {}
    return ends


def _differs_in_training(seen: Survey) -> bool:
    before = operators(seen)
    seen.double.train()
    try:
        return operators(seen) != before
    except Exception:  # the forward may raise anything
        return True
    finally:
        seen.double.eval()


def _is_norm(node: Node) -> bool:
    sizes = node.args[1] if name_of(node) == "layer_norm" else ()
    return isinstance(sizes, (list, tuple)) and len(sizes) == 1


class FirstTokensForward(StandInMethod):
    """The forward of a model in which ``tokens`` alone are computed behind the last attention, for calls with ``inputs`` positional ones.

    Other methods, such as ``forward_features``, and the modules themselves give all tokens. So does the forward where hooks would see
    that tokens are missing, and where a number, text or switch among the attributes of ``readers``, such as ``global_pool``, has changed.
    """

    def __init__(
        self, inner: nn.Module, condition: Condition, tokens: FirstTokens, inputs: int, module: nn.Module, readers: Sequence[nn.Module]
    ) -> None:
        super().__init__(module, "forward", inner, condition)
        self.tokens, self.inputs, self.readers = tokens, inputs, readers
        self._switches = self._present()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fits = len(args) == self.inputs and not kwargs and not torch.compiler.is_compiling()
        if not fits or not self.condition.holds() or self._switches != self._present():
            return self.run(self.module, *args, **kwargs)
        before = _asked.set((self.tokens, torch.is_grad_enabled()))
        try:
            return self.run(self.inner, *args)
        finally:
            _asked.reset(before)

    def _present(self) -> list[dict[str, object]]:
        named = [vars(reader).items() for reader in self.readers]
        return [{name: value for name, value in each if type(value) in _SWITCHES and name != "training"} for each in named]
