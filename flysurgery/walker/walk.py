"""Find the linear maps of a model, with their roles and the obstacles to replacing them."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from flysurgery.errors import WalkError
from flysurgery.walker.attention import separating
from flysurgery.walker.dataflow import Attention, Dataflow, Flow
from flysurgery.walker.example import Example, example_input, positional
from flysurgery.walker.layout import split_of
from flysurgery.walker.linears import (
    OBSTACLES,
    ROLES,
    Call,
    Obstacle,
    Owners,
    Role,
    Switch,
    Target,
    call_of,
    module_obstacles,
    read_elsewhere,
    set_switches,
)
from flysurgery.walker.operations import reached
from flysurgery.walker.trace import Trace, on_device_of, shadow, trace


@dataclass(frozen=True)
class Survey:
    """A traced model: its graph, who owns what in it, its multiplications by a weight, and the role of each.

    ``double`` is the stand-in that was traced, with the model's tensors and ``switches`` set; ``example`` are the inputs, on its device.
    ``switches`` has the linears' names as keys, ``verdicts`` the nodes of ``calls``: a role, or an obstacle's code.
    """

    double: nn.Module
    example: tuple[Any, ...]
    trace: Trace
    owners: Owners
    calls: list[Call]
    verdicts: dict[Node, str]
    dataflow: Dataflow
    switches: dict[str, Switch]

    @property
    def roles(self) -> dict[Node, Role]:
        """The role of each of ``calls``, by its node."""
        return {node: verdict if verdict in ROLES else "other" for node, verdict in self.verdicts.items()}


def survey(model: nn.Module, example: Example | None = None, *, prepare: Callable[[nn.Module], None] | None = None) -> Survey:
    """Trace ``model`` in eval mode on fake tensors, and find its linear maps and their roles. The model stays as it is.

    ``prepare`` may change modules of the stand-in before it is traced. Raises WalkError as ``walk``.
    """
    if not isinstance(model, nn.Module):
        raise WalkError(f"expected a torch.nn.Module to walk, got {type(model).__name__}")
    double = shadow(model)
    inputs = on_device_of(double, positional(model, example_input(model) if example is None else example))
    if any(isinstance(each, Tensor) and each.numel() == 0 for each in inputs):
        raise WalkError(f"the example of {type(model).__name__} is empty; give one with at least one sample")
    if prepare is not None:
        prepare(double)
    switches = set_switches(double)
    traced, owners = trace(double, inputs), Owners(double)
    calls = [call for node in traced.graph.nodes if (call := call_of(traced, owners, node)) is not None]
    dataflow = Dataflow(traced, calls)
    judge = _Judge(traced, dataflow, _samples(inputs, calls))
    return Survey(double, inputs, traced, owners, calls, {call.node: judge.verdict(call) for call in calls}, dataflow, switches)


def _samples(inputs: tuple[Any, ...], calls: Iterable[Call]) -> int:
    """The number of samples in the example, 0 where it is not known."""
    first = next((each for each in inputs if isinstance(each, Tensor)), None)
    if first is None or first.ndim < 2:
        return 0
    is_rows = first.ndim == 2 and first.is_floating_point() and all(call.rows <= len(first) for call in calls)
    return 0 if is_rows else len(first)  # rows are tokens of one sample, for all that shows


def walk(model: nn.Module, example: Example | None = None) -> tuple[Target, ...]:
    """Find every linear map of ``model``, in the order of execution, and those that it never runs, at the end.

    The forward pass is traced to a graph of operators on fake tensors, in eval mode: nothing is computed, no weight is copied, and
    the model, its mode and the random state stay as they are. A model with its weights on the meta device will do. Roles follow from
    the graph alone, in which each ``nn.MultiheadAttention`` is a ``SeparateAttention``: a linear whose output reaches the query, key or
    value of attention is ``qkv``, the one after attention is ``attn_out``, one linear, a nonlinearity or gate, and another linear are
    ``ffn_in`` and ``ffn_out``. A linear that gives the result is the ``head``; everything else is ``other``, with an obstacle that says
    what it is. Targets with obstacles are in the result: whoever replaces layers must leave those alone that are ``blocked``.

    Costs one trace: about a second for a ViT of any size.

    Args:
        model: any module; timm's and vit-pytorch's Vision Transformers need no example.
        example: the input, a tuple of all positional inputs, or a mapping of inputs by name. Only shapes and dtypes count, and the device
            is the model's. None: ``example_input(model)``. ``Target.rows`` is for these shapes.

    Raises:
        WalkError: no example is known for the model, or its forward pass cannot be traced; the message holds the exporter's reason.
    """
    return targets_of(model, survey(model, example, prepare=separating(model)))


def targets_of(model: nn.Module, seen: Survey) -> tuple[Target, ...]:
    """The targets of a model that was surveyed already, as ``walk`` gives them."""
    owners, roles = seen.owners, seen.roles
    read = read_elsewhere(seen.trace, owners, seen.calls)
    named = dict(model.named_modules())
    modules = owners.modules | named  # the model's own have their hooks
    # factors do not take the nested tensors that an nn.TransformerEncoder may give its layers
    nested = [fqn for fqn, each in named.items() if isinstance(each, nn.TransformerEncoder) and getattr(each, "use_nested_tensor", False)]
    grouped: dict[str, list[Call]] = {}
    for call in seen.calls:
        grouped.setdefault(call.fqn, []).append(call)
    targets = []
    for fqn, group in grouped.items():
        call = min(group, key=lambda call: ROLES.index(roles[call.node]))
        role, verdict = roles[call.node], seen.verdicts[call.node]
        module = modules.get(fqn)
        found = [OBSTACLES[verdict]] if verdict in OBSTACLES else []
        splits = {split_of(member, seen.dataflow) for member in group} if role == "qkv" else set()
        targets.append(
            Target(
                fqn=fqn,
                role=role,
                in_features=call.in_features,
                out_features=call.out_features,
                bias=call.bias if module is None else module._parameters.get("bias") is not None,
                calls=len(group),
                rows=sum(member.rows for member in group),
                obstacles=(*found, *_weight_obstacles(call, module, owners, fqn in read)),
                split=splits.pop() if len(splits) == 1 else None,  # on which all calls agree
                aliases=owners.further_names(fqn),
                switches=(
                    *((seen.switches[fqn],) if fqn in seen.switches and fqn not in read else ()),
                    *(Switch(each, "use_nested_tensor", False) for each in nested if not each or fqn.startswith(f"{each}.")),
                ),
            )
        )
    return (*targets, *_idle(model, owners, grouped))


def _weight_obstacles(call: Call, module: Any, owners: Owners, is_read: bool) -> list[Obstacle]:
    if call.kind == "raw":
        return [OBSTACLES["raw-weight"]]
    after = {"tied": len(owners.holders(f"{call.fqn}.weight")) > 1, "weight-read": is_read}
    found = [OBSTACLES["conv1x1"]] if call.kind == "conv" else []
    return [*found, *module_obstacles(module), *(OBSTACLES[code] for code, is_there in after.items() if is_there)]


def _idle(model: nn.Module, owners: Owners, used: Collection[str]) -> list[Target]:
    """The nn.Linear modules that the forward pass does not use."""
    return [
        Target(
            fqn=fqn,
            role="other",
            in_features=module.in_features,
            out_features=module.out_features,
            bias=module._parameters.get("bias") is not None,
            calls=0,
            rows=0,
            obstacles=(OBSTACLES["not-called"], *module_obstacles(module)),
            aliases=owners.further_names(fqn),
        )
        for fqn, module in model.named_modules()
        if isinstance(module, nn.Linear) and fqn not in used
    ]


class _Judge:
    """Gives each call its role, from where its input comes from and where its output goes. ``samples`` is 0 if not known."""

    def __init__(self, trace: Trace, dataflow: Dataflow, samples: int):
        self.trace, self.dataflow, self.samples = trace, dataflow, samples
        self.flows, self.sums, self.calls = dataflow.flows, dataflow.sums, dataflow.calls
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
        if call.source not in self.dataflow.depends:
            return "pool" if entered and _pools(entered) else "constant"
        if entered:
            return "pool" if _pools(entered) else "qkv"
        if self._one_row(call):
            return "head" if node in self.at_output else "pool"
        attentions = [self.dataflow.attentions[origin] for origin in source if origin in self.dataflow.attentions]
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
        first, second = set[Node](), set[Node]()
        for call in self.calls.values():
            source = self.flows[call.source]
            attended = any(origin in self.dataflow.attentions or origin in self.scores for origin in source)
            if self._one_row(call) or call.node in self.entered or attended:
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
