"""What was found in a graph: groups of operators that one kernel can do together, by the names of their modules."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.fx import Node


@dataclass(frozen=True)
class Norm:
    """A layer norm over the last dimension: the module that holds its weight and bias, if any, and what it adds to the variance."""

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
    """What follows a linear: a layer scale, if any, and the sum with a residual stream, if any; ``nodes`` includes the idle ones."""

    scale: Scale | None
    residual: Node | None
    result: Node
    nodes: frozenset[Node]


@dataclass(frozen=True)
class Projection:
    """[LN -> linear]: the norm and the one linear that reads it. ``source`` is what the norm reads, ``result`` the linear's node."""

    norm: Norm
    norm_node: Node
    linear: str
    source: Node
    result: Node
    nodes: frozenset[Node]


@dataclass(frozen=True)
class FeedForward:
    """[LN -> linear -> activation -> linear], and the tail. ``branch`` is the node of the last linear.

    Gated, ``first`` are the linears of the gate and of the value, or one linear whose outputs are both, one after the other; ``gate``
    is then the index of the gate among them. ``inner`` is a norm between activation and last linear.
    """

    norm: Norm
    norm_node: Node
    first: tuple[str, ...]
    gate: int | None
    activation: str
    inner: Norm | None
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
    projection: Projection | None
    out: AttentionOut


@dataclass(frozen=True)
class Lone:
    """A module without children that is called with x alone, such as a last norm."""

    fqn: str


Part = Attended | FeedForward | Lone
"""One step of a block, from x to the next x; of a feed-forward group with its residual."""


@dataclass(frozen=True)
class Block:
    """A module that puts its input through ``parts``, one after the other, and does nothing else. ``fqn`` is "" for the model itself."""

    fqn: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class LoneNorm:
    """A layer norm that no group of linears takes in, and its node."""

    norm: Norm
    node: Node


@dataclass(frozen=True)
class Patches:
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
