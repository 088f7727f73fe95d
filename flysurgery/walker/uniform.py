"""Proof that nothing between the projections of an attention and the linear after it tells its heads, or their entries, apart.

Every value that comes from the projections carries, for each of its entries, the weight row that the entry comes from; scores and
other sums over a head's entries carry any row of their head. Operators that move entries move the rows. Of every other operator it is asked
whether it would commute with another order of the heads, and of the entries within each head; where that does not show, the
order is tied, with the reason. Query and key may have another order of their entries only together, since they meet in a product.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from flysurgery.walker import operations as ops
from flysurgery.walker.axes import Letters, axes_of_change, moved, product_of, without_repeats
from flysurgery.walker.linears import Call
from flysurgery.walker.trace import Trace

HEADS, QUERY_KEY, VALUE = "heads", "query and key", "value"
ORDERS = (HEADS, QUERY_KEY, VALUE)
"""What may be in another order: whole heads; entries of query and key within a head; entries of value within a head."""

_ELEMENTWISE = ops.POINTWISE - {"prelu"}  # whose weight stands along axis 1
_LOOKS = ops.FRESH | {"_assert_tensor_metadata"}
_FIRST_COUNTS = _LOOKS | {"expand_as"}
_NORMS = frozenset(("layer_norm", "rms_norm"))


@dataclass(frozen=True)
class Projection:
    """Rows ``start`` to ``stop`` of a linear's weight: all heads of query, key or value, one after the other."""

    call: Call
    start: int
    stop: int

    @property
    def fqn(self) -> str:
        """The linear's name."""
        return self.call.fqn

    @property
    def size(self) -> int:
        """The number of rows."""
        return self.stop - self.start


@dataclass(frozen=True)
class _Value:
    """The rows that entries come from, a tensor (or tuple of tensors) of the value's shape; if ``per_head``, only their heads count."""

    rows: Any
    per_head: bool = False


class Uniform:
    """One attention followed through the graph.

    ``tied`` has the reason for each of ``ORDERS`` that is not free; ``out`` are the linears that read the result entry by entry.
    """

    def __init__(self, trace: Trace, calls: Iterable[Call], projections: Sequence[Projection], count: int) -> None:
        self.tied: dict[str, str] = {}
        self.out: list[Call] = []
        self._calls = {call.node: call for call in calls}
        self._projections = projections  # of query, key and value
        self._count = count
        sizes = [each.size for each in projections]
        self._family_of = torch.cat([torch.full((size,), family) for family, size in enumerate(sizes)])
        self._head_of = torch.cat([torch.arange(size) // (size // count) for size in sizes])
        self._entry_of = torch.cat([torch.arange(size) % (size // count) for size in sizes])
        self._known: dict[Node, _Value] = {}
        self._follow(trace)

    def _follow(self, trace: Trace) -> None:
        starts = {each.call.node: each.call for each in self._projections}
        for node in trace.graph.nodes:
            sources = [self._known[arg] for arg in node.all_input_nodes if arg in self._known]
            if sources:
                self._step(node, sources)
            if node in starts:
                self._known[node] = _Value(self._rows_of(starts[node]).expand(ops.shape_of(node) or ()))

    def _rows_of(self, call: Call) -> Tensor:
        rows = torch.empty(call.out_features, dtype=torch.int64)
        for family, each in enumerate(self._projections):
            if each.call is call:
                rows[each.start : each.stop] = (self._family_of == family).nonzero()[:, 0]
        return rows

    def _step(self, node: Node, sources: list[_Value]) -> None:
        name = ops.name_of(node)
        whole = len(sources) == len(node.all_input_nodes) and len({source.per_head for source in sources}) == 1
        if node in self._calls:
            self._read(self._calls[node], sources[0])
        elif name in _FIRST_COUNTS or name in ops.IDENTITY:
            self._take_first(node)
        elif name in ops.SHAPE and whole:
            self._known[node] = _Value(moved(node, lambda arg: self._known[arg].rows), sources[0].per_head)
        elif ops.shape_of(node) is None:
            self._refuse(node, sources)
        elif name in _ELEMENTWISE and not (ops.is_in_place(node) and node.args[0] not in self._known):
            self._elementwise(node, sources)
        elif name in _NORMS or (name in ops.SOFTMAX and sources[0].per_head):
            self._along_axes(node, sources, sources[0], self._normalized_axes(node, name))
        elif name in ops.REDUCTION and whole:
            self._reduction(node, sources)
        elif name == "scaled_dot_product_attention":
            self._fused_attention(node, sources)
        elif name in ops.PRODUCT_OF_MATRICES:
            self._product(node, sources)
        else:
            self._refuse(node, sources)

    def _take_first(self, node: Node) -> None:
        """Of operators that copy their first argument, whose others give a shape or dtype, and of those that only look at a shape."""
        first = node.args[0] if node.args else None
        if isinstance(first, Node) and first in self._known and ops.name_of(node) not in _LOOKS:
            value, shape = self._known[first], ops.shape_of(node)
            self._known[node] = value if shape is None else _Value(value.rows.expand(shape), value.per_head)

    def _read(self, call: Call, value: _Value) -> None:
        """A linear: the one after the attention, or one that reads the heads otherwise."""
        in_order = (self._family_of == 2).nonzero()[:, 0]
        is_result = not value.per_head and isinstance(value.rows, Tensor) and axes_of_change(value.rows) == {value.rows.dim() - 1}
        if is_result and torch.equal(without_repeats(value.rows).flatten(), in_order):
            self.out.append(call)
        else:
            how = "mixes the scores of the heads" if value.per_head else "reads the heads otherwise than in the order of the values' rows"
            self._tie([value], f"the linear {call.fqn} {how}")

    def _elementwise(self, node: Node, sources: list[_Value]) -> None:
        shape = ops.shape_of(node) or ()
        values = sorted((_Value(each.rows.expand(shape), each.per_head) for each in sources), key=lambda each: each.per_head)
        self._tie_what_is_apart(values[0], node)
        for arg in node.all_input_nodes:
            if arg not in self._known:
                self._compare_with_constant(node, values[0], ops.shape_of(arg))
        for other in values[1:]:
            self._compare(node, values[0], other)
        self._known[node] = values[0]

    def _compare_with_constant(self, node: Node, value: _Value, shape: tuple[int, ...] | None) -> None:
        """What else an elementwise operator reads must be one number for all heads, and for all entries of a head."""
        axes = value.rows.dim()
        sized = set(range(axes)) if shape is None else {axes - len(shape) + axis for axis, size in enumerate(shape) if size > 1}
        if sized & axes_of_change(self._head_of[value.rows]):
            what = "scores" if value.per_head else "entries"
            self._tie([value], f"the {what} of each head meet a bias, scale or gate of their own in {_text(node)}", {HEADS})
        if not value.per_head and sized & axes_of_change(self._entry_of[value.rows]):
            text = f"each entry of a head meets a number of its own, as of a rotary embedding or a bias, in {_text(node)}"
            self._tie([value], text, {QUERY_KEY, VALUE})

    def _compare(self, node: Node, one: _Value, other: _Value) -> None:
        """Two values that an elementwise operator joins must be of the same entries, or tie these; and of the same heads, all alike."""
        if torch.equal(self._head_of[one.rows], self._head_of[other.rows]):
            if other.per_head or torch.equal(one.rows, other.rows):
                return
            if not any(axes_of_change(self._head_of[each.rows]) & axes_of_change(self._entry_of[each.rows]) for each in (one, other)):
                self._tie([one, other], f"entries of a head are mixed, as by a rotary embedding, in {_text(node)}", {QUERY_KEY, VALUE})
                return
        self._tie([one, other], f"heads are mixed in {_text(node)}")

    def _along_axes(self, node: Node, sources: list[_Value], value: _Value, axes: set[int]) -> None:
        """A norm or softmax: along the entries of one head, or along tokens; a norm's weights tie the entries."""
        self._tie_what_is_apart(value, node)
        if len(sources) > 1 or not self._stays_in_heads(value, axes):
            self._refuse(node, sources)
            return
        if len(node.all_input_nodes) > 1:
            self._tie([value], f"each entry of a head has a weight of its own in {_text(node)}", {QUERY_KEY, VALUE})
        self._known[node] = value

    def _normalized_axes(self, node: Node, name: str) -> set[int]:
        axes = len(ops.shape_of(node) or ())
        last = node.args[1] if len(node.args) > 1 else -1
        if name in ops.SOFTMAX:
            return {last % axes} if isinstance(last, int) else set(range(axes))
        return set(range(axes - len(last), axes)) if isinstance(last, (list, tuple)) else set(range(axes))

    def _reduction(self, node: Node, sources: list[_Value]) -> None:
        """A sum, mean or norm over all entries of a head, or over tokens, whose axes are kept with one entry."""
        value, after = sources[0], ops.shape_of(node) or ()
        shape = tuple(value.rows.shape)
        axes = {axis for axis, (old, new) in enumerate(zip(shape, after, strict=False)) if old != new}
        self._tie_what_is_apart(value, node)
        is_kept = len(shape) == len(after) and axes and all(after[axis] == 1 for axis in axes)
        over_entries = not value.per_head and bool(axes & axes_of_change(self._entry_of[value.rows]))
        if len(sources) > 1 or not is_kept or not self._stays_in_heads(value, axes):
            self._refuse(node, sources)
            return
        rows = value.rows[tuple(slice(1) if axis in axes else slice(None) for axis in range(len(shape)))]
        self._known[node] = _Value(rows, value.per_head or over_entries)

    def _stays_in_heads(self, value: _Value, axes: set[int]) -> bool:
        """Whether the axes lie within one head, and hold all of its entries or only one."""
        if axes & axes_of_change(self._head_of[value.rows]):
            return False
        entries = set() if value.per_head else axes_of_change(self._entry_of[value.rows])
        return entries <= axes or not entries & axes

    def _fused_attention(self, node: Node, sources: list[_Value]) -> None:
        names = ("query", "key", "value", "attn_mask")
        given = dict(zip(names, node.args, strict=False)) | {name: node.kwargs[name] for name in names if name in node.kwargs}
        query, key, value = (self._known.get(arg) if isinstance(arg := given.get(name), Node) else None for name in names[:3])
        batch = [f"batch {axis}" for axis in range(len(ops.shape_of(node) or ()) - 2)]
        q, k, v, scored = ([*batch, *last] for last in (("q", "entry"), ("k", "entry"), ("k", "value entry"), ("q", "k")))
        scores = self._scores(query, key, Letters(q, k, scored)) if query is not None and key is not None else None
        mask = given.get("attn_mask")
        if scores is None or value is None or (isinstance(mask, Node) and mask in self._known):
            self._refuse(node, sources)
            return
        if isinstance(mask, Node):
            self._compare_with_constant(node, scores, ops.shape_of(mask))
        self._weigh(node, sources, scores, value, Letters(scored, v, [*batch, "q", "value entry"]))

    def _product(self, node: Node, sources: list[_Value]) -> None:
        """Query times key, scores times value, or something that is not followed times value, which ties the heads."""
        product = product_of(node)
        if product is None:
            self._refuse(node, sources)
            return
        left, right = (self._known.get(operand) for operand in product.operands)
        scores = self._scores(left, right, product.letters) if left is not None and right is not None else None
        if scores is not None:
            self._known[node] = _Value(scores.rows.expand(ops.shape_of(node) or ()), per_head=True)
        elif right is not None and not right.per_head:
            self._weigh(node, sources, left, right, product.letters)
        elif left is not None and not left.per_head:
            self._weigh(node, sources, right, left, product.letters.swapped())
        else:
            self._refuse(node, sources)

    def _scores(self, left: _Value, right: _Value, letters: Letters) -> _Value | None:
        """The product of query and key over the entries of each head; None where it is not just that."""
        summed = letters.summed
        if left.per_head or right.per_head or len(summed) != 1 or self._families(left) | self._families(right) != {0, 1}:
            return None
        rows = [letters.aligned(value.rows, of) for value, of in ((left, letters.left), (right, letters.right))]
        heads, entries = ([table[each] for each in rows] for table in (self._head_of, self._entry_of))
        last = rows[0].dim() - 1  # where the letter that is summed over stands
        if not (_same(*heads) and _same(*entries) and all(axes_of_change(each) == {last} for each in entries)):
            return None
        if any(last in axes_of_change(each) for each in heads) or not all(self._shares(value) == (True, True) for value in (left, right)):
            return None
        return _Value(letters.as_result(rows[0]), per_head=True)

    def _weigh(self, node: Node, sources: list[_Value], weights: _Value | None, value: _Value, letters: Letters) -> None:
        """Values summed over the tokens, with weights for each head; what the weights are counts for the order of the heads only."""
        summed = letters.summed
        rows = letters.aligned(value.rows, letters.right)
        is_whole = self._families(value) == {2} and self._shares(value) == (True, True)
        if len(summed) != 1 or not is_whole or rows.dim() - 1 in axes_of_change(rows):
            self._refuse(node, sources)
            return
        if weights is None:
            self._tie([value], f"what weighs the tokens in {_text(node)} does not come from query times key head by head", {HEADS})
        else:
            of = letters.aligned(weights.rows, letters.left)
            if not weights.per_head or not _same(self._head_of[of], self._head_of[rows]) or of.dim() - 1 in axes_of_change(of):
                self._refuse(node, sources)
                return
        self._known[node] = _Value(letters.as_result(rows).expand(ops.shape_of(node) or ()))

    def _families(self, value: _Value) -> set[int]:
        """Which of query (0), key (1) and value (2) the entries come from."""
        leaves = [leaf for leaf in pytree.tree_leaves(value.rows) if leaf.numel()]
        return {family for leaf in leaves for family in self._family_of[without_repeats(leaf)].unique().tolist()}

    def _shares(self, value: _Value) -> tuple[bool, bool]:
        """Whether all heads are there, with the same entries each; and of each head there, all entries."""
        rows = without_repeats(value.rows).unique()
        heads_alike = entries_alike = True
        for family in self._families(value):
            size = self._projections[family].size
            own = rows[self._family_of[rows] == family]
            heads, entries = len(self._head_of[own].unique()), len(self._entry_of[own].unique())
            heads_alike &= heads == self._count and (value.per_head or len(own) == heads * entries)
            entries_alike &= value.per_head or (entries == size // self._count and len(own) == heads * entries)
        return heads_alike, entries_alike

    def _tie_what_is_apart(self, value: _Value, node: Node) -> None:
        heads, entries = self._shares(value)
        if not heads:
            self._tie([value], f"only some of the heads pass through {_text(node)}", {HEADS})
        if not entries:
            self._tie([value], f"only some entries of each head pass through {_text(node)}, as in a rotary embedding", {QUERY_KEY, VALUE})

    def _refuse(self, node: Node, sources: list[_Value]) -> None:
        what = "scores" if all(source.per_head for source in sources) else "entries"
        self._tie(sources, f"the {what} of the heads are read by {_text(node)}, which may mix them")

    def _tie(self, values: Iterable[_Value], reason: str, among: Collection[str] = ORDERS) -> None:
        touched = {HEADS}
        for value in values:
            if not value.per_head:
                touched |= {VALUE if family == 2 else QUERY_KEY for family in self._families(value)}
        for order in ORDERS:
            if order in touched and order in among:
                self.tied.setdefault(order, reason)


def _same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal once they are expanded to one shape."""
    return bool((left == right).all()) and all(a == b or 1 in (a, b) for a, b in zip(left.shape, right.shape, strict=True))


def _text(node: Node) -> str:
    """The operator, and the module in whose forward it ran."""
    name = ops.name_of(node) or "the result of the model"
    kinds = [kind if isinstance(kind, str) else kind.__name__ for _, kind in ops.modules_of(node)]
    return f"'{name}' of {kinds[-1]}" if kinds else f"'{name}'"
