"""Find patches to which a method adds their position and puts tokens before them, by tracing patch embedding and method together.

timm's models hold position and tokens as parameters of the module that calls the patch embedding, and use them in its method
``_pos_embed``. No module consists of exactly this part, so the proof has two steps. A trace of the method behind the patch embedding
shows what they compute together. Then the whole forward must run the same operators when the method calls the patch embedding itself
and the forward gives it the images. So nothing in between reads the patches or their sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.fx import Node

from flysurgery.errors import WalkError
from flysurgery.inference.graph import Calls, UnfitError, below, operators, read, sole_user, watch
from flysurgery.inference.match import Held, held_of
from flysurgery.inference.standin import Condition, StandInMethod, Together
from flysurgery.reason import Reason
from flysurgery.walker import Survey, is_in_place, name_of, shape_of

METHOD = "_pos_embed"
"""The method that is given the patches."""
CALLERS = ("forward_features", "forward_intermediates")
"""The methods that call the patch embedding, and then that method."""

_MOVES = frozenset(("flatten", "permute", "reshape", "transpose", "unflatten", "view"))
_IMAGES = 2


@dataclass(frozen=True)
class Embedding:
    """``METHOD`` of a module behind its child ``patches``, which ``caller``, another method, calls one after the other.

    They are a convolution of images of the size ``image`` (channels, height, width), with a position added to its patches and tokens
    put before them, or one of the two. ``called`` are the modules that run. All names but ``fqn`` are those below the module.
    """

    fqn: str
    caller: str
    patches: str
    convolution: str
    position: Held | None
    prefix: tuple[Held, ...]
    image: tuple[int, ...]
    called: tuple[str, ...]


def embedding_of(seen: Survey, calls: Mapping[str, Calls], fqn: str) -> Embedding:
    """What ``METHOD`` of the module ``fqn`` makes of the patches; ``calls`` are those of all modules and methods in one forward."""
    module, given = seen.owners.modules[fqn], calls[below(fqn, METHOD)]
    if not given.one_of_one_tensor or not isinstance(given.first_result, Tensor):
        raise UnfitError("call-form", f"{METHOD} is not called once with one tensor alone, for another one")
    children = {name: calls.get(below(fqn, name), Calls()) for name, _ in module.named_children()}
    child = next((name for name, each in children.items() if each.one_of_one_tensor and each.first_result is given.first_input), None)
    caller = next((name for name in CALLERS if len(calls.get(below(fqn, name), ())) == 1), None)
    if child is None or caller is None:
        raise UnfitError("call-form", f"{METHOD} is not given what a module of its own made of one tensor, in {' or '.join(CALLERS)}")
    images = children[child].first_input
    together = Together(module, METHOD, child)
    try:
        inner = read(together, torch.empty((_IMAGES, *images.shape[1:]), dtype=images.dtype))
    except WalkError as error:
        raise UnfitError("walk", str(error)) from error
    convolution, position, prefix = _Reader(inner).read()
    if not _same_operators(seen, module, caller, together):
        raise UnfitError("shared", f"between its patch embedding and {METHOD} the model computes something else as well")
    called = tuple(name.removeprefix("module.") for name, each in watch(inner).items() if len(each) and name.startswith("module."))
    return Embedding(fqn, caller, child, convolution, position, prefix, tuple(images.shape[1:]), called)


def inline_embedding(seen: Survey, convolution: Node) -> tuple[str, Reason] | None:
    """The parameter that a forward itself adds to patches or puts before them, and why it is not fused; None where there is none."""
    node = convolution
    while (user := sole_user(node)) is not None and name_of(user) in _MOVES:
        node = user
    reader = _Reader(seen)
    found = None if user is None else reader.added(user) or reader.put_before(user)
    if found is None:
        return None
    held = found[1] if isinstance(found[1], Held) else found[1][0]
    return below(held.fqn, held.leaf), Reason("inline", f"a forward that does more uses it with the patches, no method {METHOD} of its own")


class _Reader:
    """Reads the trace of a ``Together``, whose names are those below its module, or of a whole model."""

    def __init__(self, seen: Survey) -> None:
        self.seen = seen

    def read(self) -> tuple[str, Held | None, tuple[Held, ...]]:
        """The convolution, the position and the tokens before the patches."""
        output = next(node for node in self.seen.trace.graph.nodes if node.op == "output")
        value, position, prefix = output.all_input_nodes[0], None, list[Held]()
        while True:
            added, put = self.added(value), self.put_before(value)
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
        return self._convolution(value), position, tuple(prefix)

    def added(self, node: Node) -> tuple[Node, Held] | None:
        """The value and the parameter, one row a token, whose sum the node is."""
        if name_of(node) != "add" or is_in_place(node) or node.kwargs or len(node.args) != 2:
            return None
        for value, rows in (node.args, node.args[::-1]):
            held = self._held(rows)
            if held is not None and isinstance(value, Node) and _shape(rows) == (1, *_shape(value)[1:]):
                return value, held
        return None

    def put_before(self, node: Node) -> tuple[Node, list[Held]] | None:
        """The value and the parameters that the node puts before it, the same ones in each image."""
        if name_of(node) not in ("cat", "concat") or len(node.args) != 2 or node.args[1] not in (1, -2):
            return None
        *before, value = cast(list[Node], node.args[0])
        tokens = [held for each in before if (held := self._repeated(each)) is not None]
        return (value, tokens) if tokens and len(tokens) == len(before) else None

    def _repeated(self, node: Node) -> Held | None:
        """The parameter whose rows the node repeats for each image."""
        rows = node.args[0] if name_of(node) == "expand" else None
        return self._held(rows) if _shape(rows) == (1, *_shape(node)[1:]) else None

    def _held(self, node: object) -> Held | None:
        held = held_of(self.seen, node) if isinstance(node, Node) else None
        return held and replace(held, fqn=_below_together(held.fqn))

    def _convolution(self, rows: Node) -> str:
        """The convolution of the images whose results, patch by patch, are the rows."""
        moves, node = list[Node](), rows
        while name_of(node) in _MOVES and isinstance(before := node.args[0], Node):
            moves.insert(0, node)
            node = before
        source = node.args[0] if name_of(node) == "conv2d" else None
        if not isinstance(source, Node) or source not in self.seen.trace.inputs:
            raise UnfitError("more", f"its patch embedding also computes {name_of(node) or node.name}")
        shape = torch.Size(_shape(node))
        places = torch.arange(shape.numel(), device="cpu").view(shape)
        moved = places
        for move in moves:
            moved = cast(Callable[..., Tensor], move.target)(moved, *move.args[1:], **move.kwargs)
        if not torch.equal(moved, places.flatten(2).transpose(1, 2)):
            raise UnfitError("order", "its patches are not one after the other, row by row of the image")
        return _below_together(self.seen.owners.innermost(node) or "")


def _below_together(fqn: str) -> str:
    """The name below the module of a ``Together`` of what has this name in it; other names stay as they are."""
    return "" if fqn == "module" else fqn.removeprefix("module.")


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
