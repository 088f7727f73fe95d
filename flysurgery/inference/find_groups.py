"""Finds everything in a model that kernels could compute together, by one trace; for patches with their position also by others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Node

from flysurgery.errors import Reason, WalkError
from flysurgery.inference.graph import Calls, UnfitError, attempt, below, operators, read, sole_user, watch
from flysurgery.inference.match import AttentionOut, BlockMatcher, BlockPart, FeedForwardGroup, Matcher, NormModule, ProjectionGroup
from flysurgery.inference.standin import Condition, StandInMethod, Together, is_plain
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.walker import Example, Survey, is_in_place, name_of, shape_of

METHOD = "_pos_embed"
"""The method of timm's models that is given the patches, adds their position and puts tokens before them."""
CALLERS = ("forward_features", "forward_intermediates")
"""The methods that call the patch embedding, and then that method."""

_MOVES = frozenset(("flatten", "permute", "reshape", "transpose", "unflatten", "view"))


@dataclass(frozen=True)
class Embedding:
    """``METHOD`` of a module behind its child ``patches``, which ``caller``, another method, calls one after the other.

    They are a convolution of images of the size ``image`` (channels, height, width), and position, tokens or both with its patches.
    ``called`` are the modules that run. All names but ``fqn`` are those below the module.
    """

    fqn: str
    caller: str
    patches: str
    convolution: str
    position: str | None
    prefix: tuple[str, ...]
    image: tuple[int, ...]
    called: tuple[str, ...]


@dataclass
class Findings:
    """The groups by the name of their last linear, blocks by their own, and the kinds and reasons of those that are none.

    ``calls`` are those of every module in one forward, ``around`` the modules around each node. An attention's output outside of the
    proven blocks is among the reasons. ``patches`` are convolutions whose stride is their kernel's size.
    """

    seen: Survey
    calls: dict[str, Calls]
    around: dict[Node, tuple[str, ...]]
    blocks: dict[str, tuple[BlockPart, ...]] = field(default_factory=dict)
    projections: dict[str, ProjectionGroup] = field(default_factory=dict)
    feed_forwards: dict[str, FeedForwardGroup] = field(default_factory=dict)
    norms: dict[str, NormModule] = field(default_factory=dict)
    patches: dict[str, Node] = field(default_factory=dict)
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
    """Trace the model, with its converted layers as linears, and match the groups. Raises WalkError as ``survey``."""
    seen = read(model, example, prepare=_put_linears)
    matcher, around = Matcher(seen), {node: seen.owners.around(node) for node in seen.trace.graph.nodes}
    found, outs = Findings(seen, watch(seen, (METHOD, *CALLERS)), around), dict[str, AttentionOut]()
    kinds: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
        "qkv": ("qkv", matcher.projection, found.projections),
        "attn_out": ("attn_out", matcher.attention_out, outs),
        "ffn_out": ("ffn", matcher.feed_forward, found.feed_forwards),
    }
    for role, (group, match, kept) in kinds.items():
        for call in [call for call in seen.calls if matcher.roles[call.node] == role]:
            outcome = attempt(match, call)
            if call.fqn in kept or call.fqn in found.reasons:
                outcome = Reason("calls", "it is called more than once in one forward")
                kept.pop(call.fqn, None)
            if isinstance(outcome, Reason):
                found.reasons[call.fqn] = (group, outcome)
            else:
                kept[call.fqn] = outcome
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
        if name_of(node) == "conv2d" and node.args[0] in seen.trace.inputs:
            fqn = seen.owners.innermost(node) or ""
            module = seen.owners.modules[fqn]
            if type(module) is nn.Conv2d and is_plain(module) and _is_tiling(module):
                found.patches[fqn] = node
            else:
                found.reasons[fqn] = ("patches", Reason("overlap", "its patches overlap, or it is no plain convolution"))


def _is_tiling(module: nn.Conv2d) -> bool:
    """Whether the windows of a convolution lie side by side and cover the image."""
    plain = module.padding == (0, 0) and module.dilation == (1, 1) and module.groups == 1
    return plain and module.kernel_size == module.stride and max(module.kernel_size) > 1


def _put_linears(double: nn.Module) -> None:
    """Put linears without weights of their own in place of converted layers, so that roles can be found."""
    for name, module in list(double.named_modules()):
        if isinstance(module, ButterflyLinear | SplitLinear) and name:
            parent, _, leaf = name.rpartition(".")
            holder = double.get_submodule(parent)
            if not isinstance(holder, SplitLinear):
                holder._modules[leaf] = _linear_like(module)


def _linear_like(module: ButterflyLinear | SplitLinear) -> nn.Linear:
    parameter = next(module.parameters())
    has_bias = any(name.rpartition(".")[2] == "bias" for name, _ in module.named_parameters())
    like = nn.Linear(module.in_features, module.out_features, bias=has_bias, device="meta")
    empty = torch.empty(1, dtype=parameter.dtype, device=parameter.device)
    for name, each in [*like.named_parameters()]:
        setattr(like, name, nn.Parameter(empty.expand(each.shape), requires_grad=False))
    return like


def _find_embeddings(found: Findings) -> None:
    """Patches with the method behind them, by the name of the patch embedding; and for others the reason why not."""
    having = [fqn for fqn, _ in found.seen.double.named_modules() if found.calls.get(below(fqn, METHOD))]
    for fqn in having:
        outcome = attempt(_embedding_of, found, fqn)
        if isinstance(outcome, Reason):
            found.reasons[below(fqn, METHOD)] = ("patches", outcome)
        else:
            found.embeddings[below(fqn, outcome.patches)] = outcome
    for node in () if having else found.patches.values():
        used = _used_inline(found.seen, node)
        if used is not None:
            text = f"a forward that does more uses it with the patches, no method {METHOD} of its own"
            found.reasons[used] = ("patches", Reason("inline", text))


def _embedding_of(found: Findings, fqn: str) -> Embedding:
    """What ``METHOD`` of the module ``fqn`` makes of the patches.

    No module consists of exactly this part, so the proof has two steps. A trace of the method behind the patch embedding shows what
    they compute together. Then the whole forward must run the same operators when the method calls the patch embedding itself, so
    that nothing in between reads the patches or their sizes.
    """
    seen, calls = found.seen, found.calls
    module, given = seen.owners.modules[fqn], calls[below(fqn, METHOD)]
    if not given.one_of_one_tensor or not isinstance(given.first_result, Tensor):
        raise UnfitError("call-form", f"{METHOD} is not called once with one tensor alone, for another one")
    children = {name: calls.get(below(fqn, name), Calls()) for name, _ in module.named_children()}
    child = next((name for name, each in children.items() if each.one_of_one_tensor and each.first_result is given.first_input), None)
    caller = next((name for name in CALLERS if len(calls.get(below(fqn, name), ())) == 1), None)
    if child is None or caller is None:
        raise UnfitError("call-form", f"{METHOD} is not given what a module of its own made of one tensor, in {' or '.join(CALLERS)}")
    images, together = children[child].first_input, Together(module, METHOD, child)
    try:
        inner = read(together, torch.empty((2, *images.shape[1:]), dtype=images.dtype))
    except WalkError as error:
        raise UnfitError("walk", str(error)) from error
    convolution, position, prefix = _read_together(inner)
    if not _same_operators(seen, module, caller, together):
        raise UnfitError("shared", f"between its patch embedding and {METHOD} the model computes something else as well")
    if below(fqn, convolution) not in found.patches:
        raise UnfitError("no-patches", "before it stands no plain convolution that cuts the model's input into patches")
    called = tuple(name.removeprefix("module.") for name, each in watch(inner).items() if len(each) and name.startswith("module."))
    return Embedding(fqn, caller, child, convolution, position, tuple(prefix), tuple(images.shape[1:]), called)


def _read_together(seen: Survey) -> tuple[str, str | None, list[str]]:
    """The convolution, the position and the tokens before the patches in the trace of a ``Together``, by their names below its module."""
    output = next(node for node in seen.trace.graph.nodes if node.op == "output")
    value, position, prefix = output.all_input_nodes[0], None, list[str]()
    while True:
        added, put = _added(seen, value), _put_before(seen, value)
        if added is not None and position is None:
            value, position = added
        elif put is not None and not prefix:
            value, prefix = put
        else:
            break
    if position is None and not prefix:
        raise UnfitError(
            "no-position", f"{METHOD} neither adds a parameter with a row for each token, nor puts parameters before the patches"
        )
    convolution = _convolution_of(seen, value)
    return convolution, position and position.removeprefix("module."), [each.removeprefix("module.") for each in prefix]


def _used_inline(seen: Survey, convolution: Node) -> str | None:
    """The parameter that a forward itself adds to patches or puts before them; None where there is none."""
    node = convolution
    while (user := sole_user(node)) is not None and name_of(user) in _MOVES:
        node = user
    added, put = (None, None) if user is None else (_added(seen, user), _put_before(seen, user))
    return added[1] if added is not None else put and put[1][0]


def _added(seen: Survey, node: Node) -> tuple[Node, str] | None:
    """The value and the parameter, one row a token, whose sum the node is."""
    if name_of(node) != "add" or is_in_place(node) or node.kwargs or len(node.args) != 2:
        return None
    for value, rows in (node.args, node.args[::-1]):
        name = seen.trace.parameters.get(rows) if isinstance(rows, Node) else None
        if name is not None and isinstance(value, Node) and _shape(rows) == (1, *_shape(value)[1:]):
            return value, name
    return None


def _put_before(seen: Survey, node: Node) -> tuple[Node, list[str]] | None:
    """The value and the parameters that the node puts before it, the same ones in each image."""
    if name_of(node) not in ("cat", "concat") or len(node.args) != 2 or node.args[1] not in (1, -2):
        return None
    *before, value = cast(list[Node], node.args[0])
    rows = [(each, each.args[0]) for each in before if name_of(each) == "expand"]
    repeated = [each for row, each in rows if isinstance(each, Node) and _shape(each) == (1, *_shape(row)[1:])]
    names = [seen.trace.parameters[each] for each in repeated if each in seen.trace.parameters]
    return (value, names) if names and len(names) == len(before) else None


def _convolution_of(seen: Survey, rows: Node) -> str:
    """The convolution of the images whose results, patch by patch, are the rows."""
    moves, node = list[Node](), rows
    while name_of(node) in _MOVES and isinstance(before := node.args[0], Node):
        moves.insert(0, node)
        node = before
    if name_of(node) != "conv2d" or node.args[0] not in seen.trace.inputs:
        raise UnfitError("more", f"its patch embedding also computes {name_of(node) or node.name}")
    shape = torch.Size(_shape(node))
    places = torch.arange(shape.numel(), device="cpu").view(shape)
    moved = places
    for move in moves:
        moved = cast(Callable[..., Tensor], move.target)(moved, *move.args[1:], **move.kwargs)
    if not torch.equal(moved, places.flatten(2).transpose(1, 2)):
        raise UnfitError("order", "its patches are not one after the other, row by row of the image")
    return (seen.owners.innermost(node) or "").removeprefix("module.")


def _shape(node: object) -> tuple[int, ...]:
    return (shape_of(node) or ()) if isinstance(node, Node) else ()


def _same_operators(seen: Survey, module: nn.Module, caller: str, together: Together) -> bool:
    """Whether a forward runs the same operators, on tensors of the same shapes, where the method calls the patch embedding."""
    before = operators(seen)
    vars(module)[caller] = StandInMethod(module, caller, together.replaced(together, {}), Condition(()))
    try:
        return operators(seen) == before
    except Exception:  # the forward may fail when it gets images instead of patches
        return False
    finally:
        del vars(module)[caller]
