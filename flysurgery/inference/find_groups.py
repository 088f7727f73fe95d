"""Finds everything in a model that kernels could compute together, by one trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from torch.fx import Node

from flysurgery.inference.embedding import CALLERS, METHOD, Embedding, embedding_of, inline_embedding
from flysurgery.inference.graph import Calls, attempt, below, read, watch
from flysurgery.inference.match import AttentionOut, Block, BlockMatcher, FeedForwardGroup, Matcher, NormModule, ProjectionGroup
from flysurgery.inference.standin import is_plain
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.reason import Reason
from flysurgery.walker import Example, Survey, name_of


class Patches(NamedTuple):
    """A convolution whose stride is its kernel's size: a product of flattened patches and a matrix; and its node."""

    fqn: str
    node: Node


@dataclass
class Findings:
    """The groups by the name of their last linear (of patches, the convolution, or the module that is their embedding where something
    follows it), and the reasons of those that are none.

    ``calls`` are those of every module in one forward, ``around`` the modules around each node. A feed-forward group outside of the proven
    blocks may still be fused; an attention's output is not, so it is among the reasons.
    """

    seen: Survey
    calls: dict[str, Calls]
    around: dict[Node, tuple[str, ...]]
    blocks: dict[str, Block] = field(default_factory=dict)
    projections: dict[str, ProjectionGroup] = field(default_factory=dict)
    feed_forwards: dict[str, FeedForwardGroup] = field(default_factory=dict)
    norms: dict[str, NormModule] = field(default_factory=dict)
    patches: dict[str, Patches] = field(default_factory=dict)
    embeddings: dict[str, Embedding] = field(default_factory=dict)
    reasons: dict[str, tuple[str, Reason]] = field(default_factory=dict)

    def inside(self, fqn: str) -> list[Node]:
        """The nodes that run in the forward of a module."""
        return [node for node, names in self.around.items() if fqn in names]

    def common_module(self, nodes: frozenset[Node]) -> str | None:
        """The innermost module in whose forward all nodes run."""
        first, *others = [self.around[node] for node in nodes]
        common = [fqn for fqn in first if all(fqn in other for other in others)]
        return common[-1] if common else None

    def consists_of(self, fqn: str, nodes: frozenset[Node]) -> bool:
        """Whether a module computes these nodes and nothing else."""
        return all(node in nodes or not node.users for node in self.inside(fqn))

    def leaves(self, node: Node) -> bool:
        """Whether a value, or what others than linear layers and layer norms make of it, is a result of the model."""
        front, ends = {node}, {call.node for call in self.seen.calls}
        while front:
            ends |= {each for each in front if each is not node and name_of(each) == "layer_norm"}
            front = {user for each in front - ends for user in each.users}
            if any(each.op == "output" for each in front):
                return True
        return False


def find_groups(model: nn.Module, example: Example | None = None) -> Findings:
    """Trace the model, with its converted layers as linears, and match the groups.

    Raises:
        WalkError: as ``flysurgery.walker.survey``.
    """
    seen = read(model, example, prepare=_put_linears)
    matcher, around = Matcher(seen), {node: seen.owners.around(node) for node in seen.trace.graph.nodes}
    found, outs = Findings(seen, watch(seen, (METHOD, *CALLERS)), around), dict[str, AttentionOut]()
    for role, group, match, kept in (
        ("qkv", "qkv", matcher.projection, found.projections),
        ("attn_out", "attn_out", matcher.attention_out, outs),
        ("ffn_out", "ffn", matcher.feed_forward, found.feed_forwards),
    ):
        for call in matcher.of_role(role):
            outcome = attempt(match, call)
            if call.fqn in kept or call.fqn in found.reasons:
                outcome = Reason("calls", "it is called more than once in one forward")
                kept.pop(call.fqn, None)
            if isinstance(outcome, Reason):
                found.reasons[call.fqn] = (group, outcome)
            else:
                kept[call.fqn] = outcome  # pyright: ignore[reportArgumentType]  match and kept belong together
    _find_blocks(found, [*outs.values(), *found.feed_forwards.values()])
    _find_norms(found, matcher)
    _find_patches(found)
    _find_embeddings(found)
    return found


def _find_blocks(found: Findings, groups: Sequence[AttentionOut | FeedForwardGroup]) -> None:
    """Blocks among the modules whose own forward makes the residual sums of groups."""

    def leave(group: AttentionOut | FeedForwardGroup, reason: Reason) -> None:
        if isinstance(group, AttentionOut):
            found.reasons[group.linear] = ("attn_out", reason)

    sums: dict[str, list[AttentionOut | FeedForwardGroup]] = {}
    for group in groups:
        fqn = found.seen.owners.innermost(group.tail.result)
        if group.tail.residual is None or fqn is None:
            leave(group, Reason("no-residual", "its result is not added to anything"))
        elif isinstance(group, AttentionOut) or group.tail.residual is group.source:
            sums.setdefault(fqn, []).append(group)
    for fqn, added in sums.items():
        outcome = attempt(BlockMatcher(found.seen, found.around, fqn, added, found.projections.values()).match)
        if isinstance(outcome, Reason):
            for group in added:
                leave(group, outcome)
        else:
            found.blocks[fqn] = outcome


def _find_norms(found: Findings, matcher: Matcher) -> None:
    """Modules that are nothing but a layer norm, outside of the groups that have one."""
    grouped = {node for group in (*found.projections.values(), *found.feed_forwards.values()) for node in group.nodes}
    for node in found.seen.trace.graph.nodes:
        norm = attempt(matcher.norm, node) if name_of(node) == "layer_norm" and node.users and node not in grouped else None
        if isinstance(norm, NormModule) and found.calls[norm.fqn].one_of_one_tensor and found.consists_of(norm.fqn, frozenset((node,))):
            found.norms[norm.fqn] = norm


def _find_patches(found: Findings) -> None:
    seen = found.seen
    for node in seen.trace.graph.nodes:
        source = node.args[0] if name_of(node) == "conv2d" else None
        if not isinstance(source, Node) or source not in seen.trace.inputs:
            continue
        fqn = seen.owners.innermost(node) or ""
        module = seen.owners.modules[fqn]
        if type(module) is nn.Conv2d and is_plain(module) and _is_tiling(module):
            found.patches[fqn] = Patches(fqn, node)
        else:
            found.reasons[fqn] = ("patches", Reason("overlap", "its patches overlap, or it is no plain convolution"))


def _find_embeddings(found: Findings) -> None:
    """Patches with the method behind them, by the name of the patch embedding; and for others the reason why not."""
    having = [fqn for fqn, _ in found.seen.double.named_modules() if found.calls.get(below(fqn, METHOD))]
    for fqn in having:
        outcome = attempt(embedding_of, found.seen, found.calls, fqn)
        if not isinstance(outcome, Reason) and below(fqn, outcome.convolution) not in found.patches:
            outcome = Reason("no-patches", "before it stands no plain convolution that cuts the model's input into patches")
        if isinstance(outcome, Reason):
            found.reasons[below(fqn, METHOD)] = ("patches", outcome)
        else:
            found.embeddings[below(fqn, outcome.patches)] = outcome
    for patches in () if having else found.patches.values():
        inline = inline_embedding(found.seen, patches.node)
        if inline is not None:
            found.reasons[inline[0]] = ("patches", inline[1])


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
