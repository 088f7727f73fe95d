"""Find the modules that are one transformer block and nothing else."""

from __future__ import annotations

from torch.fx import Node

from flysurgery.inference.chain import is_idle, origin, users
from flysurgery.inference.found import AttentionOut, Block, FeedForward, Projection
from flysurgery.inference.match import Matcher
from flysurgery.surgery import Reason
from flysurgery.walker import Survey, name_of


def match_block(
    matcher: Matcher, feed_forward: FeedForward, outs: dict[Node, AttentionOut], projections: dict[Node, Projection]
) -> Block | Reason:
    """The block that ends in a feed-forward group, proven from the graph.

    ``outs`` has the sums that end attention groups as keys, ``projections`` the nodes of their norms. Every operator of the block's
    forward must belong to the attention module or to one of the groups.
    """
    if feed_forward.tail.residual is None or feed_forward.tail.residual is not feed_forward.source:
        return Reason("no-residual", "its result is not added to what its norm reads")
    out = outs.get(feed_forward.source)
    if out is None or out.tail.residual is None:
        return Reason("no-attention", "what its norm reads is not the sum that ends an attention")
    seen, entry = matcher.seen, out.tail.residual
    fqn = seen.owners.innermost(feed_forward.tail.result)
    if not fqn or seen.owners.innermost(feed_forward.source) != fqn:
        return Reason("open-block", "its residual sum is made by the model itself, not by a module of one block")
    inside = [node for node in seen.trace.graph.nodes if fqn in modules_around(seen, node)]
    attention = _child_holding(fqn, out.linear)
    if attention is None:
        return Reason("no-module", "attention is not a module of its own inside the block")
    attending = {node for node in inside if attention in modules_around(seen, node)}
    norm_node = next((node for node in users(entry) if name_of(node) == "layer_norm" and {*users(node)} <= attending), None)
    if norm_node is None:
        return Reason("no-norm", "attention does not read a layer norm of the block's input")
    norm = matcher.norm(norm_node)
    if isinstance(norm, Reason):
        return norm
    groups = attending | {norm_node} | out.tail.nodes | feed_forward.nodes | feed_forward.tail.nodes
    others = [node for node in inside if node not in groups and node.users and not is_idle(node) and "_assert" not in name_of(node)]
    if others:
        return Reason("more", f"the block {fqn} also computes {name_of(others[0]) or others[0].name}")
    if not _ends_with(attending, out) or not _single_exit(inside, feed_forward.tail.result):
        return Reason("exits", f"values inside of {fqn} are used in other places as well")
    return Block(fqn, attention, norm, projections.get(norm_node), out, feed_forward)


def modules_around(seen: Survey, node: Node) -> tuple[str, ...]:
    """First names of the modules in whose forward the node ran, the outermost first."""
    modules = seen.owners.modules
    paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return tuple(seen.owners.first_name(modules[path]) for path in paths if path in modules)


def _child_holding(parent: str, fqn: str) -> str | None:
    """The direct child of ``parent`` below which the module ``fqn`` lies."""
    if not fqn.startswith(f"{parent}."):
        return None
    first = fqn[len(parent) + 1 :].split(".")
    return f"{parent}.{first[0]}" if len(first) > 1 else None


def _ends_with(attending: set[Node], out: AttentionOut) -> bool:
    """Whether nothing leaves attention but its output projection's result, which nothing in attention changes."""
    leaving = {origin(node) for node in attending if any(user not in attending for user in node.users)}
    return leaving == {out.branch}


def _single_exit(inside: list[Node], result: Node) -> bool:
    nodes = {*inside}
    return {origin(node) for node in inside if any(user not in nodes for user in node.users)} == {result}
