"""What takes which module's place, once it is decided which groups are fused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.fx import Node

from flysurgery.inference.attending import Attending
from flysurgery.inference.block import modules_around
from flysurgery.inference.candidate import Candidate
from flysurgery.inference.chain import is_idle
from flysurgery.inference.forms import Seen, once_with_one_tensor
from flysurgery.inference.found import Block, FeedForward, Projection
from flysurgery.inference.fused_block import Form, FusedBlock
from flysurgery.inference.look import Findings
from flysurgery.inference.standing import Condition, Passed, Stepped, Through, view
from flysurgery.inference.steps import Attention
from flysurgery.surgery import Reason


@dataclass(frozen=True)
class Place:
    """Candidates that are put in place together, the condition under which they run, and ``put``: new modules by name."""

    candidates: tuple[Candidate, ...]
    condition: Condition
    put: Callable[[], dict[str, nn.Module]]


def block_place(model: nn.Module, found: Findings, block: Block, form: Form, candidates: dict[str, Candidate]) -> Place:
    """A proven block, with the candidates by their groups; "qkv" and "attention" may lack."""
    original, attention, norm = (model.get_submodule(fqn) for fqn in (block.fqn, block.attention, block.norm.fqn))
    condition = Condition(original.modules())

    def below(fqn: str) -> str:
        return fqn[len(block.attention) + 1 :]

    def put() -> dict[str, nn.Module]:
        replaced: dict[str, nn.Module] = {below(block.out.linear): Through()}
        attributes = {}
        projects = "qkv" in candidates and candidates["qkv"].step.enabled
        if projects and block.projection is not None:
            replaced[below(block.projection.linear)] = candidates["qkv"].step
            switch = found.seen.switches.get(block.projection.linear)
            if switch is not None:
                attributes[below(switch.module_fqn), switch.attribute] = switch.value
        steps = candidates["attn_out"].step, candidates["ffn"].step
        inner = view(attention, replaced, attributes)
        attention_step = candidates["attention"].step if "attention" in candidates else None
        attending = Attending(attention_step) if isinstance(attention_step, Attention) and attention_step.enabled else None
        return {block.fqn: FusedBlock(original, None if projects else norm, inner, attending, *steps, form, condition)}

    return Place(tuple(candidates.values()), condition, put)


def feed_forward_place(model: nn.Module, found: Findings, group: FeedForward, candidate: Candidate) -> Place | Reason:
    """A feed-forward group outside of a proven block: one module that is all of it, or a norm and the module that reads it."""
    whole = _common_module(found, group.nodes)
    norm = found.calls[group.norm.fqn]
    if whole is not None and _consists_of(found, whole, group.nodes) and _takes(found.calls[whole], norm.first_input):
        condition = Condition(model.get_submodule(whole).modules())
        return Place((candidate,), condition, lambda: {whole: Stepped(model.get_submodule(whole), candidate.step, condition)})
    behind = _common_module(found, group.nodes - {group.norm_node})
    if behind is None or not _consists_of(found, behind, group.nodes - {group.norm_node}):
        return Reason("open-group", "no module consists of its two linears and its activation alone")
    if not _takes(found.calls[behind], norm.first_result):
        return Reason("call-form", f"{behind} is not called once with the normed input alone")
    return _pair(model, group.norm.fqn, behind, candidate)


def projection_place(model: nn.Module, found: Findings, group: Projection, candidate: Candidate) -> Place | Reason:
    """A norm and the projection that reads it, outside of a proven block."""
    if group.linear in found.seen.switches:
        return Reason("weight-read", "its parent reads the weight, which only a whole block can change")
    if not _takes(found.calls[group.linear], found.calls[group.norm.fqn].first_result):
        return Reason("call-form", f"{group.linear} is not called once with the normed input alone")
    return _pair(model, group.norm.fqn, group.linear, candidate)


def patches_place(model: nn.Module, candidate: Candidate) -> Place:
    """A convolution by itself."""
    original = model.get_submodule(candidate.fqn)
    condition = Condition([original])
    return Place((candidate,), condition, lambda: {candidate.fqn: Stepped(original, candidate.step, condition)})


def _pair(model: nn.Module, norm: str, behind: str, candidate: Candidate) -> Place:
    first, second = model.get_submodule(norm), model.get_submodule(behind)
    condition = Condition([*first.modules(), *second.modules()])
    return Place((candidate,), condition, lambda: {norm: Passed(first, condition), behind: Stepped(second, candidate.step, condition)})


def _takes(calls: Seen, value: object) -> bool:
    return once_with_one_tensor(calls) and calls.first_input is value


def _common_module(found: Findings, nodes: frozenset[Node]) -> str | None:
    """The innermost module in whose forward all nodes run, the model itself excepted."""
    first, *others = [modules_around(found.seen, node) for node in nodes if not is_idle(node)]
    common = [fqn for fqn in first if fqn and all(fqn in other for other in others)]
    return common[-1] if common else None


def _consists_of(found: Findings, fqn: str, nodes: frozenset[Node]) -> bool:
    inside = [node for node in found.seen.trace.graph.nodes if fqn in modules_around(found.seen, node)]
    return all(node in nodes or is_idle(node) or not node.users for node in inside)
