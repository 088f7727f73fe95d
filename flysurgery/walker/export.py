"""From a model to its graph of aten operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from flysurgery.errors import WalkError
from flysurgery.walker.inline import inlined
from flysurgery.walker.shadow import isolated, one_line


@dataclass(frozen=True)
class Trace:
    """A traced forward pass.

    ``parameters`` maps placeholders of the graph to the names of their parameters; ``inputs`` are the placeholders of the example.
    ``batch`` counts the example's samples; None where it is no tensor of images or tokens.
    """

    graph: Graph
    parameters: dict[Node, str]
    inputs: frozenset[Node]
    batch: int | None


def trace(double: nn.Module, example: tuple[Any, ...]) -> Trace:
    """Export the forward pass of a ``shadow`` for the example's shapes; nothing is computed, and no weight is copied.

    Raises:
        WalkError: the exporter cannot follow the model; the message holds the exporter's own reason.
    """
    from torch.export import export  # imported here: it takes about a second, which the rest of the package need not wait for

    try:
        with isolated(double):
            program = export(double, example, strict=False)
    except Exception as error:
        raise WalkError(f"{type(double).__name__} cannot be walked, because torch.export cannot trace it: {one_line(error)}") from error
    signature = program.graph_signature
    graph = inlined(program.graph_module)
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    parameters = {placeholders[name]: fqn for name, fqn in signature.inputs_to_parameters.items()}
    inputs = frozenset(placeholders[name] for name in signature.user_inputs if isinstance(name, str) and name in placeholders)
    return Trace(graph, parameters, inputs, _batch(example))


def run_fake(double: nn.Module, example: tuple[Any, ...]) -> Any:
    """The result of a forward pass of a ``shadow`` on fake tensors: shapes without data. Whatever the forward raises, passes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensors = [leaf for leaf in (*double.parameters(), *double.buffers(), *pytree.tree_leaves(example)) if isinstance(leaf, Tensor)]
    if all(tensor.is_meta for tensor in tensors):
        with isolated(double):  # nothing to fake, and twice as fast
            return double(*example)
    with isolated(double), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return double(*pytree.tree_map_only(Tensor, mode.from_tensor, example))


def _batch(example: tuple[Any, ...]) -> int | None:
    first = example[0] if example else None
    return first.shape[0] if isinstance(first, Tensor) and first.ndim >= 3 else None
