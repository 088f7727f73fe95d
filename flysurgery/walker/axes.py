"""What each entry of a value comes from, by integers in its place, and which axes of factors and their product are one, by letters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from flysurgery.walker import operations as ops
from flysurgery.walker.operations import name_of, shape_of


def moved(node: Node, labels: Callable[[Node], Any]) -> Any:
    """Run an operator that moves entries on the ``labels`` of its arguments."""
    strided = ops.name_of(node) in ops.STRIDED

    def argument(arg: Node) -> Any:
        found = labels(arg)
        # a view of the real tensor, whose strides may differ from these
        return found.contiguous() if strided and isinstance(found, Tensor) else found

    args, kwargs = pytree.tree_map_only(Node, argument, (node.args, node.kwargs))
    assert callable(node.target)  # the node calls a function: name_of gave its name
    return node.target(*args, **kwargs)


def compact(expanded: Tensor) -> Tensor:
    """One entry along each axis on which all are the same memory: most labels depend on the feature alone, not on sample or token."""
    return expanded[tuple(slice(1) if stride == 0 else slice(None) for stride in expanded.stride())]


def axes_of_change(labels: Tensor) -> set[int]:
    """The axes along which labels differ."""
    small = compact(labels)
    if not small.numel():
        return set()
    return {axis for axis in range(small.dim()) if bool((small != small.narrow(axis, 0, 1)).any())}


def without_repeats(labels: Tensor) -> Tensor:
    """One entry along each axis on which nothing changes."""
    changing = axes_of_change(labels)
    return labels[tuple(slice(None) if axis in changing else slice(1) for axis in range(labels.dim()))]


@dataclass(frozen=True)
class Letters:
    """A letter for each axis of the left factor, the right one, and the result."""

    left: list[str]
    right: list[str]
    result: list[str]

    @property
    def summed(self) -> list[str]:
        """Those that are summed over."""
        return [letter for letter in self._all if letter not in self.result]

    def swapped(self) -> Letters:
        """The same product with its factors in the other order."""
        return Letters(self.right, self.left, self.result)

    def aligned(
        self,
        labels: Tensor,  # an axis for each letter in ``of``
        of: list[str],
    ) -> Tensor:  # an axis for each letter: those of the result, then those summed over
        """Labels of one factor without repeats, with the axes where both factors have them."""
        small = without_repeats(labels)
        order = [*self.result, *self.summed]
        moved = small.permute([of.index(letter) for letter in order if letter in of])
        sizes = iter(moved.shape)
        return moved.reshape([next(sizes) if letter in of else 1 for letter in order])

    def as_result(self, aligned: Tensor) -> Tensor:
        """Of aligned labels the first along the letters summed over."""
        return aligned[(..., *(0 for _ in self.summed))]

    @property
    def _all(self) -> list[str]:
        return list(dict.fromkeys((*self.left, *self.right)))


@dataclass(frozen=True)
class Product:
    """A product of two tensors."""

    operands: tuple[Node, Node]
    letters: Letters


def product_of(node: Node) -> Product | None:
    """The node as a product; None where it is none of two tensors with a letter for each axis."""
    if name_of(node) == "einsum":
        equation, operands = (*node.args, None, None)[:2]
        letters = _letters_of_einsum(str(equation))
    elif name_of(node) in ("matmul", "bmm", "mm"):
        operands = node.args
        letters = _letters_of_matmul(*node.args[:2])
    else:
        return None
    if letters is None or not isinstance(operands, (list, tuple)) or len(operands) != 2:
        return None
    left, right = operands
    if not (isinstance(left, Node) and isinstance(right, Node)):
        return None
    axes = [len(shape_of(each) or ()) for each in (left, right, node)]
    return Product((left, right), letters) if axes == [len(letters.left), len(letters.right), len(letters.result)] else None


def _letters_of_einsum(equation: str) -> Letters | None:
    operands, arrow, result = equation.replace(" ", "").partition("->")
    factors = [list(operand) for operand in operands.split(",")]
    if len(factors) != 2 or not arrow or "." in equation or any(len(set(each)) < len(each) for each in (*factors, result)):
        return None
    return Letters(factors[0], factors[1], list(result))


def _letters_of_matmul(left: Any, right: Any) -> Letters | None:
    axes = [len(shape_of(each) or ()) if isinstance(each, Node) else 0 for each in (left, right)]
    if min(axes) < 2:
        return None
    batch = [[f"batch {axis}" for axis in range(count - 2, 0, -1)] for count in axes]
    return Letters([*batch[0], "row", "inner"], [*batch[1], "inner", "column"], [*max(batch, key=len), "row", "column"])
