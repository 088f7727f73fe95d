"""Find the groups of a traced graph that kernels do together: by what flows where, never by names."""

from __future__ import annotations

from itertools import pairwise

from torch.fx import Node

from flysurgery.inference.chain import between, origin, sole_user, summands, users
from flysurgery.inference.found import AttentionOut, FeedForward, Norm, Projection, Scale, Tail
from flysurgery.surgery import Reason
from flysurgery.walker import Call, Survey, name_of, shape_of

_ACTIVATIONS = {"gelu": "gelu", "silu": "silu"}


class Matcher:
    """Reads one surveyed graph."""

    def __init__(self, seen: Survey) -> None:
        self.seen = seen
        self.calls = {call.node: call for call in seen.calls}
        self.roles = {call.node: judged.role for call, judged in zip(seen.calls, seen.judgements, strict=True)}

    def of_role(self, role: str) -> list[Call]:
        """The linears of a role, in the order of execution."""
        return [call for call in self.seen.calls if self.roles[call.node] == role]

    def projection(self, call: Call) -> Projection | Reason:
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
        assert isinstance(source, Node)  # self.norm has seen to it
        return Projection(norm, node, call.fqn, origin(source), call.node, frozenset({node, call.node} | between(node, call.node)))

    def feed_forward(self, call: Call) -> FeedForward | Reason:
        """[LN -> FFN -> layer scale -> residual], from the second linear."""
        activation = origin(call.source)
        kind = self._activation(activation)
        if isinstance(kind, Reason):
            return kind
        entering = activation.args[0]
        first = self.calls.get(origin(entering)) if isinstance(entering, Node) else None
        if first is None or not (_is_plain(first) and _is_plain(call)):
            return Reason("no-linear", "before its activation stands no linear module that its parent calls")
        norm_node = origin(first.source)
        norm = self.norm(norm_node)
        if isinstance(norm, Reason):
            return norm
        chain = (norm_node, first.node, activation, call.node)
        for one, following in pairwise(chain):
            if sole_user(one) is not following:
                return Reason("shared", f"the result of its {name_of(one)} is used by something else as well")
        source = norm_node.args[0]
        assert isinstance(source, Node)  # self.norm has seen to it
        inner = {*chain}.union(*(between(one, following) for one, following in pairwise(chain)))
        tail = self.tail(call.node)
        return FeedForward(norm, norm_node, first.fqn, call.fqn, kind, origin(source), call.node, frozenset(inner), tail)

    def attention_out(self, call: Call) -> AttentionOut | Reason:
        """[attention output projection -> layer scale -> residual], from the linear."""
        if not _is_plain(call):
            return Reason("weight-read", "the weight is not used by a linear module that its parent calls")
        return AttentionOut(call.fqn, call.node, self.tail(call.node))

    def norm(self, node: Node) -> Norm | Reason:
        """The layer norm that a node is: over the last dimension, in a module that holds its weight and bias under these names."""
        if name_of(node) != "layer_norm" or not isinstance(node.args[0], Node):
            return Reason("no-norm", f"it does not read a layer norm's result, but that of {name_of(node) or 'the input'}")
        sizes, weight, bias, eps = (*node.args[1:], None, None, 1e-5)[:4] if len(node.args) < 5 else node.args[1:5]
        fqn = self.seen.owners.innermost(node)
        names = [self.seen.trace.parameters.get(each) if isinstance(each, Node) else None for each in (weight, bias)]
        expected = [f"{fqn}.{leaf}" if each is not None else None for leaf, each in (("weight", weight), ("bias", bias))]
        if not fqn or names != expected or not isinstance(sizes, (list, tuple)) or len(sizes) != 1:
            return Reason("norm-form", "its layer norm is not a module's over the last dimension, with weight and bias of its own")
        return Norm(fqn, float(eps))  # pyright: ignore[reportArgumentType]  aten gives a number here

    def tail(self, node: Node) -> Tail:
        """The layer scale and the sum that alone use a linear's result."""
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

    def _activation(self, node: Node) -> str | Reason:
        name = name_of(node)
        if name in ("mul", "glu"):
            return Reason("gated", "its feed-forward is gated (SwiGLU or the like), which no kernel does")
        if name == "layer_norm":
            return Reason("norm-inside", "a norm stands between its two linears")
        if name not in _ACTIVATIONS:
            return Reason("activation", f"its activation ends in the operator {name}; kernels know gelu and silu")
        return "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else _ACTIVATIONS[name]


def _is_plain(call: Call) -> bool:
    return call.kind == "linear" and call.inside
