"""What replaces which modules: the candidates of a model, and how they are put in place."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import Node

from flysurgery import ops
from flysurgery.errors import Reason
from flysurgery.inference.clock import Shapes
from flysurgery.inference.find_groups import METHOD, Embedding, Findings
from flysurgery.inference.first_tokens import FirstTokens, FirstTokensForward, Unchanged, last_reading
from flysurgery.inference.fused_block import Attending, Form, FusedAttended, FusedBlock, attention_among, form_of
from flysurgery.inference.fused_modules import EmbeddingStep, Input, Normalized, NormStep, Parameter, PatchesStep, Step
from flysurgery.inference.graph import UnfitError, attempt, below
from flysurgery.inference.match import Attended, BlockPart, FeedForwardGroup, NormModule, ProjectionGroup
from flysurgery.inference.standin import Condition, Fused, Passed, StandInMethod, Stepped, Together, Undropped, above, is_plain, view
from flysurgery.walker import shape_of

OWN_FORWARD = Reason("own-forward", "the model itself has a forward that was set on it, in whose place no other is put")


@dataclass
class Candidate:
    """One group: its kind, the name of its last linear, its fused module, and the shapes of its inputs.

    ``reason`` says why the group is left as it is; None where it is fused. ``launches`` names what its launches compute.
    """

    group: str
    fqn: str
    step: Step
    shapes: Shapes
    reason: Reason | None = None
    plain_ms: float | None = None
    fused_ms: float | None = None
    launches: tuple[str, ...] = ()

    @property
    def gain_ms(self) -> float:
        """What fusion saves; 0 where nothing was measured."""
        return (self.plain_ms or 0.0) - (self.fused_ms or 0.0)

    def leave(self, reason: Reason) -> None:
        """Decide that the group is left as it is."""
        self.reason, self.step.enabled = reason, False


@dataclass(frozen=True)
class Replacement:
    """Candidates that are put in place together, the condition under which they run, and ``put``, which adds what replaces them.

    ``put`` sees what the replacements before it added, those inside a block among them. One without candidates depends on these alone.
    """

    candidates: tuple[Candidate, ...]
    condition: Condition
    put: Callable[[Fused], None]


def find_replacements(model: nn.Module, found: Findings, *, trains: bool = False) -> "Replacements":
    """The candidates of ``model``. Blocks, the inner ones first, follow the replacements that they do not cover, which may lie inside.

    ``trains`` asks for steps with gradients, which run in training mode as well.
    """
    return Replacements(model, found, trains)


class Replacements:
    """All replacements, and the groups without one: kind, name, and the reason."""

    def __init__(self, model: nn.Module, found: Findings, trains: bool) -> None:
        self.model, self.found, self.module, self.trains = model, found, model.get_submodule, trains
        self.replacements = list[Replacement]()
        self.without = [(group, fqn, reason) for fqn, (group, reason) in found.reasons.items()]
        self.tokens = last_reading(found, trains=trains) if is_plain(model) else None
        blocks = self._blocks()
        covered = {candidate.fqn for block in blocks for candidate in block.candidates}
        kinds: dict[str, tuple[Mapping[str, Any], Callable[[Any], Replacement]]] = {
            "qkv": (found.projections, self._lone_projection),
            "ffn": (found.feed_forwards, self._lone_feed_forward),
            "norm": (found.norms if trains else {}, self._lone_norm),
            "patches": ({fqn: fqn for fqn in found.patches}, self._patches),
        }
        for kind, (groups, make) in kinds.items():
            for fqn, group in groups.items():
                made = attempt(make, group) if fqn not in covered else None
                if isinstance(made, Reason):
                    self.without.append((kind, fqn, made))
                elif made is not None:
                    self.replacements.append(made)
        self.replacements += blocks
        for fqn, embedding in found.embeddings.items():  # last, so that it sees the modules that were put below its module
            self.replacements.append(self._embedding(fqn, embedding))
        if self.tokens is not None:
            self.replacements.append(self._first_tokens(self.tokens))
        self.candidates = [candidate for replacement in self.replacements for candidate in replacement.candidates]
        for candidate in self.candidates:
            candidate.step.trains = trains

    def fused(self) -> Fused:
        """What is put into the model by all replacements but those whose candidates are all left as they are."""
        fused = Fused({}, {})
        for each in self.replacements:
            if not each.candidates or any(candidate.reason is None for candidate in each.candidates):
                each.put(fused)
        return fused

    def _blocks(self) -> list[Replacement]:
        """The proven blocks, with the candidates of their parts."""
        found, blocks = self.found, list[Replacement]()
        for fqn, parts in sorted(found.blocks.items(), key=lambda block: len(block[0]), reverse=True):
            form = attempt(form_of, fqn, parts, found.calls) if fqn or is_plain(self.model) else OWN_FORWARD
            if isinstance(form, Reason):
                self.without += [("attn_out", part.out.linear, form) for part in parts if isinstance(part, Attended)]
            else:
                blocks.append(self._block(fqn, parts, form))
        return blocks

    def _block(self, fqn: str, parts: Sequence[BlockPart], form: Form) -> Replacement:
        original = self.module(fqn)
        condition = Condition(original.modules(), itself=original, trains=self.trains)
        candidates = [self._of_part(part) for part in parts]

        def put(fused: Fused) -> None:
            made = [self._part(part, form, own, fused.modules) for part, own in zip(parts, candidates, strict=True)]
            fused.modules[fqn] = FusedBlock(original, made, form, condition)

        return Replacement(tuple(each for own in candidates for each in own.values()), condition, put)

    def _of_part(self, part: BlockPart) -> dict[str, Candidate]:
        """The candidates of one part of a block, by their groups; "qkv" and "attention" may be missing."""
        if isinstance(part, str):
            return {}
        if isinstance(part, FeedForwardGroup):
            return {"ffn": self._feed_forward(part, whole=True)}
        candidates = {} if part.projection is None else {"qkv": self._projection(part.projection)}
        attention = attention_among(self.found.inside(part.attention))
        if attention is not None:
            scale = attention.kwargs.get("scale")
            step = Step(ops.Attention, Input(0), Input(1), scale if isinstance(scale, float) else None)
            shapes = tuple(shape for each in attention.args[:3] if isinstance(each, Node) and (shape := shape_of(each)) is not None)
            candidates["attention"] = Candidate("attention", part.attention, step, shapes)
        out, scale = part.out, part.out.tail.scale
        step = Step(ops.LinearResidual, self.module(out.linear), Input(0), scale and _parameter(self.model, scale))
        return candidates | {"attn_out": Candidate("attn_out", out.linear, step, (_rows(out.source), _rows(out.branch)))}

    def _part(self, part: BlockPart, form: Form, own: Mapping[str, Candidate], new: Mapping[str, nn.Module]) -> nn.Module | FusedAttended:
        """A part of a block, made by its decided candidates around the ``new`` modules inside it."""
        if isinstance(part, str):
            return new.get(part) or self.module(part)
        if isinstance(part, FeedForwardGroup):
            return own["ffn"].step

        def inside(fqn: str) -> str:
            """The name below the attention's module."""
            return fqn[len(part.attention) + 1 :]

        norm, attention, first = part.norm, self.module(part.attention), None
        replaced: dict[str, nn.Module] = {
            fqn: Undropped(each) for fqn, each in attention.named_modules() if type(each) is nn.Dropout and is_plain(each)
        }
        replaced |= {inside(fqn): module for fqn, module in new.items() if fqn.startswith(f"{part.attention}.")}
        replaced[inside(part.out.linear)] = nn.Identity()
        attributes: dict[tuple[str, str], Any] = {("", "training"): False}  # of attention that drops nothing, or would not be fused
        if part.projection is not None and own["qkv"].step.enabled:
            replaced[inside(part.projection.linear)] = first = own["qkv"].step
            switch = self.found.seen.switches.get(part.projection.linear)
            if switch is not None:
                attributes[inside(switch.module_fqn), switch.attribute] = switch.value
            if norm is None:
                replaced[inside(part.projection.norm.fqn)] = nn.Identity()
            norm = None
        attending = Attending(own["attention"].step) if "attention" in own and own["attention"].step.enabled else None
        before = None if norm is None else new.get(norm) or self.module(norm)
        inner = view(attention, replaced, attributes)
        tokens = self.tokens if self.tokens is not None and self.tokens.linear == part.out.linear else None
        return FusedAttended(before, inner, attending, first, own["attn_out"].step, form.handed[part.attention], tokens)

    def _projection(self, group: ProjectionGroup) -> Candidate:
        step = Step(ops.NormLinears, self._norm(group.norm), (self.module(group.linear),))
        return Candidate("qkv", group.linear, step, (_rows(group.source),))

    def _lone_projection(self, group: ProjectionGroup) -> Replacement:
        """A norm and the projection that reads it, outside of a proven block."""
        if group.linear in self.found.seen.switches:
            raise UnfitError("weight-read", "its parent reads the weight, which only a whole block can change")
        return self._pair(group.norm.fqn, group.linear, self._projection(group))

    def _feed_forward(self, group: FeedForwardGroup, *, whole: bool = False) -> Candidate:
        scale = _parameter(self.model, group.tail.scale) if whole and group.tail.scale is not None else None
        first, down = tuple(map(self.module, group.first)), self.module(group.second)
        up = first[0] if group.gate is None else ops.Gated(first, group.gate)  # pyright: ignore[reportArgumentType]
        inner = group.inner and self._norm(group.inner)
        step = Step(ops.FeedForward, self._norm(group.norm), up, down, group.activation, scale, whole, inner, Input(0))
        return Candidate("ffn", group.second, step, (_rows(group.source),))

    def _lone_feed_forward(self, group: FeedForwardGroup) -> Replacement:
        """A feed-forward group outside of a proven block: one module that is the whole group, or a norm and the module that reads it."""
        found, candidate = self.found, self._feed_forward(group)
        whole, x = found.common_module(group.nodes), found.calls[group.norm.fqn].first_input
        replaceable = whole is not None and (whole or is_plain(self.model))  # the model itself is not replaced, but gets another forward
        if whole is not None and replaceable and found.consists_of(whole, group.nodes) and found.calls[whole].take(x):
            return self._stepped(whole, candidate)
        others = group.nodes - {group.norm.node}
        behind = found.common_module(others)
        if behind is None or not found.consists_of(behind, others):
            raise UnfitError("open-group", "no module consists of its two linears and its activation alone")
        return self._pair(group.norm.fqn, behind, candidate)

    def _lone_norm(self, norm: NormModule) -> Replacement:
        """A norm outside of groups. Its result has the dtype of autocast, where PyTorch's has float32."""
        if self.found.leaves(norm.node):
            raise UnfitError("result", "its result leaves the model, and is float32 under autocast")
        return self._stepped(norm.fqn, Candidate("norm", norm.fqn, NormStep(ops.LayerNorm, self._norm(norm)), (_rows(norm.node),)))

    def _patches(self, fqn: str) -> Replacement:
        step = PatchesStep(ops.PatchEmbedding, *self._convolution(fqn), None, (), True)  # no position, no tokens, as an image
        return self._stepped(fqn, Candidate("patches", fqn, step, (self._image(fqn),)))

    def _embedding(self, fqn: str, group: Embedding) -> Replacement:
        """A method behind a patch embedding, in the method of the same module that calls both: a new one is set on the module.

        It runs on a view in which one step replaces the two. Other calls of the patch embedding or of the method use the model's own.
        """
        module = self.module(group.fqn)
        together = Together(module, METHOD, group.patches)
        position, prefix = group.position and _parameter(module, group.position), tuple(_parameter(module, each) for each in group.prefix)
        convolution = self._convolution(below(group.fqn, group.convolution))
        step = EmbeddingStep(together, group.image, *convolution, position, prefix)
        called = [module.get_submodule(each) for each in group.called]

        def put(fused: Fused) -> None:
            start = f"{group.fqn}." if group.fqn else ""
            others = {fqn.removeprefix(start): each for fqn, each in fused.modules.items() if fqn.startswith(start)}
            condition = Condition(called, above(module, (group.patches, *others)), trains=self.trains)
            method = StandInMethod(module, group.caller, together.replaced(step, others), condition)
            fused.methods[group.fqn, group.caller] = method

        return Replacement((Candidate("patches", fqn, step, (self._image(fqn),)),), Condition(called, trains=self.trains), put)

    def _first_tokens(self, tokens: FirstTokens) -> Replacement:
        """A forward that reads no other tokens behind its last attention."""
        model, found = self.model, self.found
        blocks = tuple(f"{fqn}." for fqn in found.blocks)
        others = tuple(f"{fqn}." for fqn in found.blocks if fqn != tokens.block)
        modules = dict(model.named_modules())
        seeing = [module for fqn, module in modules.items() if found.calls.get(fqn) and not fqn.startswith(others)]
        readers = [module for fqn, module in modules.items() if not f"{fqn}.".startswith(blocks)]
        condition = Unchanged(seeing, readers, itself=model, trains=self.trains)
        shapes = [each.shape[1:] for each in found.seen.example]

        def put(fused: Fused) -> None:
            if tokens.block in fused.modules and condition.obstacle() is None:
                fused.methods["", "forward"] = FirstTokensForward(model, condition, tokens, shapes)

        return Replacement((), condition, put)

    def _stepped(self, fqn: str, candidate: Candidate) -> Replacement:
        """One module that is the whole group."""
        original = self.module(fqn)
        condition = Condition(original.modules(), itself=original, trains=self.trains)

        def put(fused: Fused) -> None:
            fused.modules[fqn] = Stepped(original, candidate.step, condition)

        return Replacement((candidate,), condition, put)

    def _pair(self, norm: str, behind: str, candidate: Candidate) -> Replacement:
        """A norm, and the module behind it that also computes the norm."""
        calls = self.found.calls
        if not calls[norm].one_of_one_tensor:
            raise UnfitError("calls", f"{norm} is not called once with one tensor alone")
        if not calls[behind].take(calls[norm].first_result):
            raise UnfitError("call-form", f"{behind} is not called once with the normed input alone")
        first, second = self.module(norm), self.module(behind)
        holders = [self.module(fqn.rpartition(".")[0]) for fqn in (norm, behind)]
        condition = Condition([*first.modules(), *second.modules()], holders, trains=self.trains)

        def put(fused: Fused) -> None:
            fused.modules[norm] = Passed(first, condition)
            fused.modules[behind] = Stepped(second, candidate.step, condition)

        return Replacement((candidate,), condition, put)

    def _image(self, fqn: str) -> tuple[int, ...]:
        return tuple(self.found.calls[fqn].first_input.shape)

    def _convolution(self, fqn: str) -> tuple[Parameter, Parameter]:
        """The weight and the bias of a convolution."""
        return Parameter(self.module(fqn), "weight"), Parameter(self.module(fqn), "bias")

    def _norm(self, norm: NormModule) -> Normalized:
        return Normalized(self.module(norm.fqn), norm.eps)


def _parameter(model: nn.Module, name: str) -> Parameter:
    holder, _, leaf = name.rpartition(".")
    return Parameter(model.get_submodule(holder), leaf)


def _rows(node: Node) -> tuple[int, ...]:
    """The shape of a value as rows of features."""
    *batch, features = shape_of(node) or (0, 0)
    return (math.prod(batch), features)
