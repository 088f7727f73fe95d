"""What replaces the blocks of a model: the candidates that can be fused, and the fused block that is made of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.fx import Node

from flysurgery.inference.clock import Shapes
from flysurgery.inference.find_groups import Findings
from flysurgery.inference.fused_block import Attending, FusedAttended, FusedBlock
from flysurgery.inference.fused_modules import (
    AttentionStep,
    FeedForwardStep,
    LayerNormStep,
    LinearResidualStep,
    NormLinearStep,
    Parameter,
    PatchesStep,
    Step,
)
from flysurgery.inference.groups import Attended, Block, BlockPart, FeedForwardGroup, NormModule, Patches
from flysurgery.inference.standin import Condition, view
from flysurgery.surgery import Reason
from flysurgery.walker import Survey, shape_of


@dataclass
class Candidate:
    """One group: its kind, its name, its fused module, the shapes of its inputs, and the names of its linears.

    ``reason`` says why the group is left as it is; None where it is fused. ``launches`` names what its launches compute.
    """

    group: str
    fqn: str
    step: Step
    shapes: Shapes
    linears: tuple[str, ...] = ()
    reason: Reason | None = None
    plain_ms: float | None = None
    fused_ms: float | None = None
    launches: tuple[str, ...] = ()

    def leave(self, reason: Reason) -> None:
        """Decide that the group is left as it is."""
        self.reason, self.step.enabled = reason, False


Own = dict[str, Candidate]
"""The candidates of one part of a block, by their groups."""


@dataclass(frozen=True)
class Replacement:
    """A block in a model, the condition under which a fused one runs, and the candidates of each part."""

    block: Block
    original: nn.Module
    condition: Condition
    parts: list[Own] = field(default_factory=list)

    @property
    def candidates(self) -> Iterator[Candidate]:
        """All candidates of the block."""
        return (candidate for own in self.parts for candidate in own.values())


def find_replacements(model: nn.Module, found: Findings, *, trains: bool = False) -> list[Replacement]:
    """The blocks of ``model`` with their candidates, the inner blocks first.

    ``trains`` asks for steps with gradients, which run in training mode as well.
    """
    replacements = []
    for block in found.blocks:
        original = model.get_submodule(block.fqn)
        replacement = Replacement(block, original, Condition(original, trains=trains), [_candidates(model, part) for part in block.parts])
        for candidate in replacement.candidates:
            candidate.step.trains = trains
        replacements.append(replacement)
    return replacements


def fused_block(model: nn.Module, seen: Survey, replacement: Replacement) -> FusedBlock:
    """The block with the candidates that are to be fused."""
    block, parts = replacement.block, list[Step | FusedAttended]()
    for part, own in zip(block.parts, replacement.parts, strict=True):
        if isinstance(part, Attended):
            parts.append(_attended(model, seen, block, part, own))
            continue
        (candidate,), before = own.values(), parts[-1] if parts else None
        if isinstance(candidate.step, FeedForwardStep) and isinstance(before, FusedAttended) and before.then is None:
            before.then = candidate.step
        else:
            parts.append(candidate.step)
    return FusedBlock(replacement.original, parts, block.form, replacement.condition)


def _candidates(model: nn.Module, part: BlockPart) -> Own:
    module = model.get_submodule
    if isinstance(part, NormModule):
        return {"norm": Candidate("norm", part.fqn, LayerNormStep(module(part.fqn), part.eps), (shape_of(part.node) or (),))}
    if isinstance(part, Patches):
        convolution = module(part.fqn)
        assert isinstance(convolution, nn.Conv2d)  # find_groups has seen to it
        return {"patches": Candidate("patches", part.fqn, PatchesStep(convolution), (part.image,))}
    if isinstance(part, FeedForwardGroup):
        norm, *inner = [(module(each.fqn), each.eps) for each in (part.norm, part.inner) if each is not None]
        first, second, scale = map(module, part.first), module(part.second), _parameter(model, part.tail.scale)
        residual = part.tail.residual is not None
        step = FeedForwardStep(norm, first, part.gate, part.activation, inner[0] if inner else None, second, scale, residual)
        return {"ffn": Candidate("ffn", part.second, step, (_rows(part.source),), (*part.first, part.second))}
    own: Own = {}
    if part.projection is not None:
        norm, linear = part.projection.norm, part.projection.linear
        step = NormLinearStep(module(norm.fqn), norm.eps, module(linear))
        own["qkv"] = Candidate("qkv", linear, step, (_rows(part.projection.source),), (linear,))
    if part.call is not None:
        scale = part.call.kwargs.get("scale")
        shapes = tuple(shape for each in part.call.args[:3] if isinstance(each, Node) and (shape := shape_of(each)) is not None)
        own["attention"] = Candidate("attention", part.attention, AttentionStep(scale if isinstance(scale, float) else None), shapes)
    out = part.out
    step = LinearResidualStep(module(out.linear), _parameter(model, out.tail.scale))
    own["attn_out"] = Candidate("attn_out", out.linear, step, (_rows(out.source), _rows(out.branch)), (out.linear,))
    return own


def _attended(model: nn.Module, seen: Survey, block: Block, part: Attended, own: Own) -> FusedAttended:
    def inside(fqn: str) -> str:
        """The name below the attention's module."""
        return fqn[len(part.attention) + 1 :]

    replaced: dict[str, nn.Module] = {inside(part.out.linear): nn.Identity()}
    attributes: dict[tuple[str, str], Any] = {("", "training"): False}  # of attention that drops nothing, or would not be fused
    before = None if part.norm is None else model.get_submodule(part.norm)
    if part.projection is not None and own["qkv"].step.enabled:
        replaced[inside(part.projection.linear)] = own["qkv"].step
        switch = seen.switches.get(part.projection.linear)
        if switch is not None:
            attributes[inside(switch.module_fqn), switch.attribute] = switch.value
        if part.norm is None:
            replaced[inside(part.projection.norm.fqn)] = nn.Identity()
        before = None
    step = own["attention"].step if "attention" in own else None
    attending = Attending(step) if isinstance(step, AttentionStep) and step.enabled else None
    attention = view(model.get_submodule(part.attention), replaced, attributes)
    out = own["attn_out"].step
    assert isinstance(out, LinearResidualStep)  # it was built so
    return FusedAttended(before, attention, attending, out, block.form.handed[part.attention])


def _parameter(model: nn.Module, name: str | None) -> Parameter | None:
    """The module that holds a parameter of this name, and its name there."""
    if name is None:
        return None
    fqn, _, leaf = name.rpartition(".")
    return model.get_submodule(fqn), leaf


def _rows(node: Node) -> tuple[int, ...]:
    """The shape of a value as rows of features."""
    *batch, features = shape_of(node) or (0, 0)
    return (math.prod(batch), features)
