"""From a model to its graph of aten operators: a stand-in with the same tensors, its export, and forwards on fake tensors."""

import contextlib
import copy
import inspect
import io
import itertools
import logging
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from flysurgery.errors import WalkError, first_line, raised_as
from flysurgery.walker.operations import is_fused_attention, name_of

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter or buffer; the CPU where it has none."""
    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def shadow(model: nn.Module) -> nn.Module:
    """A copy of the module tree that holds the same parameters and buffers (not copies of them), in eval mode and without hooks.

    What is set on it, or stored by a trace, does not reach ``model``. Hooks of transformers stay: its models collect hidden states by them.
    Tensors on meta become empty ones on the CPU, on which numbers that a forward computes from shapes are known; they take no memory.
    """
    memo: dict[int, Any] = {id(tensor): _on_cpu(tensor) for tensor in itertools.chain(model.parameters(), model.buffers())}
    for value in itertools.chain.from_iterable(vars(module).values() for module in model.modules()):
        if isinstance(value, Tensor) and id(value) not in memo:
            memo[id(value)] = value.detach().clone()  # deepcopy refuses results of operations, such as an attention map kept for later
    with raised_as(WalkError, f"{type(model).__name__} cannot be walked, because its modules cannot be copied"):
        double = copy.deepcopy(model, memo)
    for hooks in [getattr(module, name, {}) for module in double.modules() for name in HOOKS]:
        for key in [key for key, hook in hooks.items() if not getattr(hook, "__module__", "").startswith("transformers.")]:
            del hooks[key]
    return double.eval()


def _on_cpu(tensor: Tensor) -> Tensor:
    if not tensor.is_meta:
        return tensor
    empty = torch.empty_like(tensor, device="cpu")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def on_device_of(model: nn.Module, example: tuple[Any, ...]) -> tuple[Any, ...]:
    """The example with empty tensors for those that are on another device than the model."""
    device = device_of(model)
    return pytree.tree_map_only(Tensor, lambda t: t if t.device == device else torch.empty_like(t, device=device), example)


@contextlib.contextmanager
def isolated(double: nn.Module) -> Iterator[None]:
    """For the time of a trace: no gradients, no warnings or printed graphs, and random states and function caches untouched by it."""
    state, disabled = random.getstate(), logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    _clear_caches(double)
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        _clear_caches(double)
        logging.disable(disabled)
        random.setstate(state)


def _clear_caches(model: nn.Module) -> None:
    """Empty the ``functools`` caches of the model's classes, and beside them, also where transformers wraps them.

    A cached fake tensor would spoil later real forwards.
    """
    classes = {found for module in model.modules() for found in type(module).__mro__}
    names = {found.__module__ for found in classes if not found.__module__.startswith("torch.")}
    holders = [*(sys.modules[name] for name in names if name in sys.modules), *(found for found in classes if found.__module__ in names)]
    for value in [value for holder in holders for value in vars(holder).values()]:
        cells = (value.__closure__ or ()) if isinstance(value, FunctionType) else ()
        for each in (value, *map(_content, cells)):
            clear = getattr(each, "cache_clear", None)
            if callable(clear):
                clear()


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is not bound yet
        return None


def inlined(module: GraphModule) -> Graph:
    """The module's graph with the bodies of higher-order operators in place of their calls."""
    if not any(isinstance(child, GraphModule) for child in module.children()):
        return module.graph
    flat = Graph()
    copies: dict[Node, Any] = {}
    for node in module.graph.nodes:
        call = _call_of_body(module, node)
        if call is not None:
            body, args = call
            inner = inlined(body)
            holes = [inner_node for inner_node in inner.nodes if inner_node.op == "placeholder"]
            values = pytree.tree_map_only(Node, lambda n: copies[n], args)
            copies[node] = flat.graph_copy(inner, dict(zip(holes, values, strict=True)))
        elif node.args and isinstance(node.args[0], Node) and isinstance(copies.get(node.args[0]), (tuple, list)):
            copies[node] = copies[node.args[0]][node.args[1]]  # one of the results of a body
        else:
            copies[node] = flat.node_copy(node, lambda n: copies[n])
    return flat


def _call_of_body(module: GraphModule, node: Node) -> tuple[GraphModule, list[Any]] | None:
    """The nested graph that a node runs, and what it is run on."""
    named = [(i, str(arg.target)) for i, arg in enumerate(node.args) if isinstance(arg, Node) and arg.op == "get_attr"]
    bodies = [(i, body) for i, name in named if isinstance(body := getattr(module, name, None), GraphModule)]
    # a conditional has two bodies, of which one runs: it stays a single opaque node
    if node.op != "call_function" or len(bodies) != 1 or is_fused_attention(name_of(node)):  # whose bodies change scores
        return None
    position, body = bodies[0]
    return body, list(node.args[position + 1 :])


@dataclass(frozen=True)
class Trace:
    """A traced forward pass: ``parameters`` maps placeholders to the names of their parameters, ``inputs`` are those of the example."""

    graph: Graph
    parameters: dict[Node, str]
    inputs: frozenset[Node]


def _left_out(model: nn.Module, example: tuple[Any, ...]) -> str:
    """Which of the forward's inputs the example gives, where it leaves some out."""
    names = [each.name for each in inspect.signature(model.forward).parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    given = [name for name, value in zip(names, example, strict=False) if value is not None]
    others = [name for name in names if name not in given]
    if not others:
        return ""
    also = ", ".join(others[:4]) + (", ..." if len(others) > 4 else "")
    return f"; the example gives {', '.join(given)}; if the forward needs {also} too, give a tuple or a dict of what it takes"


def trace(double: nn.Module, example: tuple[Any, ...]) -> Trace:
    """Export the forward pass of a ``shadow`` for the example's shapes, or raise a WalkError with the exporter's own reason."""
    # imported here: they take about a second, which the rest of the package need not wait for
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.export import export

    try:
        with isolated(double):
            program = export(double, example, strict=False)
    except Exception as error:
        reason = f"torch.export cannot trace it: {first_line(error)}{_left_out(double, example)}"
        raise WalkError(f"{type(double).__name__} cannot be walked, because {reason}") from error
    values = (node.meta.get("val") for node in program.graph.nodes)
    for mode in {value.fake_mode for value in values if isinstance(value, FakeTensor)}:
        _forget_sources(mode)
    signature = program.graph_signature
    graph = inlined(program.graph_module)
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    parameters = {placeholders[name]: fqn for name, fqn in signature.inputs_to_parameters.items()}
    inputs = frozenset(placeholders[name] for name in signature.user_inputs if isinstance(name, str) and name in placeholders)
    return Trace(graph, parameters, inputs)


def run_fake(double: nn.Module, example: tuple[Any, ...]) -> Any:
    """The result of a forward pass of a ``shadow`` on fake tensors: shapes without data. Whatever the forward raises, passes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with isolated(double), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        result = double(*pytree.tree_map_only(Tensor, mode.from_tensor, example))
    _forget_sources(mode)
    return result


def _forget_sources(mode: Any) -> None:
    """Empty the maps from real tensors to fake ones, the exporter's too: ``torch.utils.swap_tensors`` refuses what is in them."""
    from torch.fx.experimental import proxy_tensor

    converter = mode.fake_tensor_converter.meta_converter
    converter.describer.lookup_tensor.clear()
    converter.tensor_memo.clear()
    getattr(proxy_tensor, "_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT", {}).clear()
