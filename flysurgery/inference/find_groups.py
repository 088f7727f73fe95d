"""Finds the blocks of a model, which kernels could compute, by one trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import Node

from flysurgery.inference.call_form import form_of
from flysurgery.inference.graph import UnfitError, attempt, is_idle, origin, watch
from flysurgery.inference.groups import (
    Attended,
    AttentionOut,
    Block,
    BlockPart,
    FeedForwardGroup,
    NormModule,
    Patches,
    ProjectionGroup,
    Tail,
)
from flysurgery.inference.match import BlockMatcher, Matcher
from flysurgery.inference.standin import is_plain
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.surgery import Reason
from flysurgery.walker import Call, Example, Survey, name_of, shape_of, survey

Group = TypeVar("Group")


@dataclass
class Findings:
    """The blocks, the inner ones first; and the groups that are in none: their kind and the reason, by name.

    A group has the name of its last linear. Patches and single norms have their own.
    """

    seen: Survey
    blocks: list[Block] = field(default_factory=list)
    reasons: dict[str, tuple[str, Reason]] = field(default_factory=dict)


def find_groups(model: nn.Module, example: Example | None = None) -> Findings:
    """Trace the model, with its converted layers as linears, and match the groups.

    Raises:
        WalkError: as ``flysurgery.walker.survey``.
    """
    return _Search(survey(model, example, prepare=_put_linears), replaceable=is_plain(model)).run()


class _Search:
    """Fills ``Findings``. ``replaceable`` says whether the model itself may get another forward."""

    def __init__(self, seen: Survey, *, replaceable: bool) -> None:
        self.seen, self.replaceable, self.found = seen, replaceable, Findings(seen)
        self.calls, self.matcher = watch(seen), Matcher(seen)
        self.around = {node: seen.owners.around(node) for node in seen.trace.graph.nodes}

    def run(self) -> Findings:
        projections = self._groups("qkv", "qkv", self.matcher.projection)
        outs = self._groups("attn_out", "attn_out", self.matcher.attention_out)
        feeds = self._groups("ffn_out", "ffn", self.matcher.feed_forward)
        sums: dict[str, list[AttentionOut | FeedForwardGroup]] = {}
        for group in (*outs, *feeds):
            fqn, residual = self.seen.owners.innermost(group.tail.result), group.tail.residual
            if fqn is not None and residual is not None and (isinstance(group, AttentionOut) or residual is group.source):
                sums.setdefault(fqn, []).append(group)
            elif isinstance(group, AttentionOut):
                self.found.reasons[group.linear] = ("attn_out", Reason("no-residual", "its result is not added to anything"))
        for fqn, added in sums.items():
            names = [each.linear for each in added if isinstance(each, AttentionOut)]
            self._add("attn_out", names, self._residual_block, fqn, added, projections)
        self._add_lone(projections, feeds)
        self._add_patches()
        self._add_norms()
        self.found.blocks.sort(key=lambda block: len(block.fqn), reverse=True)
        return self.found

    def _groups(self, role: str, kind: str, match: Callable[[Call], Group]) -> list[Group]:
        """The groups of the linears of a role."""
        groups, reasons = dict[str, Group](), self.found.reasons
        for call in self.matcher.of_role(role):
            outcome = attempt(match, call)
            if call.fqn in groups or call.fqn in reasons:
                outcome = Reason("calls", "it is called more than once in one forward")
                groups.pop(call.fqn, None)
            if isinstance(outcome, Reason):
                reasons[call.fqn] = (kind, outcome)
            else:
                groups[call.fqn] = outcome
        return [*groups.values()]

    def _add(self, kind: str, names: Iterable[str], make: Callable[..., Block], *args: Any) -> None:
        """Add the block that ``make`` makes of the arguments, or the reason why there is none, for the groups of these names."""
        outcome = attempt(make, *args)
        if isinstance(outcome, Reason):
            self.found.reasons |= dict.fromkeys(names, (kind, outcome))
        else:
            self.found.blocks.append(outcome)

    def _residual_block(self, fqn: str, added: list[AttentionOut | FeedForwardGroup], projections: Iterable[ProjectionGroup]) -> Block:
        """The module whose own forward makes the residual sums of these groups."""
        self._check_replaceable(fqn)
        return BlockMatcher(self.matcher, self.calls, self.around, fqn, added, projections).match()

    def _add_lone(self, projections: list[ProjectionGroup], feeds: list[FeedForwardGroup]) -> None:
        """Modules that are one feed-forward group by themselves, and the reasons of groups that are in no block."""
        parts = [part for block in self.found.blocks for part in block.parts]
        covered = {part.second for part in parts if isinstance(part, FeedForwardGroup)}
        covered |= {part.projection.linear for part in parts if isinstance(part, Attended) and part.projection is not None}
        reason = Reason("no-block", "it is in no module that is proven to compute residual sums alone")
        self.found.reasons |= {group.linear: ("qkv", reason) for group in projections if group.linear not in covered}
        for group in feeds:
            if group.second not in covered:
                self._add("ffn", [group.second], self._feed_forward, group)

    def _add_patches(self) -> None:
        for node in self.seen.trace.graph.nodes:
            source = node.args[0] if name_of(node) == "conv2d" else None
            if isinstance(source, Node) and origin(source) in self.seen.trace.inputs:
                fqn = self.seen.owners.innermost(node) or ""
                self._add("patches", [fqn], self._patches, fqn, source)

    def _add_norms(self) -> None:
        """Layer norms that are in no block."""
        for node in self.seen.trace.graph.nodes:
            norm = attempt(self.matcher.norm, node)
            if isinstance(norm, NormModule) and not any(block.fqn in self.around[node] for block in self.found.blocks):
                self._add("norm", [norm.fqn], self._norm, norm)

    def _feed_forward(self, group: FeedForwardGroup) -> Block:
        first, *others = [self.around[node] for node in group.nodes]
        whole = next((fqn for fqn in reversed(first) if all(fqn in other for other in others)), None)
        if whole is None or not self._consists_of(whole, group.nodes):
            raise UnfitError("open-group", "no module consists of its norm, its two linears and its activation alone")
        return self._lone(whole, replace(group, tail=Tail(None, None, group.tail.result)))

    def _patches(self, fqn: str, images: Node) -> Block:
        module = self.seen.owners.modules[fqn]
        if type(module) is not nn.Conv2d or not is_plain(module) or not _is_tiling(module):
            raise UnfitError("overlap", "its patches overlap, or it is no plain convolution")
        return self._lone(fqn, Patches(fqn, shape_of(images) or ()))

    def _norm(self, norm: NormModule) -> Block:
        if not self._consists_of(norm.fqn, frozenset({norm.node})):
            raise UnfitError("open-norm", "its module is called more than once, or does something else as well")
        return self._lone(norm.fqn, norm)

    def _lone(self, fqn: str, part: BlockPart) -> Block:
        self._check_replaceable(fqn)
        return Block(fqn, (part,), form_of(fqn, (part,), self.calls))

    def _check_replaceable(self, fqn: str) -> None:
        if not fqn and not self.replaceable:
            raise UnfitError("own-forward", "the model itself has a forward that was set on it, in whose place no other is put")

    def _consists_of(self, fqn: str, nodes: frozenset[Node]) -> bool:
        """Whether a module computes these nodes and nothing else."""
        inside = [node for node, names in self.around.items() if fqn in names]
        return all(node in nodes or is_idle(node) or not node.users for node in inside)


def _is_tiling(module: nn.Conv2d) -> bool:
    """Whether the windows of a convolution lie side by side and cover the image."""
    plain = module.padding == (0, 0) and module.dilation == (1, 1) and module.groups == 1
    return plain and module.kernel_size == module.stride and max(module.kernel_size) > 1


def _put_linears(double: nn.Module) -> None:
    """Put linears without weights of their own in place of converted layers, so that roles can be found."""
    for name, module in list(double.named_modules()):
        if not isinstance(module, ButterflyLinear | SplitLinear) or not name:
            continue
        parent, _, leaf = name.rpartition(".")
        holder = double.get_submodule(parent)
        if not isinstance(holder, SplitLinear):
            holder._modules[leaf] = _linear_like(module)


def _linear_like(module: ButterflyLinear | SplitLinear) -> nn.Linear:
    parameter = next(module.parameters())
    has_bias = any(name.rpartition(".")[2] == "bias" for name, _ in module.named_parameters())
    like = nn.Linear(module.in_features, module.out_features, bias=has_bias, device="meta")
    empty = torch.empty(1, dtype=parameter.dtype, device=parameter.device)
    like.weight = nn.Parameter(empty.expand(module.out_features, module.in_features), requires_grad=False)
    if has_bias:
        like.bias = nn.Parameter(empty.expand(module.out_features), requires_grad=False)
    return like
