"""What takes the place of which module: all candidates of a model, and what is put in for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.fx import Node

from flysurgery.inference.attending import Attending, attention_of
from flysurgery.inference.call_forms import Seen, form_of, once_with_one_tensor
from flysurgery.inference.candidate import Candidate
from flysurgery.inference.find_groups import Findings
from flysurgery.inference.fused_block import Form, FusedAttended, FusedBlock, FusedPart
from flysurgery.inference.fused_modules import AttentionStep, FeedForwardStep, LayerNormStep, LinearResidualStep, Normalized, NormLinearStep
from flysurgery.inference.fused_patches import EmbeddingStep, PatchesStep
from flysurgery.inference.graph_steps import is_idle
from flysurgery.inference.groups import (
    Attended,
    Block,
    BlockPart,
    Embedding,
    FeedForwardGroup,
    Lone,
    LoneNorm,
    NormModule,
    ProjectionGroup,
    Scale,
)
from flysurgery.inference.match_block import modules_around
from flysurgery.inference.methods import StandInMethod, Together
from flysurgery.inference.operands import is_plain
from flysurgery.inference.standin import Condition, Passed, StandIn, Stepped, Through, Undropped, above, view
from flysurgery.surgery import Reason
from flysurgery.walker import shape_of


@dataclass(frozen=True)
class Replacement:
    """Candidates that are put in place together, the condition under which they run, and ``put``, which gives new modules by name.

    ``put`` gets the new modules of the places before it; a block comes after all places inside it. ``methods`` gets the same, and gives
    the methods that are set on modules, by the modules' names and their own.
    """

    candidates: tuple[Candidate, ...]
    condition: Condition
    put: Callable[[Mapping[str, StandIn]], dict[str, StandIn]]
    methods: Callable[[Mapping[str, StandIn]], dict[tuple[str, str], StandInMethod]] = lambda new: {}


Own = dict[str, Candidate]
"""The candidates of one part of a block, by their groups; "qkv" and "attention" may be missing."""


def block_replacement(model: nn.Module, found: Findings, block: Block, form: Form, candidates: Sequence[Own]) -> Replacement:
    """A proven block, with the candidates of its parts."""
    original = model.get_submodule(block.fqn)
    condition = Condition(original.modules())

    def put(new: Mapping[str, StandIn]) -> dict[str, StandIn]:
        parts = [_fused_part(model, found, part, form, own, new) for part, own in zip(block.parts, candidates, strict=True)]
        return {block.fqn: FusedBlock(original, parts, form, condition)}

    return Replacement(tuple(each for own in candidates for each in own.values()), condition, put)


def _fused_part(model: nn.Module, found: Findings, part: BlockPart, form: Form, own: Own, new: Mapping[str, StandIn]) -> FusedPart:
    """A part of a block, made by its decided candidates around the ``new`` modules inside it."""
    if isinstance(part, Lone):
        return FusedPart(new.get(part.fqn) or model.get_submodule(part.fqn))
    if isinstance(part, FeedForwardGroup):
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
    attending = Attending(step) if isinstance(step, AttentionStep) and step.enabled else None
    before = None if norm is None else new.get(norm) or model.get_submodule(norm)
    out = own["attn_out"].step
    assert isinstance(out, LinearResidualStep)  # it was built so
    return FusedAttended(before, inner, attending, out, form.handed[part.attention])


def feed_forward_replacement(model: nn.Module, found: Findings, group: FeedForwardGroup, candidate: Candidate) -> Replacement | Reason:
    """A feed-forward group outside of a proven block: one module that is the whole group, or a norm and the module that reads it."""
    whole = _common_module(found, group.nodes)
    norm = found.calls[group.norm.fqn]
    replaceable = whole is not None and (whole or is_plain(model))  # the model itself is not replaced, but gets another forward
    if whole is not None and replaceable and _consists_of(found, whole, group.nodes) and _takes(found.calls[whole], norm.first_input):
        condition = Condition(model.get_submodule(whole).modules())
        return Replacement((candidate,), condition, lambda new: {whole: Stepped(model.get_submodule(whole), candidate.step, condition)})
    behind = _common_module(found, group.nodes - {group.norm_node})
    if behind is None or not _consists_of(found, behind, group.nodes - {group.norm_node}):
        return Reason("open-group", "no module consists of its two linears and its activation alone")
    return _pair(model, found, group.norm.fqn, behind, candidate)


def projection_replacement(model: nn.Module, found: Findings, group: ProjectionGroup, candidate: Candidate) -> Replacement | Reason:
    """A norm and the projection that reads it, outside of a proven block."""
    if group.linear in found.seen.switches:
        return Reason("weight-read", "its parent reads the weight, which only a whole block can change")
    return _pair(model, found, group.norm.fqn, group.linear, candidate)


def norm_replacement(model: nn.Module, found: Findings, group: LoneNorm, candidate: Candidate) -> Replacement | Reason:
    """A module that computes only a norm, and is called once with one tensor."""
    fqn, calls = group.norm.fqn, found.calls[group.norm.fqn]
    if not _consists_of(found, fqn, frozenset({group.node})) or not once_with_one_tensor(calls):
        return Reason("open-norm", "its module is called more than once, or does something else as well")
    original = model.get_submodule(fqn)
    condition = Condition([original])
    return Replacement((candidate,), condition, lambda new: {fqn: Stepped(original, candidate.step, condition)})


def patches_replacement(model: nn.Module, candidate: Candidate) -> Replacement:
    """A convolution by itself."""
    original = model.get_submodule(candidate.fqn)
    condition = Condition([original])
    return Replacement((candidate,), condition, lambda new: {candidate.fqn: Stepped(original, candidate.step, condition)})


def embedding_replacement(module: nn.Module, group: Embedding, together: Together, candidate: Candidate) -> Replacement:
    """A method behind a patch embedding, in the method of the same module that calls both.

    A new method is set on the module. It runs on a view of the module in which one step replaces the two. All other calls of the patch
    embedding, or of the method behind it, use the model's own.
    """
    called = [module.get_submodule(fqn) for fqn in group.called]

    def methods(new: Mapping[str, StandIn]) -> dict[tuple[str, str], StandInMethod]:
        start = f"{group.fqn}." if group.fqn else ""
        others = {fqn.removeprefix(start): each for fqn, each in new.items() if fqn.startswith(start)}
        condition = Condition(called, above(module, (group.patches, *others)))
        return {(group.fqn, group.caller): StandInMethod(module, group.caller, together.replaced(candidate.step, others), condition)}

    return Replacement((candidate,), Condition(called), lambda new: {}, methods)


def _pair(model: nn.Module, found: Findings, norm: str, behind: str, candidate: Candidate) -> Replacement | Reason:
    """A norm, and the module behind it that also computes the norm."""
    if not once_with_one_tensor(found.calls[norm]):
        return Reason("calls", f"{norm} is not called once with one tensor alone")
    if not _takes(found.calls[behind], found.calls[norm].first_result):
        return Reason("call-form", f"{behind} is not called once with the normed input alone")
    first, second = model.get_submodule(norm), model.get_submodule(behind)
    holders = [model.get_submodule(fqn.rpartition(".")[0]) for fqn in (norm, behind)]
    condition = Condition([*first.modules(), *second.modules()], holders)
    return Replacement(
        (candidate,), condition, lambda new: {norm: Passed(first, condition), behind: Stepped(second, candidate.step, condition)}
    )


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


OWN_FORWARD = Reason("own-forward", "the model itself has a forward that was set on it, in whose place no other is put")


@dataclass
class Replacements:
    """The places, and the groups without one: kind, name, and the reason."""

    replacements: list[Replacement] = field(default_factory=list)
    without: list[tuple[str, str, Reason]] = field(default_factory=list)


class Builder:
    """Makes the candidates of ``model``."""

    def __init__(self, model: nn.Module, found: Findings) -> None:
        self.model, self.found = model, found
        self.sources = {call.node: call.source for call in found.seen.calls}

    def build(self) -> Replacements:
        """Blocks, the inner ones first. They follow the places that they do not cover, which may lie inside them."""
        found, built = self.found, Replacements()
        built.without = [(group, fqn, reason) for fqn, (group, reason) in found.reasons.items()]
        covered, blocks = set[str](), list[Replacement]()
        for block in sorted(found.blocks.values(), key=lambda block: len(block.fqn), reverse=True):
            form = form_of(block, found.calls) if block.fqn or is_plain(self.model) else OWN_FORWARD
            if isinstance(form, Reason):
                found.open_blocks |= {part.out.linear: form for part in block.parts if isinstance(part, Attended)}
                continue
            candidates = [self._of_part(part) for part in block.parts]
            covered |= {candidate.fqn for own in candidates for candidate in own.values()}
            blocks.append(block_replacement(self.model, found, block, form, candidates))
        for fqn, projection in found.projections.items():
            if fqn not in covered:
                candidate = self._projection(projection)
                self._add(built, candidate, projection_replacement(self.model, found, projection, candidate))
        for fqn, group in found.feed_forwards.items():
            if fqn not in covered:
                candidate = self._feed_forward(group, whole=False)
                self._add(built, candidate, feed_forward_replacement(self.model, found, group, candidate))
        built.without += [("attn_out", fqn, found.open_blocks[fqn]) for fqn in found.outs if fqn not in covered]
        for norm in found.norms.values():
            candidate = self._norm(norm)
            self._add(built, candidate, norm_replacement(self.model, found, norm, candidate))
        for fqn in found.patches:
            candidate = self._patches(fqn)
            self._add(built, candidate, patches_replacement(self.model, candidate))
        built.replacements += blocks
        for fqn, embedding in found.embeddings.items():  # last, so that it sees the modules that were put below its module
            built.replacements.append(self._embedding(fqn, embedding))
        return built

    @staticmethod
    def _add(built: Replacements, candidate: Candidate, replacement: Replacement | Reason) -> None:
        if isinstance(replacement, Reason):
            built.without.append((candidate.group, candidate.fqn, replacement))
        else:
            built.replacements.append(replacement)

    def _of_part(self, part: BlockPart) -> Own:
        if isinstance(part, Lone):
            return {}
        if isinstance(part, FeedForwardGroup):
            return {"ffn": self._feed_forward(part, whole=True)}
        candidates = {} if part.projection is None else {"qkv": self._projection(part.projection)}
        attention = attention_of(self.found.seen, part.attention)
        if attention is not None:
            candidates["attention"] = self._attention(part.attention, attention)
        out = LinearResidualStep(self._module(part.out.linear), self._scale(part.out.tail.scale))
        shapes = self._rows(self.sources[part.out.branch]), self._rows(part.out.branch)
        return candidates | {"attn_out": Candidate("attn_out", part.out.linear, out, shapes)}

    def _attention(self, fqn: str, node: Node) -> Candidate:
        scale = node.kwargs.get("scale")
        shapes = tuple(shape for each in node.args[:3] if isinstance(each, Node) and (shape := shape_of(each)) is not None)
        return Candidate("attention", fqn, AttentionStep(scale if isinstance(scale, float) else None), shapes)

    def _projection(self, group: ProjectionGroup) -> Candidate:
        step = NormLinearStep(self._module(group.norm.fqn), group.norm.eps, self._module(group.linear))
        return Candidate("qkv", group.linear, step, (self._rows(group.source),))

    def _feed_forward(self, group: FeedForwardGroup, *, whole: bool) -> Candidate:
        norm, inner = self._normalized(group.norm), group.inner and self._normalized(group.inner)
        first, second = tuple(map(self._module, group.first)), self._module(group.second)
        scale = self._scale(group.tail.scale) if whole else None
        step = FeedForwardStep(norm, first, group.gate, group.activation, inner, second, scale, whole)
        return Candidate("ffn", group.second, step, (self._rows(group.source),))

    def _norm(self, group: LoneNorm) -> Candidate:
        step = LayerNormStep(self._module(group.norm.fqn), group.norm.eps)
        return Candidate("norm", group.norm.fqn, step, (shape_of(group.node) or (),))

    def _patches(self, fqn: str) -> Candidate:
        convolution = self._module(fqn)
        assert isinstance(convolution, nn.Conv2d)  # the match has seen to it
        return Candidate("patches", fqn, PatchesStep(convolution), (tuple(self.found.calls[fqn].first_input.shape),))

    def _embedding(self, fqn: str, group: Embedding) -> Replacement:
        module = self._module(group.fqn)
        convolution = module.get_submodule(group.convolution)
        assert isinstance(convolution, nn.Conv2d)  # the match has seen to it
        together = Together(module, group.method, group.patches)
        position, prefix = group.position and group.position.of(module), tuple(each.of(module) for each in group.prefix)
        step = EmbeddingStep(together, convolution, position, prefix, group.image)
        images = self.found.calls[fqn].first_input.shape
        return embedding_replacement(module, group, together, Candidate("patches", fqn, step, (tuple(images),)))

    def _normalized(self, norm: NormModule) -> Normalized:
        return self._module(norm.fqn), norm.eps

    def _module(self, fqn: str) -> nn.Module:
        return self.model.get_submodule(fqn)

    def _scale(self, scale: Scale | None) -> tuple[nn.Module, str] | None:
        return None if scale is None else scale.of(self.model)

    def _rows(self, node: Node) -> tuple[int, ...]:
        *batch, features = shape_of(node) or (0, 0)
        return (math.prod(batch), features)
