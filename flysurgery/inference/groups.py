"""The groups found in a graph: operators that one kernel can compute together, by the names of their modules."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.fx import Node


@dataclass(frozen=True)
class NormModule:
    """A layer norm over the last dimension: the module that holds its weight and bias, if any, and its epsilon."""

    fqn: str
    eps: float


@dataclass(frozen=True)
class Held:
    """A parameter, and the module that holds it."""

    fqn: str
    leaf: str

    def of(self, model: nn.Module) -> tuple[nn.Module, str]:
        """The module in ``model``, and the parameter's name in it."""
        return model.get_submodule(self.fqn), self.leaf


class Scale(Held):
    """A layer scale: one entry a feature."""


@dataclass(frozen=True)
class Tail:
    """The operators behind a linear: a layer scale, if any, and the sum with a residual stream, if any; ``nodes`` includes idle ones."""

    scale: Scale | None
    residual: Node | None
    result: Node
    nodes: frozenset[Node]


@dataclass(frozen=True)
class ProjectionGroup:
    """[LN -> linear]: the norm and the one linear that reads it. ``source`` is what the norm reads, ``result`` the linear's node."""

    norm: NormModule
    norm_node: Node
    linear: str
    source: Node
    result: Node
    nodes: frozenset[Node]


@dataclass(frozen=True)
class FeedForwardGroup:
    """[LN -> linear -> activation -> linear], and the tail. ``branch`` is the node of the last linear.

    In a gated block, ``first`` has the linears of the gate and of the value, or one linear whose outputs are both in turn. ``gate``
    is then the index of the gate. ``inner`` is a norm between activation and last linear.
    """

    norm: NormModule
    norm_node: Node
    first: tuple[str, ...]
    gate: int | None
    activation: str
    inner: NormModule | None
    second: str
    source: Node
    branch: Node
    nodes: frozenset[Node]  # without the tail's
    tail: Tail


@dataclass(frozen=True)
class AttentionOut:
    """[linear after attention], and its tail."""

    linear: str
    branch: Node
    tail: Tail


@dataclass(frozen=True)
class Attended:
    """``x + scale*attention(norm(x))``: ``attention`` is the module whose last step is ``out``, ``norm`` the one that alone reads x.

    ``norm`` is None where ``attention`` reads x itself. ``projection`` is None where it is not one linear alone that reads a layer norm.
    """

    attention: str
    norm: str | None
    projection: ProjectionGroup | None
    out: AttentionOut


@dataclass(frozen=True)
class Lone:
    """A module without children that is called with x alone, such as a last norm."""

    fqn: str


BlockPart = Attended | FeedForwardGroup | Lone
"""One step of a block, from x to the next x; of a feed-forward group with its residual."""


@dataclass(frozen=True)
class Block:
    """A module that applies ``parts`` to its input, one after the other, and does nothing else. ``fqn`` is "" for the model itself."""

    fqn: str
    parts: tuple[BlockPart, ...]


@dataclass(frozen=True)
class LoneNorm:
    """A layer norm that belongs to no group of linears, and its node."""

    norm: NormModule
    node: Node


@dataclass(frozen=True)
class PatchesGroup:
    """A convolution whose stride is its kernel, a product of flattened patches and a matrix, and its node."""

    fqn: str
    node: Node


@dataclass(frozen=True)
class Embedding:
    """``method`` of a module behind its child ``patches``, which ``caller``, another method, calls one after the other.

    They are a convolution of images of the size ``image`` (channels, height, width), with a position added to its patches and tokens
    put before them, or one of the two. ``called`` are the modules that run. All names but ``fqn`` are those below the module.
    """

    fqn: str
    caller: str
    method: str
    patches: str
    convolution: str
    position: Held | None
    prefix: tuple[Held, ...]
    image: tuple[int, ...]
    called: tuple[str, ...]
