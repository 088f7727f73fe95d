"""Questions to a traced model: where a value comes from and who uses it, which modules run around a node, how modules are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor
from torch.fx import Node

from flysurgery.errors import WalkError
from flysurgery.surgery import Reason
from flysurgery.walker import Survey, is_in_place, name_of, one_line, run_fake, shape_of

Made = TypeVar("Made")

_COPIES = frozenset(("alias", "clone", "contiguous", "detach", "lift_fresh"))
_CASTS = frozenset(("to", "_to_copy", "type_as"))
_DROPOUTS = frozenset(("dropout", "feature_dropout"))


def is_idle(node: Node) -> bool:
    """Whether the node returns its first argument unchanged: an inactive dropout, a copy, a cast to the same dtype."""
    name = name_of(node)
    if name in _DROPOUTS:
        return len(node.args) > 2 and node.args[2] is False
    if name in _CASTS:
        return _kind(node) is not None and _kind(node) == _kind(node.args[0])
    return name in _COPIES


def origin(node: Node) -> Node:
    """The node itself, or the node whose value it passes on if it is idle."""
    while is_idle(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def users(node: Node) -> list[Node]:
    """The nodes that use a value, followed past idle ones. An idle end counts as a user; the exporter's assertions do not."""
    found: list[Node] = []
    for user in node.users:
        if "_assert" in name_of(user):
            continue
        beyond = users(user) if is_idle(user) else []
        found += beyond or [user]
    return list(dict.fromkeys(found))


def sole_user(node: Node) -> Node | None:
    """The only node that uses a value; None where there are several or none."""
    found = users(node)
    return found[0] if len(found) == 1 else None


def summands(node: Node) -> tuple[Node, Node] | None:
    """The two operands of a sum of tensors of one shape that is a new tensor; None for any other node."""
    if name_of(node) != "add" or is_in_place(node) or node.kwargs or len(node.args) != 2:
        return None
    left, right = node.args
    if not (isinstance(left, Node) and isinstance(right, Node)) or shape_of(left) is None or shape_of(left) != shape_of(right):
        return None
    return left, right


class UnfitError(Exception):
    """Why something is no group or has no replacement; ``attempt`` turns it into a reason."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.reason = Reason(code, text)


def attempt(make: Callable[..., Made], *args: Any) -> Made | Reason:
    """What ``make`` makes of the arguments, or why it cannot."""
    try:
        return make(*args)
    except UnfitError as unfit:
        return unfit.reason


def attention_among(nodes: Iterable[Node]) -> Node | None:
    """The only call of scaled_dot_product_attention, without mask and dropout; None where there is no such call."""
    calls = [node for node in nodes if name_of(node) == "scaled_dot_product_attention"]
    if len(calls) != 1 or attention_operands(*calls[0].args, **calls[0].kwargs) is None:
        return None
    return calls[0] if all(len(shape_of(node) or ()) == 4 for node in calls[0].args[:3] if isinstance(node, Node)) else None


def attention_operands(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    *,
    scale: Any = None,
    enable_gqa: Any = False,
) -> tuple[Any, Any, Any] | None:
    """The operands of a call of scaled_dot_product_attention; None where the call does more than the kernel."""
    return None if attn_mask is not None or dropout_p or is_causal or enable_gqa else (query, key, value)


def _kind(node: object) -> tuple[Any, ...] | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return (value.dtype, value.device) if isinstance(value, Tensor) else None


@dataclass
class Calls:
    """How often one module is called in one forward, and the arguments and the result of the first call."""

    count: int = 0
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    result: Any = None

    @property
    def first_input(self) -> Any:
        """The first positional argument; None where there is none."""
        return self.args[0] if self.args else None

    @property
    def one_of_one_tensor(self) -> bool:
        """Whether there was one call, with one tensor and nothing else, for another one."""
        alone = self.count == len(self.args) == 1 and not self.kwargs
        return alone and isinstance(self.first_input, Tensor) and isinstance(self.result, Tensor)

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record one call."""
        if self.count == 0:
            self.args, self.kwargs, self.result = args, kwargs, result
        self.count += 1


def watch(seen: Survey) -> dict[str, Calls]:
    """Run the surveyed stand-in once on fake tensors, and record the calls of every module, by its first name.

    Raises:
        WalkError: the forward needs values of tensors, for example to select rows by them.
    """
    found: dict[str, Calls] = {}
    handles = []
    for fqn, module in seen.double.named_modules():
        calls = found[fqn] = Calls()
        handles.append(module.register_forward_hook(lambda _, *call, calls=calls: calls.note(*call), with_kwargs=True))
    try:
        run_fake(seen.double, seen.example)
    except Exception as error:  # the forward may raise anything, as in trace
        raise WalkError(
            f"{type(seen.double).__name__} cannot be walked, because it does not run without data: {one_line(error)}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return found
