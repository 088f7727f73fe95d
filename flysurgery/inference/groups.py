"""The groups of operators that kernels compute together, and the blocks made of them, as they are found in a traced model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

Arguments = Mapping[int | str, Any]
"""The arguments of a call behind the first: positional ones by number, from 0, and named ones by name."""


@dataclass(frozen=True)
class NormModule:
    """A layer norm over the last dimension: the module that holds its weight and bias, if any, its epsilon, and its node."""

    fqn: str
    eps: float
    node: Node


@dataclass(frozen=True)
class Tail:
    """The operators behind a linear: a layer scale, if any, and the sum with a residual stream, if any.

    ``scale`` is the name of a parameter.
    """

    scale: str | None
    residual: Node | None
    result: Node
    nodes: frozenset[Node] = frozenset()


@dataclass(frozen=True)
class ProjectionGroup:
    """[LN -> linear]: the norm and the one linear that reads it. ``source`` is what the norm reads."""

    norm: NormModule
    linear: str
    source: Node
    nodes: frozenset[Node]


@dataclass(frozen=True)
class FeedForwardGroup:
    """[LN -> linear -> activation -> linear], and the tail; ``nodes`` are without the tail's.

    In a gated block, ``first`` has the linears of the gate and of the value, or one linear whose outputs are both in turn. ``gate``
    is then the index of the gate. ``inner`` is a norm between activation and last linear.
    """

    norm: NormModule
    first: tuple[str, ...]
    gate: int | None
    activation: str
    inner: NormModule | None
    second: str
    source: Node
    nodes: frozenset[Node]
    tail: Tail


@dataclass(frozen=True)
class AttentionOut:
    """[linear after attention], what it reads, its node, and its tail."""

    linear: str
    source: Node
    branch: Node
    tail: Tail


@dataclass(frozen=True)
class Attended:
    """``x + scale*attention(norm(x))``: ``attention`` is the module whose last step is ``out``, ``norm`` the one that alone reads x.

    ``norm`` is None where ``attention`` reads x itself. ``projection`` is None where it is not one linear alone that reads a layer norm.
    ``call`` is the call of scaled_dot_product_attention, None where a kernel cannot replace it.
    """

    attention: str
    norm: str | None
    projection: ProjectionGroup | None
    call: Node | None
    out: AttentionOut


@dataclass(frozen=True)
class Patches:
    """A convolution whose stride is its kernel's size, a product of flattened patches and a matrix; ``image`` is its input's shape."""

    fqn: str
    image: tuple[int, ...]


BlockPart = Attended | FeedForwardGroup | NormModule | Patches
"""One step of a block, from x to the next x."""


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


def _alike(seen: Any, value: Any) -> bool:
    return isinstance(value, Tensor) if seen is Tensor else value is seen or (type(value) is type(seen) and value == seen)


@dataclass(frozen=True)
class Block:
    """A module that applies ``parts`` to its input, one after the other, and does nothing else; and how it is called.

    ``fqn`` is "" for the model itself.
    """

    fqn: str
    parts: tuple[BlockPart, ...]
    form: Form
