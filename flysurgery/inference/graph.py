"""A traced model without idle nodes, questions to its nodes, and how its modules are called."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar
from weakref import ref

from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from flysurgery.errors import Reason, WalkError, first_line
from flysurgery.walker import Example, Survey, is_in_place, name_of, run_fake, shape_of, survey

Made = TypeVar("Made")

_COPIES = frozenset(("alias", "clone", "contiguous", "detach", "lift_fresh"))
_CASTS = frozenset(("to", "_to_copy", "type_as"))
_DROPOUTS = frozenset(("dropout", "feature_dropout"))
_SPLITS = frozenset(("chunk", "split"))


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


def below(fqn: str, name: str) -> str:
    """The full name of an object with this name in the module ``fqn``."""
    return f"{fqn}.{name}" if fqn else name


def read(model: nn.Module, example: Example | None = None, *, prepare: Callable[[nn.Module], None] | None = None) -> Survey:
    """``survey``, without the exporter's assertions and without nodes that pass on a value: their users take the value itself."""
    seen = survey(model, example, prepare=prepare)
    graph, passed = seen.trace.graph, dict[Node, Node]()
    for node in list(graph.nodes):
        if "_assert" in name_of(node):
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.users and _is_idle(node) and isinstance(source := node.args[0], Node):  # without users the model may store the value
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            passed[node] = source
    return replace(seen, calls=[replace(call, source=passed.get(call.source, call.source)) for call in seen.calls])


def _is_idle(node: Node) -> bool:
    """Whether the node returns its first argument unchanged: an inactive dropout, a copy, a cast to the same dtype."""
    name = name_of(node)
    if name in _DROPOUTS:
        return len(node.args) > 2 and node.args[2] is False
    if name in _CASTS:
        return _kind(node) is not None and _kind(node) == _kind(node.args[0])
    return name in _COPIES


def _kind(node: object) -> tuple[Any, ...] | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return (value.dtype, value.device) if isinstance(value, Tensor) else None


def operand(node: Node) -> Node:
    """The operand of a node that has one."""
    first = node.args[0]
    assert isinstance(first, Node)  # operators of one tensor have it as their first argument
    return first


def sole_user(node: Node) -> Node | None:
    """The only node that uses a value; None where there are several or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def is_norm(node: Node) -> bool:
    """Whether the node is a layer norm over the last dimension."""
    sizes = node.args[1] if name_of(node) == "layer_norm" else ()
    return isinstance(sizes, (list, tuple)) and len(sizes) == 1


def summands(node: Node) -> tuple[Node, ...]:
    """The two operands of a sum of tensors of one shape that is a new tensor; none for any other node."""
    if name_of(node) != "add" or is_in_place(node) or node.kwargs:
        return ()
    operands = [each for each in node.args if isinstance(each, Node)]
    shapes = [*map(shape_of, operands)]
    return tuple(operands) if len(shapes) == 2 and shapes[0] == shapes[1] is not None else ()


def half_of(node: Node) -> tuple[Node, int, Node] | None:
    """Where a node is one half of a value's last dimension: the value, the half's place (0 or 1), and the node that split it."""
    split, place = node.args[:2] if name_of(node) == "getitem" else (None, None)
    if not isinstance(split, Node) or name_of(split) not in _SPLITS or not isinstance(split.args[0], Node) or len(split.meta["val"]) != 2:
        return None
    whole, after = shape_of(split.args[0]), shape_of(node)
    if not isinstance(place, int) or place not in (0, 1) or not after or whole != (*after[:-1], 2 * after[-1]):
        return None
    return split.args[0], place, split


class Calls(list[tuple[tuple[Any, ...], dict[str, Any], Any]]):
    """The calls of one module in one forward: positional arguments, named arguments and result of each."""

    def noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The same method, whose calls are recorded."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self.append((args, kwargs, result))
            return result

        return noted

    @property
    def first_input(self) -> Any:
        """The first positional argument of the first call; None where there is none."""
        return self[0][0][0] if self and self[0][0] else None

    @property
    def first_result(self) -> Any:
        return self[0][2] if self else None

    @property
    def one_of_one_tensor(self) -> bool:
        """Whether there was one call, with one tensor and nothing else."""
        return [(len(args), kwargs) for args, kwargs, _ in self] == [(1, {})] and isinstance(self.first_input, Tensor)

    def take(self, value: object) -> bool:
        """Whether there was one call, with this tensor and nothing else."""
        return self.one_of_one_tensor and self.first_input is value


def watch(seen: Survey, methods: Iterable[str] = ()) -> dict[str, Calls]:
    """The calls of every module, by its first name, in one forward of the surveyed stand-in on fake tensors.

    Calls of ``methods`` of a class, if it has them, have the name that a child of that name would have. ``WalkError`` says that the
    forward needs values of tensors, for example to select rows by them.
    """
    found: dict[str, Calls] = {}
    with ExitStack() as undone:
        for fqn, module in seen.double.named_modules():
            calls = found[fqn] = Calls()
            hook = module.register_forward_hook(lambda _, *call, calls=calls: calls.append(call), with_kwargs=True)
            undone.callback(hook.remove)
            for name in methods:
                if callable(getattr(type(module), name, None)) and name not in vars(module):
                    vars(module)[name] = found.setdefault(below(fqn, name), Calls()).noting(getattr(module, name))
                    undone.callback(vars(module).pop, name)
        try:
            run_fake(seen.double, seen.example)
        except Exception as error:  # the forward may raise anything, as in trace
            what = f"{type(seen.double).__name__} cannot be walked, because it does not run without data"
            raise WalkError(f"{what}: {first_line(error)}") from error
    return found


def operators(seen: Survey, kept: list[object] | None = None) -> list[tuple[object, ...]]:
    """The operators of one forward of the surveyed stand-in as it is now, with the shapes of tensors and all other arguments.

    Results that something still holds after the forward are put into ``kept``. What the forward raises, passes.
    """
    notes, made = list[tuple[object, ...]](), list[ref[Tensor]]()

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            leaves = pytree.tree_leaves((args, kwargs or {}))
            if func.namespace not in ("prim", "profiler"):  # which compute nothing, and pass on values that cannot be compared
                notes.append((str(func), *(tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves)))
            result = func(*args, **(kwargs or {}))
            made.extend(ref(each) for each in pytree.tree_leaves(result) if isinstance(each, Tensor))
            return result

    class Noted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = seen.double

        def forward(self, *args: Any) -> None:
            with Noting():
                self.model(*args)

    run_fake(Noted(), seen.example)
    if kept is not None:
        kept += [each for reference in made if (each := reference()) is not None]
    return notes
