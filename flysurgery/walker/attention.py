"""What attention looks like in a graph, fused into one operator or as two matrix products around a softmax."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from flysurgery.walker.operations import name_of, shape_of


@dataclass(frozen=True)
class Attention:
    """Attention: where its query, key and value enter, and the node that holds its output.

    ``operands`` are pairs of ``"q"``, ``"k"`` or ``"v"`` and a node, or of ``"qkv"`` where it does not show which of them
    it is. ``single_query``: one query row, or queries that do not depend
    on the input (attention pooling). ``scores`` are the products and softmax nodes inside; none for a fused operator.
    """

    output: Node
    operands: tuple[tuple[str, Node], ...]
    single_query: bool
    scores: frozenset[Node] = frozenset()


def query_and_key(product: Node, left: Node, right: Node, softmax: Node) -> tuple[Node, Node, int | None]:
    """Which operand of a score product is the query, which the key (whose rows the softmax runs over), and the number of query rows."""
    shape = shape_of(product)
    axis = _axis_from_end(softmax)
    if name_of(product) == "einsum":
        letters, result = _einsum_letters(str(product.args[0]))
        key_letter = result[axis] if -axis <= len(result) else result[-1]
        swapped = key_letter in letters[0] and key_letter not in letters[1]
        query_letters = [letter for letter in result if letter in letters[swapped] and letter not in letters[not swapped]]
        rows = shape[result.index(query_letters[-1])] if shape is not None and query_letters else None
    else:
        swapped = axis == -2
        rows = shape[-1 if swapped else -2] if shape is not None else None
    return (right, left, rows) if swapped else (left, right, rows)


def _axis_from_end(softmax: Node) -> int:
    axis = softmax.args[1] if len(softmax.args) > 1 else -1
    if not isinstance(axis, int):
        return -1
    return axis - len(shape_of(softmax) or ()) if axis >= 0 else axis


def _einsum_letters(equation: str) -> tuple[list[str], str]:
    operands, _, result = equation.replace(" ", "").partition("->")
    return operands.split(","), result
