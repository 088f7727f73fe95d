"""Prove by dataflow, and not by names, which operators of a traced graph are a group, and which modules are blocks made of groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch.fx import Node

from flysurgery.inference.call_form import form_of
from flysurgery.inference.graph import (
    Calls,
    UnfitError,
    attempt,
    attention_among,
    is_idle,
    origin,
    sole_user,
    summands,
    users,
)
from flysurgery.inference.groups import (
    Attended,
    AttentionOut,
    Block,
    BlockPart,
    FeedForwardGroup,
    NormModule,
    ProjectionGroup,
    Tail,
)
from flysurgery.surgery import Reason
from flysurgery.walker import Call, Survey, is_in_place, name_of, shape_of

_ACTIVATIONS = {"gelu": "gelu", "silu": "silu"}
_SPLITS = frozenset(("chunk", "split"))


class _Hidden(NamedTuple):
    """How linears give the hidden units, as in ``FeedForwardGroup``, and the nodes in between."""

    first: tuple[Call, ...]
    gate: int | None
    activation: str
    nodes: tuple[Node, ...]


class _Units(NamedTuple):
    """Outputs of a linear: all, or the first or second half (0 or 1), and the nodes that divide them."""

    call: Call
    half: int | None
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
        node = origin(call.source)
        norm = self.norm(node)
        if users(node) != [call.node]:
            together = all(self.roles.get(user) == "qkv" for user in users(node))
            text = "q, k and v are modules of their own" if together else "its norm's result is used by something else as well"
            raise UnfitError("norm-shared", text)
        if not _is_plain(call):
            raise UnfitError("weight-read", "the weight is not used by a linear module that its parent calls")
        return ProjectionGroup(norm, call.fqn, _operand(node), frozenset({node, call.node}))

    def feed_forward(self, call: Call) -> FeedForwardGroup:
        """[LN -> FFN -> layer scale -> residual], from the last linear."""
        hidden, inner = origin(call.source), None
        nodes = [call.node]
        if name_of(hidden) == "layer_norm":
            inner = self.norm(hidden)
            nodes.append(hidden)
            hidden = _operand(hidden)
        gated = self._hidden(hidden)
        if not all(_is_plain(each) for each in (*gated.first, call)):
            raise UnfitError("no-linear", "before its activation stands no linear module that its parent calls")
        norm_node = origin(gated.first[0].source)
        norm = self.norm(norm_node)
        nodes += [*gated.nodes, *(each.node for each in gated.first), norm_node]
        for node in nodes[1:]:
            if not {*users(node)} <= {*nodes}:
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
            scale, last = found, user
            nodes.add(user)
            user = sole_user(last)
        added = summands(user) if user is not None else None
        left, right = added or (last, last)
        residual = right if origin(left) is last else left
        if user is None or origin(residual) is last:  # the sum of a value with itself is none with a residual
            return Tail(scale, None, last, frozenset(nodes))
        return Tail(scale, origin(residual), user, frozenset({*nodes, user}))

    def _scale(self, node: Node, user: Node) -> str | None:
        """The name of the layer scale by which ``user`` multiplies ``node``."""
        if name_of(user) != "mul" or len(user.args) != 2:
            return None
        other = next((arg for arg in user.args if isinstance(arg, Node) and origin(arg) is not node), None)
        shape = shape_of(node)
        return self.seen.trace.parameters.get(other) if other is not None and shape and shape_of(other) == shape[-1:] else None

    def _hidden(self, node: Node) -> _Hidden:
        """How linears give the hidden units that a node is: activated, or as a product of an activated gate and a value."""
        is_product = name_of(node) == "mul"
        factors = [origin(each) for each in node.args if isinstance(each, Node)] if is_product else [node]
        active = [(each, kind) for each in factors if (kind := _activation(each)) is not None]
        if not active:
            raise UnfitError(
                "activation", f"its activation ends in the operator {name_of(node)} without gelu or silu; kernels know these two"
            )
        activated, kind = active[0]
        gate = self._units(_operand(activated))
        if not is_product:
            if gate is None or gate.half is not None:
                raise UnfitError("no-linear", "before its activation stands no linear module that its parent calls")
            return _Hidden((gate.call,), None, kind, (node,))
        value = next((self._units(each) for each in factors if each is not activated), None)
        is_plain = len(factors) == 2 and len(active) == 1 and not is_in_place(node) and shape_of(factors[0]) == shape_of(factors[1])
        if is_plain and gate is not None and value is not None and origin(gate.call.source) is origin(value.call.source):
            nodes = (node, activated, *gate.nodes, *value.nodes)
            if gate.half is None and value.half is None and gate.call is not value.call:
                return _Hidden((gate.call, value.call), 0, kind, nodes)
            if gate.call is value.call and {gate.half, value.half} == {0, 1}:
                return _Hidden((gate.call,), gate.half, kind, nodes)
        raise UnfitError(
            "gated", "its hidden units are a product, but not of gate and value from two linears of one input or the halves of one"
        )

    def _units(self, node: Node) -> _Units | None:
        """The linear whose outputs, or half of them, a node is."""
        if node in self.calls:
            return _Units(self.calls[node], None, ())
        split, half = node.args[:2] if name_of(node) == "getitem" else (None, None)
        if not isinstance(split, Node) or name_of(split) not in _SPLITS or len(split.meta["val"]) != 2:
            return None
        call, whole, after = self.calls.get(_operand(split)), shape_of(_operand(split)), shape_of(node)
        if call is None or not isinstance(half, int) or half not in (0, 1) or not after or whole != (*after[:-1], 2 * after[-1]):
            return None
        return _Units(call, half, (node, split))


class BlockMatcher:
    """Proves by the graph that the module ``fqn`` is a block.

    ``groups`` are those whose residual sums its own forward computes; ``around`` has the modules in whose forward each node ran, and
    ``calls`` the calls of all modules.
    """

    def __init__(
        self,
        matcher: Matcher,
        calls: Mapping[str, Calls],
        around: Mapping[Node, tuple[str, ...]],
        fqn: str,
        groups: Iterable[AttentionOut | FeedForwardGroup],
        projections: Iterable[ProjectionGroup],
    ) -> None:
        self.matcher, self.seen, self.calls = matcher, matcher.seen, calls
        self.fqn, self.projections = fqn, tuple(projections)
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
        others = [node for node in self.inside if node not in covered and node.users and not is_idle(node)]
        more = next((node for node in others if "_assert" not in name_of(node)), None)
        if more is not None:
            raise self._more(more)
        return Block(self.fqn, tuple(parts), form_of(self.fqn, parts, self.calls))

    def _part(self, value: Node) -> tuple[BlockPart, set[Node], Node]:
        """The part that gives ``value``, its nodes, and the value that it reads."""
        group = self.sums.get(value)
        if isinstance(group, FeedForwardGroup):
            return group, {*group.nodes, *group.tail.nodes}, group.source
        if group is not None:
            return self._attended(group)
        lone, norm = self._lone(value), attempt(self.matcher.norm, value)
        if lone is None or isinstance(norm, Reason):
            raise self._more(value)
        return norm, lone[1], lone[2]

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
        return Attended(attention, norm, projection, attention_among(nodes), out), normed | out.tail.nodes, x

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
        return {origin(each) for each in read if each in self.seen.trace.inputs or each.op not in ("placeholder", "get_attr")}

    def _leaving(self, nodes: set[Node]) -> set[Node]:
        """The values of ``nodes`` that others use."""
        return {origin(node) for node in nodes if any(user not in nodes for user in node.users)}

    def _more(self, node: Node) -> UnfitError:
        return UnfitError("more", f"{self._name} also computes {name_of(node) or node.name}")

    @property
    def _name(self) -> str:
        return f"the block {self.fqn}" if self.fqn else "the model itself"


def _operand(node: Node) -> Node:
    """The operand of a node that has one."""
    operand = node.args[0]
    assert isinstance(operand, Node)  # operators of one tensor have it as their first argument
    return origin(operand)


def _activation(node: Node) -> str | None:
    name = name_of(node)
    return "gelu_tanh" if name == "gelu" and node.kwargs.get("approximate") == "tanh" else _ACTIVATIONS.get(name)


def _is_plain(call: Call) -> bool:
    return call.kind == "linear" and call.inside
