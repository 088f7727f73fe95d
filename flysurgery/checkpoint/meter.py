"""The most that building a model may take, by the tensors that a folder stores, and a meter that stops it before it takes more."""

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from flysurgery.errors import ModelError

MAX_DEPTH = 4096
"""Most blocks, stages or layers that an argument may ask for; constructors make Python lists of that length."""

PAIR_BYTES = 100
"""What a constructor may take in Python for each pair of places in a window, which some list before they make a tensor of it."""

PIECE_BYTES = 1024
"""About what a tensor object takes besides its numbers; ``unbind`` and ``split`` make many at once."""

RESERVING = frozenset(f"aten::{name}" for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"))
"""Operations whose memory the system hands out only when it is written to."""

FILLING = frozenset(f"aten::{name}_" for name in ("normal", "uniform", "erfinv", "fill", "zero", "clamp", "mul", "add"))
"""Operations by which constructors give parameters their first numbers. On meta there are none, and the shape stays."""


class LimitError(ModelError):
    """A base that takes more to build than the stored tensors justify. It is not to be tried again in another way."""


@dataclass(frozen=True)
class Limits:
    """The most that building one model may take.

    ``steps`` counts modules, parameters and operations of torch. ``nbytes`` adds the sizes of all tensors that these make, except
    parameters that wait on meta. A folder of no size gets 32 MiB.
    """

    steps: int
    nbytes: int

    @classmethod
    def of_stored(cls, shapes: Collection[Sequence[int]]) -> "Limits":
        """The limits for a folder that stores tensors of these shapes."""
        return cls(steps=5000 + 50 * len(shapes), nbytes=(32 << 20) + 64 * sum(prod(shape) for shape in shapes))

    def check_arguments(self, base_args: Mapping[str, Any]) -> None:
        """Refuse arguments by which a constructor would loop in Python, or lengthen a list or text, beyond what is stored (LimitError)."""
        values = list(_within("", base_args))
        numbers = [(name, value) for name, value in values if isinstance(value, int | float)]
        largest = int((self.nbytes / PAIR_BYTES) ** 0.25)
        for name, number in numbers:
            if any(part in name for part in ("depth", "layer", "block")) and number > MAX_DEPTH:
                raise LimitError(f"base_args: {name} is {number}, and models have at most {MAX_DEPTH} layers")
            if "window" in name and number > largest:
                raise LimitError(f"base_args: {name} is {number}, and the tensors that are stored allow windows of at most {largest}")
        number = max((value for _, value in numbers if isinstance(value, int)), default=0)
        lists = [(name, value) for name, value in values if isinstance(value, str | list | tuple)]
        size, name = max(((len(value) * (1 if isinstance(value, str) else 8), name) for name, value in lists), default=(0, ""))
        if size * number > self.nbytes:
            raise LimitError(f"base_args: {number} times what {name} lists is too much for the tensors that are stored")


def _within(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """All values within the arguments, each with the name of the argument or the innermost entry that holds it."""
    yield name, value
    if isinstance(value, Mapping):
        for inner, each in value.items():
            yield from _within(inner, each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _within(name, each)


@contextmanager
def metered(limits: Limits, *, parameters_on_meta: bool) -> Iterator[None]:
    """Inside, what this thread builds is counted, and what exceeds a limit is not done (LimitError).

    With ``parameters_on_meta`` each parameter that is given to a module goes to meta; tied ones stay tied.
    """
    meter, thread = _Meter(limits), threading.get_ident()
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def add_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or threading.get_ident() != thread:
            return None
        meter.step()
        if not parameters_on_meta:
            return None
        if id(parameter) not in moved:
            meta = meter.on_meta(parameter)
            # The original is kept as well, so that no other parameter gets its id.
            moved[id(parameter)], moved[id(meta)] = (parameter, meta), (meta, meta)
        return moved[id(parameter)][1]

    def add_module(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if threading.get_ident() == thread:
            meter.step()

    # The first hook's result counts, which torch's annotations do not say.
    hooks = [
        register_module_parameter_registration_hook(add_parameter),  # pyright: ignore[reportArgumentType]
        register_module_module_registration_hook(add_module),  # pyright: ignore[reportArgumentType]
    ]
    try:
        with meter:
            yield
    finally:
        for hook in hooks:
            hook.remove()


class _Meter(TorchDispatchMode):
    """Sees every operation of torch before it runs; what it will take is found on meta first."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self._limits = limits
        self._steps = self._nbytes = 0

    def step(self) -> None:
        """Count one step more (LimitError)."""
        self._steps += 1
        self._check(self._steps, self._limits.steps, "steps")

    def take(self, nbytes: int) -> None:
        """Count more bytes (LimitError)."""
        self._nbytes += nbytes
        self._check(self._nbytes, self._limits.nbytes, "bytes besides its parameters")

    def _check(self, taken: int, limit: int, what: str) -> None:
        if taken > limit:
            raise LimitError(
                f"building the base takes more than {limit:,} {what}, too much for the tensors that are stored; check base_args"
            )

    def on_meta(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter on meta; its bytes no longer count."""
        rest = max(0, self._nbytes - parameter.untyped_storage().nbytes())
        meta = nn.Parameter(torch.empty_like(parameter.detach(), device="meta"), requires_grad=parameter.requires_grad)
        self._nbytes = rest
        return meta

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        self.step()
        if func._schema.name in ("aten::unbind", "aten::split"):
            self.take(PIECE_BYTES * max(args[0].shape, default=1))
        if func._schema.name == "aten::lift_fresh":  # what torch.tensor made of a list
            self.take(_nbytes(args))
        if func._schema.is_mutable:
            self.take(0)  # it writes to memory that was only reserved
        if func._schema.name in FILLING and args[0].is_meta and not any(isinstance(each, Tensor) and each.ndim for each in args[1:]):
            return args[0]
        if all(each.alias_info is not None for each in func._schema.returns):
            return func(*args, **kwargs)  # it gives views of its arguments, or themselves
        if func._schema.name in RESERVING:  # a parameter's memory is given back when it is registered, before anything else is made
            result = func(*args, **kwargs)
            self._nbytes += _nbytes(result)
            return result
        predicted = _predicted(func, args, kwargs)
        if predicted is not None:
            self.take(predicted)
        result = func(*args, **kwargs)
        if predicted is None:
            self.take(_nbytes(result))
        return result


def _predicted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The bytes that an operation will give; None where shapes alone do not tell, or the operation is going to fail."""

    def on_meta(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    twin_args, twin_kwargs = tree_map_only(Tensor, on_meta, (args, kwargs))
    if any(each.name == "device" for each in func._schema.arguments):
        twin_kwargs["device"] = torch.device("meta")
    try:
        return _nbytes(func(*twin_args, **twin_kwargs))
    except Exception:  # the operation itself says what is wrong
        return None


def _nbytes(result: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tree_leaves(result) if isinstance(each, Tensor))
