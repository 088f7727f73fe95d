"""Flatten a graph: regions such as one under autocast are exported as calls of a nested graph."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from flysurgery.walker.operations import is_fused_attention, name_of


def inlined(module: GraphModule) -> Graph:
    """The module's graph with the bodies of higher-order operators in place of their calls."""
    if not any(isinstance(child, GraphModule) for child in module.children()):
        return module.graph
    flat = Graph()
    copies: dict[Node, Any] = {}
    for node in module.graph.nodes:
        call = _call_of_body(module, node)
        if call is not None:
            body, args = call
            inner = inlined(body)
            holes = [inner_node for inner_node in inner.nodes if inner_node.op == "placeholder"]
            values = pytree.tree_map_only(Node, lambda n: copies[n], args)
            copies[node] = flat.graph_copy(inner, dict(zip(holes, values, strict=True)))
        elif _takes_item(node, copies):
            copies[node] = copies[node.args[0]][node.args[1]]
        else:
            copies[node] = flat.node_copy(node, lambda n: copies[n])
    return flat


def _call_of_body(module: GraphModule, node: Node) -> tuple[GraphModule, list[Any]] | None:
    """The nested graph that a node runs, and what it is run on."""
    bodies = [(i, body) for i, body in enumerate(_submodule(module, arg) for arg in node.args) if body is not None]
    # a conditional has two bodies, of which one runs: it stays a single opaque node
    if node.op != "call_function" or len(bodies) != 1 or is_fused_attention(name_of(node)):  # whose bodies change scores
        return None
    position, body = bodies[0]
    return body, list(node.args[position + 1 :])


def _submodule(module: GraphModule, arg: Any) -> GraphModule | None:
    child = getattr(module, str(arg.target), None) if isinstance(arg, Node) and arg.op == "get_attr" else None
    return child if isinstance(child, GraphModule) else None


def _takes_item(node: Node, copies: dict[Node, Any]) -> bool:
    return bool(node.args) and isinstance(node.args[0], Node) and isinstance(copies.get(node.args[0]), (tuple, list))
