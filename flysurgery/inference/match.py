"""Find the groups of a traced graph that kernels compute together, by dataflow and not by names."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from flysurgery.inference.graph_steps import between, half_of, origin, sole_user, summands, users
from flysurgery.inference.groups import AttentionOut, FeedForwardGroup, NormModule, ProjectionGroup, Scale, Tail
from flysurgery.surgery import Reason
from flysurgery.walker import Call, Survey, is_in_place, name_of, shape_of

_ACTIVATIONS = {"gelu": "gelu", "silu": "silu"}


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
        self.roles = {call.node: judged.role for call, judged in zip(seen.calls, seen.judgements, strict=True)}

    def of_role(self, role: str) -> list[Call]:
        """The linears of a role, in the order of execution."""
        return [call for call in self.seen.calls if self.roles[call.node] == role]

    def projection(self, call: Call) -> ProjectionGroup | Reason:
        """[LN -> q, k, v], from the projection's linear."""
        norm = self.norm(origin(call.source))
        if isinstance(norm, Reason):
            return norm
        node = origin(call.source)
        if users(node) != [call.node]:
            together = all(self.roles.get(user) == "qkv" for user in users(node))
            text = "q, k and v are modules of their own" if together else "its norm's result is used by something else as well"
            return Reason("norm-shared", text)
        if not _is_plain(call):
            return Reason("weight-read", "the weight is not used by a linear module that its parent calls")
        source = node.args[0]
        assert isinstance(source, Node)  # self.norm has checked it
        return ProjectionGroup(norm, node, call.fqn, origin(source), call.node, frozenset({node, call.node} | between(node, call.node)))

    def feed_forward(self, call: Call) -> FeedForwardGroup | Reason:
        """[LN -> FFN -> layer scale -> residual], from the last linear."""
        hidden, inner = origin(call.source), None
        nodes = [call.node]
        if name_of(hidden) == "layer_norm":
            inner = self.norm(hidden)
            if isinstance(inner, Reason):
                return inner
            nodes.append(hidden)
            hidden = _operand(hidden)
        gated = self._gated(hidden) if name_of(hidden) == "mul" else self._activated(hidden)
        if isinstance(gated, Reason):
            return gated
        if not all(_is_plain(each) for each in (*gated.first, call)):
            return Reason("no-linear", "before its activation stands no linear module that its parent calls")
        norm_node = origin(gated.first[0].source)
        norm = self.norm(norm_node)
        if isinstance(norm, Reason):
            return norm
        nodes += [*gated.nodes, *(each.node for each in gated.first), norm_node]
        for node in nodes[1:]:
            if not {*users(node)} <= {*nodes}:
                return Reason("shared", f"the result of its {name_of(node)} is used by something else as well")
        covered = {*nodes}.union(*(between(node, call.node) for node in nodes[1:]))
        first = tuple(each.fqn for each in gated.first)
        source, tail = _operand(norm_node), self.tail(call.node)
        return FeedForwardGroup(
            norm, norm_node, first, gated.gate, gated.activation, inner, call.fqn, source, call.node, frozenset(covered), tail
        )

    def attention_out(self, call: Call) -> AttentionOut | Reason:
        """[attention output projection -> layer scale -> residual], from the linear."""
        if not _is_plain(call):
            return Reason("weight-read", "the weight is not used by a linear module that its parent calls")
        return AttentionOut(call.fqn, call.node, self.tail(call.node))

    def norm(self, node: Node) -> NormModule | Reason:
        """The layer norm that a node is: over the last dimension, in a module that holds its weight and bias under these names."""
        if name_of(node) != "layer_norm" or not isinstance(node.args[0], Node):
            return Reason("no-norm", f"it does not read a layer norm's result, but that of {name_of(node) or 'the input'}")
        sizes, weight, bias, eps = (*node.args[1:], None, None, 1e-5)[:4] if len(node.args) < 5 else node.args[1:5]
        fqn = self.seen.owners.innermost(node)
        names = [self.seen.trace.parameters.get(each) if isinstance(each, Node) else None for each in (weight, bias)]
        expected = [f"{fqn}.{leaf}" if each is not None else None for leaf, each in (("weight", weight), ("bias", bias))]
        if not fqn or names != expected or not isinstance(sizes, (list, tuple)) or len(sizes) != 1:
            return Reason("norm-form", "its layer norm is not a module's over the last dimension, with weight and bias of its own")
        return NormModule(fqn, float(eps))  # pyright: ignore[reportArgumentType]  aten gives a number here

    def tail(self, node: Node) -> Tail:
        """The layer scale and the sum that are the only users of a linear's result."""
        nodes, scale, last = set[Node](), None, node
        user = sole_user(last)
        if user is not None and (found := self._scale(last, user)) is not None:
            nodes |= {user} | between(last, user)
            scale, last = found, user
            user = sole_user(last)
        added = summands(user) if user is not None else None
        if user is None or added is None:
            return Tail(scale, None, last, frozenset(nodes))
        left, right = added
        residual = right if origin(left) is last else left
        if origin(residual) is last:  # the sum of a value with itself
            return Tail(scale, None, last, frozenset(nodes))
        return Tail(scale, origin(residual), user, frozenset(nodes | {user} | between(last, user)))

    def _scale(self, node: Node, user: Node) -> Scale | None:
        """The layer scale by which ``user`` multiplies ``node``."""
        if name_of(user) != "mul" or len(user.args) != 2:
            return None
        other = next((arg for arg in user.args if isinstance(arg, Node) and origin(arg) is not node), None)
        name = self.seen.trace.parameters.get(other) if other is not None else None
        shape = shape_of(node)
        if other is None or name is None or shape is None or shape_of(other) != shape[-1:]:
            return None
        fqn, _, leaf = name.rpartition(".")
        return Scale(fqn, leaf)

    def _activated(self, node: Node) -> _Hidden | Reason:
        """The hidden units made by one linear and an activation."""
        kind = _activation(node)
        if kind is None:
            return Reason("activation", f"its activation ends in the operator {name_of(node)}; kernels know gelu and silu")
        first = self.calls.get(_operand(node))
        if first is None:
            return Reason("no-linear", "before its activation stands no linear module that its parent calls")
        return _Hidden((first,), None, kind, (node,))

    def _gated(self, node: Node) -> _Hidden | Reason:
        """The hidden units made by an activated gate and a value, of two linears or of the halves of one."""
        other = Reason(
            "gated", "its hidden units are a product, but not of gate and value from two linears of one input or the halves of one"
        )
        factors = [origin(each) for each in node.args if isinstance(each, Node)]
        active = [each for each in factors if _activation(each) is not None]
        if not active:
            return Reason("activation", "its hidden units are a product without gelu or silu, as QuickGELU is; kernels know these two")
        if len(factors) != 2 or len(active) != 1 or is_in_place(node) or shape_of(factors[0]) != shape_of(factors[1]):
            return other
        kind, gate = _activation(active[0]), _operand(active[0])
        value = factors[1] if factors[0] is active[0] else factors[0]
        assert kind is not None  # it is the active one
        pair = [self.calls.get(each) for each in (gate, value)]
        if pair[0] is not None and pair[1] is not None:
            one_input = pair[0] is not pair[1] and origin(pair[0].source) is origin(pair[1].source)
            return _Hidden((pair[0], pair[1]), 0, kind, (node, active[0])) if one_input else other
        one, another = half_of(gate), half_of(value)
        if one is None or another is None or origin(one.whole) is not origin(another.whole) or one.place == another.place:
            return other
        first = self.calls.get(origin(one.whole))
        return other if first is None else _Hidden((first,), one.place, kind, (node, active[0], gate, value, one.split, another.split))


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
