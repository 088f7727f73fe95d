"""All candidates of a model, with the places that they would take."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import nn
from torch.fx import Node

from flysurgery.inference.attending import attention_of
from flysurgery.inference.candidate import Candidate
from flysurgery.inference.forms import form_of
from flysurgery.inference.found import Attended, Embedding, FeedForward, Lone, LoneNorm, Norm, Part, Projection, Scale
from flysurgery.inference.kernels import is_plain
from flysurgery.inference.look import Findings
from flysurgery.inference.methods import Together
from flysurgery.inference.patch_steps import EmbeddingStep, PatchesStep
from flysurgery.inference.place import (
    Own,
    Place,
    block_place,
    embedding_place,
    feed_forward_place,
    norm_place,
    patches_place,
    projection_place,
)
from flysurgery.inference.steps import Attention, LayerNorm, LinearResidual, Normalized, NormLinear
from flysurgery.inference.steps import FeedForward as FeedForwardStep
from flysurgery.surgery import Reason
from flysurgery.walker import shape_of

OWN_FORWARD = Reason("own-forward", "the model itself has a forward that was set on it, in whose place no other is put")


@dataclass
class Places:
    """Places to take, and the groups that have none: kind, name, and why."""

    places: list[Place] = field(default_factory=list)
    without: list[tuple[str, str, Reason]] = field(default_factory=list)


class Builder:
    """Makes the candidates of ``model``."""

    def __init__(self, model: nn.Module, found: Findings) -> None:
        self.model, self.found = model, found
        self.sources = {call.node: call.source for call in found.seen.calls}

    def build(self) -> Places:
        """Blocks, behind what they do not cover, which may lie in them, and the inner ones first."""
        found, built = self.found, Places()
        built.without = [(group, fqn, reason) for fqn, (group, reason) in found.reasons.items()]
        covered, blocks = set[str](), list[Place]()
        for block in sorted(found.blocks.values(), key=lambda block: len(block.fqn), reverse=True):
            form = form_of(block, found.calls) if block.fqn or is_plain(self.model) else OWN_FORWARD
            if isinstance(form, Reason):
                found.open_blocks |= {part.out.linear: form for part in block.parts if isinstance(part, Attended)}
                continue
            candidates = [self._of_part(part) for part in block.parts]
            covered |= {candidate.fqn for own in candidates for candidate in own.values()}
            blocks.append(block_place(self.model, found, block, form, candidates))
        for fqn, projection in found.projections.items():
            if fqn not in covered:
                candidate = self._projection(projection)
                self._add(built, candidate, projection_place(self.model, found, projection, candidate))
        for fqn, group in found.feed_forwards.items():
            if fqn not in covered:
                candidate = self._feed_forward(group, whole=False)
                self._add(built, candidate, feed_forward_place(self.model, found, group, candidate))
        built.without += [("attn_out", fqn, found.open_blocks[fqn]) for fqn in found.outs if fqn not in covered]
        for norm in found.norms.values():
            candidate = self._norm(norm)
            self._add(built, candidate, norm_place(self.model, found, norm, candidate))
        for fqn in found.patches:
            candidate = self._patches(fqn)
            self._add(built, candidate, patches_place(self.model, candidate))
        built.places += blocks
        for fqn, embedding in found.embeddings.items():  # last, as what is put below its module is seen there
            built.places.append(self._embedding(fqn, embedding))
        return built

    @staticmethod
    def _add(built: Places, candidate: Candidate, place: Place | Reason) -> None:
        if isinstance(place, Reason):
            built.without.append((candidate.group, candidate.fqn, place))
        else:
            built.places.append(place)

    def _of_part(self, part: Part) -> Own:
        if isinstance(part, Lone):
            return {}
        if isinstance(part, FeedForward):
            return {"ffn": self._feed_forward(part, whole=True)}
        candidates = {} if part.projection is None else {"qkv": self._projection(part.projection)}
        attention = attention_of(self.found.seen, part.attention)
        if attention is not None:
            candidates["attention"] = self._attention(part.attention, attention)
        out = LinearResidual(self._module(part.out.linear), self._scale(part.out.tail.scale))
        shapes = self._rows(self.sources[part.out.branch]), self._rows(part.out.branch)
        return candidates | {"attn_out": Candidate("attn_out", part.out.linear, out, shapes)}

    def _attention(self, fqn: str, node: Node) -> Candidate:
        scale = node.kwargs.get("scale")
        shapes = tuple(shape for each in node.args[:3] if isinstance(each, Node) and (shape := shape_of(each)) is not None)
        return Candidate("attention", fqn, Attention(scale if isinstance(scale, float) else None), shapes)

    def _projection(self, group: Projection) -> Candidate:
        step = NormLinear(self._module(group.norm.fqn), group.norm.eps, self._module(group.linear))
        return Candidate("qkv", group.linear, step, (self._rows(group.source),))

    def _feed_forward(self, group: FeedForward, *, whole: bool) -> Candidate:
        norm, inner = self._normalized(group.norm), group.inner and self._normalized(group.inner)
        first, second = tuple(map(self._module, group.first)), self._module(group.second)
        scale = self._scale(group.tail.scale) if whole else None
        step = FeedForwardStep(norm, first, group.gate, group.activation, inner, second, scale, whole)
        return Candidate("ffn", group.second, step, (self._rows(group.source),))

    def _norm(self, group: LoneNorm) -> Candidate:
        step = LayerNorm(self._module(group.norm.fqn), group.norm.eps)
        return Candidate("norm", group.norm.fqn, step, (shape_of(group.node) or (),))

    def _patches(self, fqn: str) -> Candidate:
        convolution = self._module(fqn)
        assert isinstance(convolution, nn.Conv2d)  # the match has seen to it
        return Candidate("patches", fqn, PatchesStep(convolution), (tuple(self.found.calls[fqn].first_input.shape),))

    def _embedding(self, fqn: str, group: Embedding) -> Place:
        module = self._module(group.fqn)
        convolution = module.get_submodule(group.convolution)
        assert isinstance(convolution, nn.Conv2d)  # the match has seen to it
        together = Together(module, group.method, group.patches)
        position, prefix = group.position and group.position.of(module), tuple(each.of(module) for each in group.prefix)
        step = EmbeddingStep(together, convolution, position, prefix, group.image)
        images = self.found.calls[fqn].first_input.shape
        return embedding_place(module, group, together, Candidate("patches", fqn, step, (tuple(images),)))

    def _normalized(self, norm: Norm) -> Normalized:
        return self._module(norm.fqn), norm.eps

    def _module(self, fqn: str) -> nn.Module:
        return self.model.get_submodule(fqn)

    def _scale(self, scale: Scale | None) -> tuple[nn.Module, str] | None:
        return None if scale is None else scale.of(self.model)

    def _rows(self, node: Node) -> tuple[int, ...]:
        *batch, features = shape_of(node) or (0, 0)
        return (math.prod(batch), features)
