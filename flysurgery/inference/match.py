"""Find the groups of a traced graph that kernels compute together, and the blocks made of them, by dataflow and not by names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn
from torch.fx import Node

from flysurgery.inference.fused_modules import Parameter
from flysurgery.inference.graph import UnfitError, half_of, sole_user, summands
from flysurgery.walker import Call, Survey, is_in_place, name_of, shape_of


@dataclass(frozen=True)
class NormModule:
    """A layer norm over the last dimension: the module that holds its weight and bias, if any, its epsilon, and its node."""

    fqn: str
    eps: float
    node: Node


@dataclass(frozen=True)
class Held:
    """A parameter, by the module that holds it and its name there."""

    fqn: str
    leaf: str

    def of(self, model: nn.Module) -> Parameter:
        """The parameter in ``model``."""
        return Parameter(model.get_submodule(self.fqn), self.leaf)


def held_of(seen: Survey, node: Node) -> Held | None:
    """The parameter that a node is; None for any other value."""
    name = seen.trace.parameters.get(node)
    if name is None:
        return None
    fqn, _, leaf = name.rpartition(".")
    return Held(fqn, leaf)


@dataclass(frozen=True)
class Tail:
    """The operators behind a linear: a layer scale, if any, and the sum with a residual stream, if any."""

    scale: Held | None
    residual: Node | None
    result: Node
    nodes: frozenset[Node]


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

    @property
    def reader(self) -> str:
        """The module that reads the part's input."""
        return self.norm.fqn


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
    """

    attention: str
    norm: str | None
    projection: ProjectionGroup | None
    out: AttentionOut

    @property
    def reader(self) -> str:
        """The module that reads the part's input."""
        return self.norm or self.attention


@dataclass(frozen=True)
class Lone:
    """A module without children that is called with x alone, such as a last norm."""

    fqn: str

    @property
    def reader(self) -> str:
        """The module that reads the part's input."""
        return self.fqn


BlockPart = Attended | FeedForwardGroup | Lone
"""One step of a block, from x to the next x; of a feed-forward group with its residual."""


@dataclass(frozen=True)
class Block:
    """A module that applies ``parts`` to its input, one after the other, and does nothing else. ``fqn`` is "" for the model itself."""

    fqn: str
    parts: tuple[BlockPart, ...]


@dataclass(frozen=True)
class _Hidden:
    """How linears give the hidden units, as in ``FeedForwardGroup``, and the nodes in between."""

    first: tuple[Call, ...]
    gate: int | None
    activation: str
    nodes: tuple[Node, ...]


class Matcher:
    """Reads one surveyed graph."""

    def __init__(self, seen: Survey) -> None:
        self.seen = seen
        self.calls = {call.node: call for call in seen.calls}
        self.roles = seen.roles

    def of_role(self, role: str) -> list[Call]:
        """The linears of a role, in the order of execution."""
        return [call for call in self.seen.calls if self.roles[call.node] == role]

    def projection(self, call: Call) -> ProjectionGroup:
        """[LN -> q, k, v], from the projection's linear."""
        node = call.source
        norm = self.norm(node)
        if list(node.users) != [call.node]:
            together = all(self.roles.get(user) == "qkv" for user in node.users)
            text = "q, k and v are modules of their own" if together else "its norm's result is used by something else as well"
            raise UnfitError("norm-shared", text)
        if not _is_plain(call):
            raise UnfitError("weight-read", "the weight is not used by a linear module that its parent calls")
        return ProjectionGroup(norm, call.fqn, _operand(node), frozenset({node, call.node}))

    def feed_forward(self, call: Call) -> FeedForwardGroup:
        """[LN -> FFN -> layer scale -> residual], from the last linear."""
        hidden, inner = call.source, None
        nodes = [call.node]
        if name_of(hidden) == "layer_norm":
            inner = self.norm(hidden)
            nodes.append(hidden)
            hidden = _operand(hidden)
        gated = self._gated(hidden) if name_of(hidden) == "mul" else self._activated(hidden)
        if not all(_is_plain(each) for each in (*gated.first, call)):
            raise UnfitError("no-linear", "before its activation stands no linear module that its parent calls")
        norm_node = gated.first[0].source
        norm = self.norm(norm_node)
        nodes += [*gated.nodes, *(each.node for each in gated.first), norm_node]
        for node in nodes[1:]:
            if not {*node.users} <= {*nodes}:
                raise UnfitError("shared", f"the result of its {name_of(node)} is used by something else as well")
        first = tuple(each.fqn for each in gated.first)
        source, tail = _operand(norm_node), self.tail(call.node)
        return FeedForwardGroup(norm, first, gated.gate, gated.activation, inner, call.fqn, source, frozenset(nodes), tail)

    def attention_out(self, call: Call) -> AttentionOut:
        """[attention output projection -> layer scale -> residual], from the linear."""
        if not _is_plain(call):
            raise UnfitError("weight-read", "the weight is not used by a linear module that its parent calls")
        return AttentionOut(call.fqn, call.source, call.node, self.tail(call.node))

    def norm(self, node: Node) -> NormModule:
        """The layer norm that a node is: over the last dimension, in a module that holds its weight and bias under these names."""
        if name_of(node) != "layer_norm" or not isinstance(node.args[0], Node):
            raise UnfitError("no-norm", f"it does not read a layer norm's result, but that of {name_of(node) or 'the input'}")
        sizes, weight, bias, eps = (*node.args[1:], None, None, 1e-5)[:4] if len(node.args) < 5 else node.args[1:5]
        fqn = self.seen.owners.innermost(node)
        names = [self.seen.trace.parameters.get(each) if isinstance(each, Node) else None for each in (weight, bias)]
        expected = [f"{fqn}.{leaf}" if each is not None else None for leaf, each in (("weight", weight), ("bias", bias))]
        if not fqn or names != expected or not isinstance(sizes, (list, tuple)) or len(sizes) != 1:
            raise UnfitError("norm-form", "its layer norm is not a module's over the last dimension, with weight and bias of its own")
        return NormModule(fqn, float(eps), node)  # pyright: ignore[reportArgumentType]  aten gives a number here

    def tail(self, node: Node) -> Tail:
        """The layer scale and the sum that are the only users of a linear's result."""
        nodes, scale, last = set[Node](), None, node
        user = sole_user(last)
        if user is not None and (found := self._scale(last, user)) is not None:
            nodes.add(user)
            scale, last = found, user
            user = sole_user(last)
        added = summands(user) if user is not None else None
        if user is None or added is None:
            return Tail(scale, None, last, frozenset(nodes))
        left, right = added
        residual = right if left is last else left
        if residual is last:  # the sum of a value with itself
            return Tail(scale, None, last, frozenset(nodes))
        return Tail(scale, residual, user, frozenset((*nodes, user)))

    def _scale(self, node: Node, user: Node) -> Held | None:
        """The layer scale by which ``user`` multiplies ``node``."""
        if name_of(user) != "mul" or len(user.args) != 2:
            return None
        other = next((arg for arg in user.args if isinstance(arg, Node) and arg is not node), None)
        shape = shape_of(node)
        return held_of(self.seen, other) if other is not None and shape is not None and shape_of(other) == shape[-1:] else None

    def _activated(self, node: Node) -> _Hidden:
        """The hidden units made by one linear and an activation."""
        kind = _activation(node)
        if kind is None:
            raise UnfitError("activation", f"its activation ends in the operator {name_of(node)}; kernels know gelu and silu")
        first = self.calls.get(_operand(node))
        if first is None:
            raise UnfitError("no-linear", "before its activation stands no linear module that its parent calls")
        return _Hidden((first,), None, kind, (node,))

    def _gated(self, node: Node) -> _Hidden:
        """The hidden units made by an activated gate and a value, of two linears or of the halves of one."""
        other = UnfitError(
            "gated", "its hidden units are a product, but not of gate and value from two linears of one input or the halves of one"
        )
        factors = [each for each in node.args if isinstance(each, Node)]
        active = [(each, kind) for each in factors if (kind := _activation(each)) is not None]
        if not active:
            raise UnfitError("activation", "its hidden units are a product without gelu or silu, as QuickGELU is; kernels know these two")
        if len(factors) != 2 or len(active) != 1 or is_in_place(node) or shape_of(factors[0]) != shape_of(factors[1]):
            raise other
        [(activated, kind)] = active
        gate, value = _operand(activated), factors[1] if factors[0] is activated else factors[0]
        by_gate, by_value = self.calls.get(gate), self.calls.get(value)
        if by_gate is not None and by_value is not None:
            if by_gate is by_value or by_gate.source is not by_value.source:
                raise other
            return _Hidden((by_gate, by_value), 0, kind, (node, activated))
        one, another = half_of(gate), half_of(value)
        if one is None or another is None or one.whole is not another.whole or one.place == another.place:
            raise other
        first = self.calls.get(one.whole)
        if first is None:
            raise other
        return _Hidden((first,), one.place, kind, (node, activated, gate, value, one.split, another.split))


class BlockMatcher:
    """Proves by the graph that the module ``fqn`` is a block.

    ``groups`` are those whose residual sums its own forward computes; ``around`` has the modules in whose forward each node ran.
    """

    def __init__(
        self,
        seen: Survey,
        around: Mapping[Node, tuple[str, ...]],
        fqn: str,
        groups: Iterable[AttentionOut | FeedForwardGroup],
        projections: Iterable[ProjectionGroup],
    ) -> None:
        self.seen, self.fqn, self.projections = seen, fqn, tuple(projections)
        self.sums = {group.tail.result: group for group in groups}
        self.inside = {node: names[names.index(fqn) + 1 :] for node, names in around.items() if fqn in names}

    def match(self) -> Block:
        """The block, followed from its result back to its input. Every operator of its forward must belong to a part."""
        ends = self._leaving({*self.inside})
        if len(ends) != 1:
            raise UnfitError("exits", f"values inside of {self._name} are used in other places as well")
        value, parts, covered = ends.pop(), list[BlockPart](), set[Node]()
        while value in self.inside:
            part, nodes, value = self._part(value)
            parts.insert(0, part)
            covered |= nodes
        more = next((node for node in self.inside if node not in covered and node.users), None)
        if more is not None:
            raise self._more(more)
        return Block(self.fqn, tuple(parts))

    def _part(self, value: Node) -> tuple[BlockPart, set[Node], Node]:
        """The part that gives ``value``, its nodes, and the value that it reads."""
        group = self.sums.get(value)
        if isinstance(group, FeedForwardGroup):
            return group, {*group.nodes, *group.tail.nodes}, group.source
        if group is not None:
            return self._attended(group)
        lone = self._lone(value)
        if lone is None:
            raise self._more(value)
        return Lone(lone[0]), lone[1], lone[2]

    def _attended(self, out: AttentionOut) -> tuple[BlockPart, set[Node], Node]:
        x, attention = out.tail.residual, self._child(out.branch)
        assert x is not None  # it is among the sums
        if attention is None or not out.linear.startswith(f"{attention}."):
            raise UnfitError("no-module", f"attention is not a module of its own inside of {self._name}")
        nodes = self._nodes_in(attention)
        if self._leaving(nodes) != {out.branch}:
            raise UnfitError("exits", f"values inside of {attention}, besides its output projection's, are used in other places as well")
        read = self._read_by(nodes)
        norm, normed = None, nodes
        if x not in read:
            found = next((lone for each in read if (lone := self._lone(each)) is not None and lone[2] is x), None)
            if found is None:
                raise UnfitError("no-residual", "its result is not added to what attention reads, as it is or through a norm")
            norm, normed = found[0], nodes | found[1]
        projection = next((each for each in self.projections if each.source is x and each.nodes <= normed), None)
        named = [] if projection is None else [projection.linear, *([projection.norm.fqn] if norm is None else [])]
        if not all(fqn.startswith(f"{attention}.") for fqn in named):  # they have other names elsewhere, so other modules may use them
            projection = None
        return Attended(attention, norm, projection, out), normed | out.tail.nodes, x

    def _lone(self, value: Node) -> tuple[str, set[Node], Node] | None:
        """The module without children that alone computes ``value`` from one other value: its name, its nodes, and that other value."""
        name = self._child(value)
        if name is None or any(self.seen.owners.modules[name].children()):
            return None
        nodes = self._nodes_in(name)
        read = self._read_by(nodes)
        return (name, nodes, read.pop()) if len(read) == 1 and self._leaving(nodes) == {value} else None

    def _child(self, node: Node) -> str | None:
        """The module, called by the block itself, in whose forward the node ran."""
        return next(iter(self.inside.get(node, ())), None)

    def _nodes_in(self, fqn: str) -> set[Node]:
        return {node for node, around in self.inside.items() if fqn in around}

    def _read_by(self, nodes: set[Node]) -> set[Node]:
        """The values from elsewhere that ``nodes`` use, without weights and constants."""
        read = {each for node in nodes for each in node.all_input_nodes if each not in nodes}
        return {each for each in read if each in self.seen.trace.inputs or each.op not in ("placeholder", "get_attr")}

    def _leaving(self, nodes: set[Node]) -> set[Node]:
        """The values of ``nodes`` that others use."""
        return {node for node in nodes if any(user not in nodes for user in node.users)}

    def _more(self, node: Node) -> UnfitError:
        return UnfitError("more", f"{self._name} also computes {name_of(node) or node.name}")

    @property
    def _name(self) -> str:
        return f"the block {self.fqn}" if self.fqn else "the model itself"


def _operand(node: Node) -> Node:
    """The operand of a node that has one."""
    operand = node.args[0]
    assert isinstance(operand, Node)  # operators of one tensor have it as their first argument
    return operand


def _activation(node: Node) -> str | None:
    name = name_of(node)
    if name == "gelu" and node.kwargs.get("approximate") == "tanh":
        return "gelu_tanh"
    return name if name in ("gelu", "silu") else None


def _is_plain(call: Call) -> bool:
    return call.kind == "linear" and call.inside
