"""Find the modules that compute residual sums of attention and feed-forward groups and nothing else: blocks, halves and rows of them."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from flysurgery.inference.graph_steps import is_idle, origin
from flysurgery.inference.groups import Attended, AttentionOut, Block, BlockPart, FeedForwardGroup, Lone, ProjectionGroup
from flysurgery.surgery import Reason
from flysurgery.walker import Survey, name_of


class BlockMatcher:
    """Proves by the graph that the module ``fqn`` is a block; ``groups`` are those whose residual sums its own forward computes."""

    def __init__(
        self, seen: Survey, fqn: str, groups: Iterable[AttentionOut | FeedForwardGroup], projections: Iterable[ProjectionGroup]
    ) -> None:
        self.seen, self.fqn, self.projections = seen, fqn, tuple(projections)
        self.sums = {group.tail.result: group for group in groups}
        around = {node: modules_around(seen, node) for node in seen.trace.graph.nodes}
        self.inside = {node: names[names.index(fqn) + 1 :] for node, names in around.items() if fqn in names}

    def match(self) -> Block | Reason:
        """The block, followed from its result back to its input. Every operator of its forward must belong to a part."""
        ends = self._leaving({*self.inside})
        if len(ends) != 1:
            return Reason("exits", f"values inside of {self._name} are used in other places as well")
        value, parts, covered = ends.pop(), list[BlockPart](), set[Node]()
        while value in self.inside:
            found = self._part(value)
            if isinstance(found, Reason):
                return found
            part, nodes, value = found
            parts.insert(0, part)
            covered |= nodes
        others = [node for node in self.inside if node not in covered and node.users and not is_idle(node)]
        more = next((node for node in others if "_assert" not in name_of(node)), None)
        return Block(self.fqn, tuple(parts)) if more is None else self._more(more)

    def _part(self, value: Node) -> tuple[BlockPart, set[Node], Node] | Reason:
        """The part that gives ``value``, its nodes, and the value that it reads."""
        group = self.sums.get(value)
        if isinstance(group, FeedForwardGroup):
            return group, {*group.nodes, *group.tail.nodes}, group.source
        if group is not None:
            return self._attended(group)
        lone = self._lone(value)
        return self._more(value) if lone is None else (Lone(lone[0]), lone[1], lone[2])

    def _attended(self, out: AttentionOut) -> tuple[BlockPart, set[Node], Node] | Reason:
        x, attention = out.tail.residual, self._child(out.branch)
        assert x is not None  # it is among the sums
        if attention is None or not out.linear.startswith(f"{attention}."):
            return Reason("no-module", f"attention is not a module of its own inside of {self._name}")
        nodes = self._nodes_in(attention)
        if self._leaving(nodes) != {out.branch}:
            return Reason("exits", f"values inside of {attention}, besides its output projection's, are used in other places as well")
        read = self._read_by(nodes)
        norm, normed = None, nodes
        if x not in read:
            found = next((lone for each in read if (lone := self._lone(each)) is not None and lone[2] is x), None)
            if found is None:
                return Reason("no-residual", "its result is not added to what attention reads, as it is or through a norm")
            norm, normed = found[0], nodes | found[1]
        projection = next((each for each in self.projections if each.source is x and each.nodes <= normed), None)
        named = [] if projection is None else [projection.linear, *([projection.norm.fqn] if norm is None else [])]
        if not all(fqn.startswith(f"{attention}.") for fqn in named):  # they have other names elsewhere, so other modules may use them
            projection = None
        return Attended(attention, norm, projection, out), normed | out.tail.nodes, x

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

    def _more(self, node: Node) -> Reason:
        return Reason("more", f"{self._name} also computes {name_of(node) or node.name}")

    @property
    def _name(self) -> str:
        return f"the block {self.fqn}" if self.fqn else "the model itself"


def modules_around(seen: Survey, node: Node) -> tuple[str, ...]:
    """First names of the modules in whose forward the node ran, the outermost first."""
    modules = seen.owners.modules
    paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return tuple(seen.owners.first_name(modules[path]) for path in paths if path in modules)
