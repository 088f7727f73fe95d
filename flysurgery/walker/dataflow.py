"""One pass over the graph: from which linears, attention products and streams does each value come, and through what?"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch.fx import Node

from flysurgery.walker import operations as ops
from flysurgery.walker.linears import Call
from flysurgery.walker.operations import name_of, shape_of
from flysurgery.walker.trace import Trace


class Via(NamedTuple):
    """What a value met since its origin: a nonlinearity or gate; a sum or mean over entries."""

    nonlinear: bool = False
    reduced: bool = False


# An origin is a node: a linear, the output of attention, a sum of branches (a residual stream), an input, an operator not understood.
Flow = dict[Node, Via]


def joined(flows: Iterable[Flow]) -> Flow:
    """All origins of all flows; on several ways to one origin, a nonlinearity on any of them counts, a sum only if it is on all."""
    result: Flow = {}
    for flow in flows:
        for origin, via in flow.items():
            met = result.get(origin, via)
            result[origin] = Via(met.nonlinear or via.nonlinear, met.reduced and via.reduced)
    return result


def without_statistics(flows: list[Flow]) -> list[Flow]:
    """Drop the operands that are means or norms, as in normalization, unless all are."""
    return [flow for flow in flows if not all(via.reduced for via in flow.values())] or flows


@dataclass(frozen=True)
class Attention:
    """Attention: where its query, key and value enter, and the node that holds its output.

    ``operands`` are pairs of ``"q"``, ``"k"`` or ``"v"`` and a node, or of ``"qkv"`` where it does not show which of them it is.
    ``single_query``: one query row, or one that a parameter gives for all (attention pooling). ``scores`` are the products and softmax
    nodes inside; none for a fused operator.
    """

    output: Node
    operands: tuple[tuple[str, Node], ...]
    single_query: bool
    scores: frozenset[Node] = frozenset()


def query_and_key(product: Node, left: Node, right: Node, softmax: Node) -> tuple[Node, Node, int | None]:
    """Which operand of a score product is the query, which the key (whose rows the softmax runs over), and the number of query rows."""
    shape, axis = shape_of(product), softmax.args[1] if len(softmax.args) > 1 else -1
    axis = axis if isinstance(axis, int) else -1
    axis = axis - len(shape_of(softmax) or ()) if axis >= 0 else axis
    if name_of(product) == "einsum":
        letters, result = ops.einsum_letters(product)
        key_letter = result[axis] if -axis <= len(result) else result[-1]
        swapped = key_letter in letters[0] and key_letter not in letters[1]
        query_letters = [letter for letter in result if letter in letters[swapped] and letter not in letters[not swapped]]
        rows = shape[result.index(query_letters[-1])] if shape is not None and query_letters else None
    else:
        swapped = axis == -2
        rows = shape[-1 if swapped else -2] if shape is not None else None
    return (right, left, rows) if swapped else (left, right, rows)


def _gated(branches: list[Flow]) -> Flow:
    """What flows on from a product entry by entry: several branches gate each other."""
    return {origin: Via(via.nonlinear or len(branches) > 1, via.reduced) for origin, via in joined(branches).items()}


class Dataflow:
    """The result of one pass over the graph, in the order of execution.

    ``flows`` has the flow into each node's value, ``depends`` the nodes that depend on the example's inputs, ``attentions`` the attention
    whose output a node holds, ``sums`` what a stream adds up, ``calls`` the multiplication by a weight that a node is.
    """

    def __init__(self, trace: Trace, calls: Iterable[Call]):
        self.flows: dict[Node, Flow] = {}
        self.depends: set[Node] = set()
        self.attentions: dict[Node, Attention] = {}
        self.sums: dict[Node, tuple[Flow, Flow]] = {}
        self.calls = {call.node: call for call in calls}
        self._trace = trace
        self._products: dict[Node, tuple[Node, Node]] = {}  # matrix products that are no attention output
        self._softmaxes: dict[Node, Flow] = {}
        self._contexts: dict[Node, Attention] = {}  # sums over the tokens, weighted by a score for each
        for node in trace.graph.nodes:
            if node in trace.inputs or any(arg in self.depends for arg in node.all_input_nodes):
                self.depends.add(node)
            self.flows[node] = self._flow(node)
            if node.op == "call_function" and ops.is_in_place(node):
                self._write_through(node)

    def _flow(self, node: Node) -> Flow:
        if node in self._trace.inputs:
            return {node: Via()}
        name = ops.name_of(node)
        if not name or name in ops.FRESH or ops.is_discrete(node):
            return {}
        if node in self.calls:
            return {node: Via(), **self._scores_in(node)}
        if ops.is_fused_attention(name):
            return self._fused_attention(node)
        if name in ops.PRODUCT_OF_MATRICES:
            return self._product(node)
        if name in ops.SOFTMAX:
            self._softmaxes[node] = self._union(node)
            return {node: Via()}
        return self._elementary(node, name)

    def _elementary(self, node: Node, name: str) -> Flow:
        branches = self._branches(node)
        if name in ops.SUM and len(branches) == 2:
            return self._sum(node, branches)
        union = self._union(node)
        if name == "sum":
            context = self._weighted_sum(node)
            if context is not None:
                self._contexts[node] = context
                return self._found(context)
        if name in ops.PRODUCT and len(branches) > 1:
            branches = without_statistics(branches)
            context = next((self._contexts[origin] for branch in branches for origin in branch if origin in self._contexts), None)
            if context is not None and any(not branch.keys() & self._contexts.keys() for branch in branches):
                others = [("qkv", arg) for arg in node.all_input_nodes if not self.flows[arg].keys() & self._contexts.keys()]
                return self._found(Attention(node, (*context.operands, *others), False))
            return _gated(branches)
        if name in ops.ACTIVATION:
            return {origin: Via(True, via.reduced) for origin, via in union.items()}
        if name in ops.REDUCTION:
            return {origin: Via(via.nonlinear, True) for origin, via in union.items()}
        known = name in ops.SHAPE | ops.REARRANGE | ops.POINTWISE | ops.NORM | ops.CHANNELWISE
        if known or (name in ops.CONVOLUTION and ops.is_depthwise(node)):
            return union
        return {node: Via(), **self._scores_in(node)} if union else {}

    def _weighted_sum(self, node: Node) -> Attention | None:
        """Additive attention: tokens times a score for each token, summed over the tokens."""
        product, axes = node.args[0], node.args[1] if len(node.args) > 1 else None
        if not (isinstance(product, Node) and ops.name_of(product) == "mul" and isinstance(axes, (list, tuple)) and len(axes) == 1):
            return None
        axis = axes[0]
        operands = [arg for arg in product.all_input_nodes if arg in self.depends and self.flows[arg]]
        shapes = [ops.shape_of(arg) or () for arg in operands]
        alike = len(operands) == 2 and len(shapes[0]) == len(shapes[1]) >= 3
        if not alike or not isinstance(axis, int) or any(shape[axis] == 1 for shape in shapes):
            return None
        has_scores = any(one == 1 < other for one, other in (*zip(*shapes, strict=True), *zip(*shapes[::-1], strict=True)))
        summed = ops.shape_of(node) or ()
        single = len(summed) == 2 or (len(summed) == len(shapes[0]) and summed[axis] == 1)
        return Attention(node, (("qkv", operands[0]), ("qkv", operands[1])), single) if has_scores else None

    def _sum(self, node: Node, branches: list[Flow]) -> Flow:
        branches = without_statistics(branches)
        if len(branches) == 1:
            return branches[0]
        left, right = branches
        both = (*left, *right)
        is_scores = any(origin in self._products and not flow[origin].nonlinear for flow in branches for origin in flow)  # with a bias
        is_attended = all(origin in self.attentions for origin in both)  # the difference of two attentions
        if left.keys() == right.keys() or is_scores or is_attended:
            return joined(branches)
        for one, other in ((left, right), (right, left)):
            if any(self._feeds(other, self.attentions[origin]) for origin in one if origin in self.attentions):
                return one
        self.sums[node] = (left, right)
        return {node: Via()}

    def _feeds(self, flow: Flow, attention: Attention) -> bool:
        """Whether all of the flow comes from what entered the attention, as a position encoding computed from v does."""
        entering = {origin for _, operand in attention.operands for origin in self.flows[operand]}
        return flow.keys() <= entering

    def _fused_attention(self, node: Node) -> Flow:
        given = [*node.args[:3], *(node.kwargs.get(name) for name in ("query", "key", "value"))]
        q, k, v = [arg for arg in given if isinstance(arg, Node)][:3]
        shape = ops.shape_of(q)
        single = (shape is not None and shape[-2] == 1) or self._is_one_row(q)
        return self._found(Attention(node, (("q", q), ("k", k), ("v", v)), single))

    def _product(self, node: Node) -> Flow:
        operands = [arg for arg in node.args if isinstance(arg, Node)] or node.all_input_nodes  # einsum takes a list
        operands = operands[1:] if ops.name_of(node) == "baddbmm" else operands
        if len(operands) != 2:
            return {node: Via(), **self._scores_in(node)}
        left, right = operands
        if ops.name_of(node) == "einsum":
            letters, result = ops.einsum_letters(node)
            if set("".join(letters)) <= set(result):  # nothing is summed: entry times entry
                return _gated(self._branches(node))
        for weights, value in ((left, right), (right, left)):
            if self._mixes(weights, value):
                return self.flows[value]
            softmax = next((origin for origin in self.flows[weights] if origin in self._softmaxes), None)
            if softmax is not None and value in self.depends:
                return self._found(self._softmax_attention(node, softmax, weights, value))
        for inner, query in ((left, right), (right, left)):
            if query in self.depends and (self._holds_attention(inner) or self._reads_states(query, inner)):
                # linear attention: query times (key times value)
                return self._found(Attention(node, (("q", query), ("v", inner)), False))
        for inner, outer in ((left, right), (right, left)):
            product = next((origin for origin in self.flows[inner] if origin in self._products), None)
            if product is not None and outer in self.depends and all(arg in self.depends for arg in self._products[product]):
                # attention without a softmax; which of the three is the query does not show
                return self._found(Attention(node, tuple(("qkv", operand) for operand in (*self._products[product], outer)), False))
        scores = self._scores_in(node)
        if not scores or all(operand in self.depends for operand in operands):  # else constants mix the heads
            self._products[node] = (left, right)
        return {node: Via(), **scores}

    def _softmax_attention(self, node: Node, softmax: Node, weights: Node, value: Node) -> Attention:
        scores = [origin for origin in self._softmaxes[softmax] if origin in self._products]
        operands: list[tuple[str, Node]] = []
        rows = ops.shape_of(node)
        single = not scores and rows is not None and rows[-2] == 1  # pooled by weights that come straight from a linear
        for product in scores:
            q, k, query_rows = query_and_key(product, *self._products[product], softmax)
            operands += [("q", q), ("k", k)]
            single = single or query_rows == 1 or self._is_one_row(q)
        if not scores:  # linear attention takes the softmax of the query or the key itself
            operands.append(("q" if self._holds_attention(value) else "k", softmax.all_input_nodes[0]))
        operands.append(("v", value))
        return Attention(node, tuple(operands), single, frozenset((softmax, *scores)))

    def _mixes(self, weights: Node, streams: Node) -> bool:
        """Whether a bare parameter makes the weights from the streams: these are parallel residual streams, which get mixed."""
        calls = [self.calls.get(origin) for origin, via in self.flows[weights].items() if via.nonlinear]
        return len(calls) == len(self.flows[weights]) > 0 and all(
            call is not None and call.kind == "raw" and self.flows[call.source].keys() == self.flows[streams].keys() for call in calls
        )

    def _reads_states(self, query: Node, states: Node) -> bool:
        """Whether linears made the states from what the latest attention summed up, and the query comes from what entered it too."""
        before = ops.reached(self.flows[states], lambda origin: self.flows[self.calls[origin].source] if origin in self.calls else ())
        latest = [each for each in [*self.attentions.values()][-1:] if each.output in before]
        return any(self.flows[query] and self._feeds(self.flows[query], each) for each in latest)

    def _is_one_row(self, query: Node) -> bool:
        """Whether a query that does not depend on the input is one row of parameters, however often it is repeated."""
        if query in self.depends:
            return False
        before = ops.reached([query], lambda node: [self.calls[node].source] if node in self.calls else node.all_input_nodes)
        return all((1, *(ops.shape_of(node) or ()))[:-1][-1] <= 1 for node in before if node in self._trace.parameters)

    def _holds_attention(self, node: Node) -> bool:
        return any(origin in self.attentions for origin in self.flows[node])

    def _found(self, attention: Attention) -> Flow:
        self.attentions[attention.output] = attention
        return {attention.output: Via()}

    def _scores_in(self, node: Node) -> Flow:
        """Attention scores stay attention scores through a layer that mixes their heads: it sees them whole, with axes permuted."""
        sizes = [sorted(ops.shape_of(arg) or ()) for arg in node.all_input_nodes]
        scores = {origin: via for origin, via in self._union(node).items() if origin in self._products or origin in self._softmaxes}
        return {origin: via for origin, via in scores.items() if sorted(ops.shape_of(origin) or ()) in sizes}

    def _branches(self, node: Node) -> list[Flow]:
        """The flows of the operands that depend on the input; where none does, of all that come from somewhere."""
        operands = [arg for arg in node.all_input_nodes if self.flows.get(arg)]
        moving = [arg for arg in operands if arg in self.depends]
        return [self.flows[arg] for arg in (moving or operands)]

    def _union(self, node: Node) -> Flow:
        name = ops.name_of(node)
        if name.endswith("_as") and isinstance(node.args[0], Node):  # the other tensor gives its shape or dtype only
            return self.flows[node.args[0]]
        if name in ops.SHAPE:
            return joined(self.flows[arg] for arg in node.all_input_nodes if arg in self.flows)
        return joined(self._branches(node))

    def _write_through(self, node: Node) -> None:
        """An in-place operation on a view also changes the tensors that it is a view of."""
        written = self.flows[node]
        base = node.args[0] if node.args else None
        while isinstance(base, Node) and base not in self._trace.parameters:
            self.flows[base] = joined([self.flows[base], written])
            if node in self.depends:
                self.depends.add(base)
            base = base.args[0] if ops.name_of(base) in ops.VIEW and base.args else None
