"""Find the groups of a traced graph that kernels compute together, and the blocks made of them, by dataflow and not by names."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch.fx import Node

from flysurgery.inference.graph import UnfitError, half_of, is_norm, operand, sole_user, summands
from flysurgery.walker import Call, Survey, is_in_place, name_of, shape_of


@dataclass(frozen=True)
class NormModule:
    """A layer norm over the last dimension: the module that holds its weight and bias, if any, its epsilon, and its node."""

    fqn: str
    eps: float
    node: Node


@dataclass(frozen=True)
class Tail:
    """The operators behind a linear: a layer scale, if any, by its parameter's name, and the sum with a residual stream, if any."""

    scale: str | None
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


BlockPart = Attended | FeedForwardGroup | str
"""One step of a block, from x to the next x; of a feed-forward group with its residual. A name is that of a module without children that
is called with x alone, such as a last norm."""


def reader_of(part: BlockPart) -> str:
    """The module that reads the part's input."""
    if isinstance(part, str):
        return part
    return part.norm.fqn if isinstance(part, FeedForwardGroup) else part.norm or part.attention


class Matcher:
    """Reads one surveyed graph."""

    def __init__(self, seen: Survey) -> None:
        self.seen, self.roles = seen, seen.roles
        self.calls = {call.node: call for call in seen.calls}

    def projection(self, call: Call) -> ProjectionGroup:
        """[LN -> q, k, v], from the projection's linear."""
        node = call.source
        norm = self.norm(node)
        if list(node.users) != [call.node]:
            together = all(self.roles.get(user) == "qkv" for user in node.users)
            text = "q, k and v are modules of their own" if together else "its norm's result is used by something else as well"
            raise UnfitError("norm-shared", text)
        _check_plain(call)
        return ProjectionGroup(norm, call.fqn, operand(node), frozenset({node, call.node}))

    def attention_out(self, call: Call) -> AttentionOut:
        """[attention output projection -> layer scale -> residual], from the linear."""
        _check_plain(call)
        return AttentionOut(call.fqn, call.source, call.node, self._tail(call.node))

    def feed_forward(self, call: Call) -> FeedForwardGroup:
        """[LN -> FFN -> layer scale -> residual], from the last linear."""
        hidden, inner, nodes = call.source, None, [call.node]
        if name_of(hidden) == "layer_norm":
            inner = self.norm(hidden)
            nodes.append(hidden)
            hidden = operand(hidden)
        first, gate, activation, between = self._gated(hidden) if name_of(hidden) == "mul" else self._activated(hidden)
        if not all(map(_is_plain, (*first, call))):
            raise _no_linear()
        norm_node = first[0].source
        norm = self.norm(norm_node)
        nodes += [*between, *(each.node for each in first), norm_node]
        for node in nodes[1:]:
            if not {*node.users} <= {*nodes}:
                raise UnfitError("shared", f"the result of its {name_of(node)} is used by something else as well")
        names, source = tuple(each.fqn for each in first), operand(norm_node)
        return FeedForwardGroup(norm, names, gate, activation, inner, call.fqn, source, frozenset(nodes), self._tail(call.node))

    def norm(self, node: Node) -> NormModule:
        """The layer norm that a node is: over the last dimension, in a module that holds its weight and bias under these names."""
        if name_of(node) != "layer_norm" or not isinstance(node.args[0], Node):
            raise UnfitError("no-norm", f"it does not read a layer norm's result, but that of {name_of(node) or 'the input'}")
        given = dict(zip(("weight", "bias", "eps"), node.args[2:], strict=False))
        fqn, eps = self.seen.owners.innermost(node), given.pop("eps", 1e-5)
        held = {leaf: self.seen.trace.parameters.get(each) for leaf, each in given.items() if isinstance(each, Node)}
        if not fqn or not is_norm(node) or any(name != f"{fqn}.{leaf}" for leaf, name in held.items()):
            raise UnfitError("norm-form", "its layer norm is not a module's over the last dimension, with weight and bias of its own")
        return NormModule(fqn, float(eps), node)  # pyright: ignore[reportArgumentType]  aten gives a number here

    def _tail(self, node: Node) -> Tail:
        """The layer scale and the sum that are the only users of a linear's result."""
        nodes, last, user = list[Node](), node, sole_user(node)
        scale = None if user is None else self._scale(last, user)
        if user is not None and scale is not None:
            nodes.append(user)
            last, user = user, sole_user(user)
        others = [] if user is None else [each for each in summands(user) if each is not last]
        if user is None or len(others) != 1:  # none, also in the sum of a value with itself
            return Tail(scale, None, last, frozenset(nodes))
        return Tail(scale, others[0], user, frozenset((*nodes, user)))

    def _scale(self, node: Node, user: Node) -> str | None:
        """The layer scale by which ``user`` multiplies ``node``."""
        if name_of(user) != "mul" or len(user.args) != 2:
            return None
        other = next((arg for arg in user.args if isinstance(arg, Node) and arg is not node), None)
        shape = shape_of(node)
        if other is None or shape is None or shape_of(other) != shape[-1:]:
            return None
        return self.seen.trace.parameters.get(other)

    def _activated(self, node: Node) -> tuple[tuple[Call, ...], int | None, str, tuple[Node, ...]]:
        """How one linear and an activation make the hidden units: ``first``, ``gate`` and ``activation`` of a group, and nodes between."""
        kind = _activation(node)
        if kind is None:
            raise UnfitError("activation", f"its activation ends in the operator {name_of(node)}; kernels know gelu and silu")
        first = self.calls.get(operand(node))
        if first is None:
            raise _no_linear()
        return (first,), None, kind, (node,)

    def _gated(self, node: Node) -> tuple[tuple[Call, ...], int | None, str, tuple[Node, ...]]:
        """The same of an activated gate and a value, of two linears or of the halves of one."""
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
        gate, value = operand(activated), factors[1] if factors[0] is activated else factors[0]
        by_gate, by_value = self.calls.get(gate), self.calls.get(value)
        if by_gate is not None and by_value is not None:
            if by_gate is by_value or by_gate.source is not by_value.source:
                raise other
            return (by_gate, by_value), 0, kind, (node, activated)
        one, another = half_of(gate), half_of(value)
        if one is None or another is None or one[0] is not another[0] or one[1] == another[1]:
            raise other
        whole, place, split = one
        if whole not in self.calls:
            raise other
        return (self.calls[whole],), place, kind, (node, activated, gate, value, split, another[2])


def _no_linear() -> UnfitError:
    return UnfitError("no-linear", "before its activation stands no linear module that its parent calls")


def _activation(node: Node) -> str | None:
    name = name_of(node)
    if name == "gelu" and node.kwargs.get("approximate") == "tanh":
        return "gelu_tanh"
    return name if name in ("gelu", "silu") else None


def _is_plain(call: Call) -> bool:
    return call.kind == "linear" and call.inside


def _check_plain(call: Call) -> None:
    if not _is_plain(call):
        raise UnfitError("weight-read", "the weight is not used by a linear module that its parent calls")


class BlockMatcher:
    """Proves by the graph that the module ``fqn`` is a block, which applies parts to its input, one after the other, and nothing else.

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
        self.seen, self.projections = seen, projections
        self.name = f"the block {fqn}" if fqn else "the model itself"
        self.sums = {group.tail.result: group for group in groups}
        self.inside = {node: names[names.index(fqn) + 1 :] for node, names in around.items() if fqn in names}

    def match(self) -> tuple[BlockPart, ...]:
        """The parts, followed from the block's result back to its input. Every operator of its forward must belong to one."""
        ends = _leaving({*self.inside})
        if len(ends) != 1:
            raise UnfitError("exits", f"values inside of {self.name} are used in other places as well")
        value, parts, covered = ends.pop(), list[BlockPart](), set[Node]()
        while value in self.inside:
            part, nodes, value = self._part(value)
            parts.insert(0, part)
            covered |= nodes
        more = next((node for node in self.inside if node not in covered and node.users), None)
        if more is not None:
            raise self._more(more)
        return tuple(parts)

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
        return lone

    def _attended(self, out: AttentionOut) -> tuple[BlockPart, set[Node], Node]:
        x, attention = out.tail.residual, self._child(out.branch)
        assert x is not None  # it is among the sums
        if attention is None or not out.linear.startswith(f"{attention}."):
            raise UnfitError("no-module", f"attention is not a module of its own inside of {self.name}")
        nodes = self._nodes_in(attention)
        if _leaving(nodes) != {out.branch}:
            raise UnfitError("exits", f"values inside of {attention}, besides its output projection's, are used in other places as well")
        read, norm = self._read_by(nodes), None
        if x not in read:
            lones = [lone for each in read if (lone := self._lone(each)) is not None and lone[2] is x]
            if not lones:
                raise UnfitError("no-residual", "its result is not added to what attention reads, as it is or through a norm")
            norm, of_norm, _ = lones[0]
            nodes |= of_norm
        projection = next((each for each in self.projections if each.source is x and each.nodes <= nodes), None)
        named = [] if projection is None else [projection.linear, *([projection.norm.fqn] if norm is None else [])]
        if not all(fqn.startswith(f"{attention}.") for fqn in named):  # they have other names elsewhere, so other modules may use them
            projection = None
        return Attended(attention, norm, projection, out), nodes | out.tail.nodes, x

    def _lone(self, value: Node) -> tuple[str, set[Node], Node] | None:
        """The module without children that alone computes ``value`` from one other value: its name, its nodes, and that other value."""
        name = self._child(value)
        if name is None or any(self.seen.owners.modules[name].children()):
            return None
        nodes = self._nodes_in(name)
        read = self._read_by(nodes)
        return (name, nodes, read.pop()) if len(read) == 1 and _leaving(nodes) == {value} else None

    def _child(self, node: Node) -> str | None:
        """The module, called by the block itself, in whose forward the node ran."""
        return next(iter(self.inside.get(node, ())), None)

    def _nodes_in(self, fqn: str) -> set[Node]:
        return {node for node, around in self.inside.items() if fqn in around}

    def _read_by(self, nodes: set[Node]) -> set[Node]:
        """The values from elsewhere that ``nodes`` use, without weights and constants."""
        read = {each for node in nodes for each in node.all_input_nodes if each not in nodes}
        return {each for each in read if each in self.seen.trace.inputs or each.op not in ("placeholder", "get_attr")}

    def _more(self, node: Node) -> UnfitError:
        return UnfitError("more", f"{self.name} also computes {name_of(node) or node.name}")


def _leaving(nodes: set[Node]) -> set[Node]:
    """The values of ``nodes`` that others use."""
    return {node for node in nodes if any(user not in nodes for user in node.users)}
