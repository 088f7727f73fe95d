"""What takes which module's place, once it is decided which groups are fused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.fx import Node

from flysurgery.inference.attending import Attending
from flysurgery.inference.block import modules_around
from flysurgery.inference.candidate import Candidate
from flysurgery.inference.chain import is_idle
from flysurgery.inference.forms import Seen, once_with_one_tensor
from flysurgery.inference.found import Block, Embedding, FeedForward, Lone, LoneNorm, Part, Projection
from flysurgery.inference.fused_block import Form, FusedAttended, FusedBlock, FusedPart
from flysurgery.inference.kernels import is_plain
from flysurgery.inference.look import Findings
from flysurgery.inference.methods import StandInMethod, Together
from flysurgery.inference.standing import Condition, Passed, StandIn, Stepped, Through, Undropped, above, view
from flysurgery.inference.steps import Attention, LinearResidual
from flysurgery.surgery import Reason


@dataclass(frozen=True)
class Place:
    """Candidates that are put in place together, the condition under which they run, and ``put``: new modules by name.

    ``put`` is given those of the places before it; a block comes behind all places that lie in it. So is ``methods``, which
    gives those that are set on modules, by the modules' names and their own.
    """

    candidates: tuple[Candidate, ...]
    condition: Condition
    put: Callable[[Mapping[str, StandIn]], dict[str, StandIn]]
    methods: Callable[[Mapping[str, StandIn]], dict[tuple[str, str], StandInMethod]] = lambda new: {}


Own = dict[str, Candidate]
"""The candidates of one part of a block, by their groups; "qkv" and "attention" may lack."""


def block_place(model: nn.Module, found: Findings, block: Block, form: Form, candidates: Sequence[Own]) -> Place:
    """A proven block, with the candidates of its parts."""
    original = model.get_submodule(block.fqn)
    condition = Condition(original.modules())

    def put(new: Mapping[str, StandIn]) -> dict[str, StandIn]:
        parts = [_fused_part(model, found, part, form, own, new) for part, own in zip(block.parts, candidates, strict=True)]
        return {block.fqn: FusedBlock(original, parts, form, condition)}

    return Place(tuple(each for own in candidates for each in own.values()), condition, put)


def _fused_part(model: nn.Module, found: Findings, part: Part, form: Form, own: Own, new: Mapping[str, StandIn]) -> FusedPart:
    """A part of a block as its candidates, now decided, make it, and around the ``new`` modules that lie in it."""
    if isinstance(part, Lone):
        return FusedPart(new.get(part.fqn) or model.get_submodule(part.fqn))
    if isinstance(part, FeedForward):
        return FusedPart(own["ffn"].step)

    def below(fqn: str) -> str:
        return fqn[len(part.attention) + 1 :]

    norm = part.norm
    attention = model.get_submodule(part.attention)
    dropouts = {fqn: Undropped(each) for fqn, each in attention.named_modules() if type(each) is nn.Dropout and is_plain(each)}
    inside = {below(fqn): module for fqn, module in new.items() if fqn.startswith(f"{part.attention}.")}
    replaced: dict[str, nn.Module] = {**dropouts, **inside, below(part.out.linear): Through()}
    attributes = {}
    if part.projection is not None and own["qkv"].step.enabled:
        replaced[below(part.projection.linear)] = own["qkv"].step
        switch = found.seen.switches.get(part.projection.linear)
        if switch is not None:
            attributes[below(switch.module_fqn), switch.attribute] = switch.value
        if norm is None:
            replaced[below(part.projection.norm.fqn)] = Through()
        norm = None
    inner = view(attention, replaced, attributes)
    step = own["attention"].step if "attention" in own else None
    attending = Attending(step) if isinstance(step, Attention) and step.enabled else None
    before = None if norm is None else new.get(norm) or model.get_submodule(norm)
    out = own["attn_out"].step
    assert isinstance(out, LinearResidual)  # as it was built
    return FusedAttended(before, inner, attending, out, form.handed[part.attention])


def feed_forward_place(model: nn.Module, found: Findings, group: FeedForward, candidate: Candidate) -> Place | Reason:
    """A feed-forward group outside of a proven block: one module that is all of it, or a norm and the module that reads it."""
    whole = _common_module(found, group.nodes)
    norm = found.calls[group.norm.fqn]
    replaceable = whole is not None and (whole or is_plain(model))  # the model itself is not replaced, but gets another forward
    if whole is not None and replaceable and _consists_of(found, whole, group.nodes) and _takes(found.calls[whole], norm.first_input):
        condition = Condition(model.get_submodule(whole).modules())
        return Place((candidate,), condition, lambda new: {whole: Stepped(model.get_submodule(whole), candidate.step, condition)})
    behind = _common_module(found, group.nodes - {group.norm_node})
    if behind is None or not _consists_of(found, behind, group.nodes - {group.norm_node}):
        return Reason("open-group", "no module consists of its two linears and its activation alone")
    return _pair(model, found, group.norm.fqn, behind, candidate)


def projection_place(model: nn.Module, found: Findings, group: Projection, candidate: Candidate) -> Place | Reason:
    """A norm and the projection that reads it, outside of a proven block."""
    if group.linear in found.seen.switches:
        return Reason("weight-read", "its parent reads the weight, which only a whole block can change")
    return _pair(model, found, group.norm.fqn, group.linear, candidate)


def norm_place(model: nn.Module, found: Findings, group: LoneNorm, candidate: Candidate) -> Place | Reason:
    """A norm that is all that its module does, for the one tensor with which this is called once."""
    fqn, calls = group.norm.fqn, found.calls[group.norm.fqn]
    if not _consists_of(found, fqn, frozenset({group.node})) or not once_with_one_tensor(calls):
        return Reason("open-norm", "its module is called more than once, or does something else as well")
    original = model.get_submodule(fqn)
    condition = Condition([original])
    return Place((candidate,), condition, lambda new: {fqn: Stepped(original, candidate.step, condition)})


def patches_place(model: nn.Module, candidate: Candidate) -> Place:
    """A convolution by itself."""
    original = model.get_submodule(candidate.fqn)
    condition = Condition([original])
    return Place((candidate,), condition, lambda new: {candidate.fqn: Stepped(original, candidate.step, condition)})


def embedding_place(module: nn.Module, group: Embedding, together: Together, candidate: Candidate) -> Place:
    """A method behind a patch embedding, in the method of the same module that calls both.

    That one is set on the module, and runs on a view of it in which the two are a step. Whatever else calls the patch embedding, or the
    method behind it, meets the model's own.
    """
    called = [module.get_submodule(fqn) for fqn in group.called]

    def methods(new: Mapping[str, StandIn]) -> dict[tuple[str, str], StandInMethod]:
        start = f"{group.fqn}." if group.fqn else ""
        others = {fqn.removeprefix(start): each for fqn, each in new.items() if fqn.startswith(start)}
        condition = Condition(called, above(module, (group.patches, *others)))
        return {(group.fqn, group.caller): StandInMethod(module, group.caller, together.replaced(candidate.step, others), condition)}

    return Place((candidate,), Condition(called), lambda new: {}, methods)


def _pair(model: nn.Module, found: Findings, norm: str, behind: str, candidate: Candidate) -> Place | Reason:
    """A norm, and the module behind it that does its work as well."""
    if not once_with_one_tensor(found.calls[norm]):
        return Reason("calls", f"{norm} is not called once with one tensor alone")
    if not _takes(found.calls[behind], found.calls[norm].first_result):
        return Reason("call-form", f"{behind} is not called once with the normed input alone")
    first, second = model.get_submodule(norm), model.get_submodule(behind)
    holders = [model.get_submodule(fqn.rpartition(".")[0]) for fqn in (norm, behind)]
    condition = Condition([*first.modules(), *second.modules()], holders)
    return Place((candidate,), condition, lambda new: {norm: Passed(first, condition), behind: Stepped(second, candidate.step, condition)})


def _takes(calls: Seen, value: object) -> bool:
    return once_with_one_tensor(calls) and calls.first_input is value


def _common_module(found: Findings, nodes: frozenset[Node]) -> str | None:
    """The innermost module in whose forward all nodes run."""
    first, *others = [modules_around(found.seen, node) for node in nodes if not is_idle(node)]
    common = [fqn for fqn in first if all(fqn in other for other in others)]
    return common[-1] if common else None


def _consists_of(found: Findings, fqn: str, nodes: frozenset[Node]) -> bool:
    inside = [node for node in found.seen.trace.graph.nodes if fqn in modules_around(found.seen, node)]
    return all(node in nodes or is_idle(node) or not node.users for node in inside)
