"""The role of each linear, from where its input comes from and where its output goes."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from flysurgery.walker.dataflow import Attention, Dataflow, Flow
from flysurgery.walker.linears import Call
from flysurgery.walker.operations import reached
from flysurgery.walker.target import OBSTACLES
from flysurgery.walker.trace import Trace


class _Judge:
    def __init__(self, trace: Trace, dataflow: Dataflow, samples: int):
        self.trace = trace
        self.samples = samples
        self.flows = dataflow.flows
        self.depends = dataflow.depends
        self.sums = dataflow.sums
        self.calls = dataflow.calls
        self.by_output = dataflow.attentions
        self.entered: dict[Node, list[Attention]] = {}
        self.scores: set[Node] = set()
        for attention in dataflow.attentions.values():
            self.scores |= attention.scores
            for _, operand in attention.operands:
                for origin in self.flows[operand]:
                    self.entered.setdefault(origin, []).append(attention)
        self.at_output = self._at_output()
        self.ffn_in, self.ffn_out = self._feed_forward_pairs()
        self.head_mlps = self._head_mlps() if dataflow.attentions else set()

    def verdict(self, call: Call) -> str:
        """The role, or the code of the obstacle where that role is no target."""
        found = self._verdict(call)
        return found if found in OBSTACLES or min(call.in_features, call.out_features) > 1 else "rank-one"

    def _verdict(self, call: Call) -> str:
        node, source = call.node, self.flows[call.source]
        entered = self.entered.get(node, [])
        if any(origin in self.scores for origin in source):
            return "talking-heads"
        if call.source not in self.depends:
            return "pool" if entered and _pools(entered) else "constant"
        if entered:
            return "pool" if _pools(entered) else "qkv"
        if self._one_row(call):
            return "head" if node in self.at_output else "pool"
        attentions = [self.by_output[origin] for origin in source if origin in self.by_output]
        if attentions:
            return "pool" if _pools(attentions) else "attn_out"
        if node in self.head_mlps:
            return "head"
        if node in self.ffn_in:
            return "ffn_in"
        if node in self.ffn_out:
            return "ffn_out"
        if node in self.at_output:
            return "head"
        return "patch-embedding" if source and all(origin in self.trace.inputs for origin in source) else "no-role"

    def _one_row(self, call: Call) -> bool:
        return 0 < call.rows <= self.samples

    def _feed_forward_pairs(self) -> tuple[set[Node], set[Node]]:
        first, second = set(), set()
        for call in self.calls.values():
            source = self.flows[call.source]
            if (
                self._one_row(call)
                or call.node in self.entered
                or any(origin in self.by_output or origin in self.scores for origin in source)
            ):
                continue
            before = {origin for origin, via in source.items() if origin in self.calls and via.nonlinear and not via.reduced}
            before = {origin for origin in before if not self._one_row(self.calls[origin])}  # a gate for whole channels is none
            if before:
                first |= before
                second.add(call.node)
        return first, second

    def _head_mlps(self) -> set[Node]:
        """The linears of MLPs that give the model's result for each token, as detectors' classes and boxes: no residual sum follows."""

        def before(node: Node) -> list[Node]:
            source = self.flows[self.calls[node].source]
            return [origin for origin, via in source.items() if via.nonlinear and origin in self.ffn_in]

        return reached(self.ffn_out & self.at_output, before)

    def _at_output(self) -> set[Node]:
        """The linears that give the model's result, with nothing but elementwise steps and pooling after them."""
        output = next(node for node in self.trace.graph.nodes if node.op == "output")
        given = (origin for node in output.all_input_nodes for origin in self.flows[node])
        summed = reached(given, lambda origin: self._added(origin) if origin in self.sums and self._adds_heads(self.sums[origin]) else ())
        return {origin for origin in summed if origin in self.calls}

    def _added(self, origin: Node) -> list[Node]:
        """The origins of what a sum adds up; none for anything else."""
        return [each for addend in self.sums.get(origin, ()) for each in addend]

    def _adds_heads(self, addends: tuple[Flow, Flow]) -> bool:
        """Whether a sum joins results (two heads averaged, a box and a correction) and is no residual connection, nor of one input."""
        (one, one_stream), (other, other_stream) = ((self._behind(flow), reached(flow, self._added)) for flow in addends)
        if one & other_stream or other & one_stream:
            return False
        return one.isdisjoint(other) or all(head in self.calls and self._one_row(self.calls[head]) for flow in addends for head in flow)

    def _behind(self, branch: Flow) -> set[Node]:
        """What the branch is computed from, back to the sums that it starts from."""

        def before(origin: Node) -> list[Node]:
            sources = [self.calls[origin].source] if origin in self.calls else [] if origin in self.sums else origin.all_input_nodes
            return [each for source in sources for each in self.flows.get(source, ())]

        return reached(branch, before)


def _pools(attentions: Iterable[Attention]) -> bool:
    return all(attention.single_query for attention in attentions)


def verdicts(trace: Trace, dataflow: Dataflow, samples: int) -> dict[Node, str]:
    """For each call, by its node: its role, or the code of the obstacle where that role is no target; ``samples`` is 0 if not known."""
    judge = _Judge(trace, dataflow, samples)
    return {node: judge.verdict(call) for node, call in dataflow.calls.items()}
