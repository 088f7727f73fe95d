"""The fused modules. Each computes one group by its kernel, or by the group's own modules if the kernel does not take the call."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flysurgery import ops
from flysurgery.inference.standin import Together, is_plain
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.ops import Dense, FusedFactors, Gated, Norm, Stage, Way
from flysurgery.torch_state import product_dtype


class Normalized(NamedTuple):
    """The layer norm of a module with this epsilon, as a field of a step."""

    module: nn.Module
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return self.module(x)

    def read(self, inputs: tuple[Tensor, ...]) -> Norm:
        return Norm(getattr(self.module, "weight", None), getattr(self.module, "bias", None), self.eps)


class Parameter(NamedTuple):
    """A parameter that any module may hold: this module, and its name there."""

    module: nn.Module
    name: str

    def read(self, inputs: tuple[Tensor, ...]) -> Tensor | None:
        return getattr(self.module, self.name)


class Input(NamedTuple):
    """An input of a step besides x, by its number; None where a call leaves it out."""

    number: int

    def read(self, inputs: tuple[Tensor, ...]) -> Tensor | None:
        return inputs[self.number] if self.number < len(inputs) else None


class UnknownLayerError(Exception):
    """Kernels do not know a layer."""


class Step(nn.Module):
    """A group of operators. ``enabled`` is false if the kernel must not be used although it could run.

    ``given`` is its operation, of ``kind``, with linear modules, ``Normalized``, ``Parameter`` and ``Input`` as its ``fields`` where an
    operation has tensors. The modules are the step's children; ``held`` are the parameters that it reads of other modules. A step that
    ``trains`` serves calls with gradients, also under autocast, and no others. If its input is ``stream.x``, it puts x in there again as
    its own result, so that one launch adds the residual's gradient. A compiler does not trace a step: compiled code calls it from Python.
    """

    enabled = True
    trains = False
    stream: SimpleNamespace | None = None

    def __init__(self, kind: Callable[..., Any], *fields: Any) -> None:
        super().__init__()
        self._kind, self.given = kind, kind(*fields)
        self._leaves = pytree.tree_leaves(self.given, is_leaf=lambda each: isinstance(each, (Normalized, Parameter, Input)))
        modules = [each.module if isinstance(each, Normalized) else each for each in self._leaves]
        self.layers = nn.ModuleList(each for each in modules if isinstance(each, nn.Module))
        self.held = [each for each in self._leaves if isinstance(each, Parameter)]
        readers = [_linear if isinstance(each, nn.Module) else _READERS.get(type(each)) for each in self.given]
        self._fields = list(zip(readers, self.given, strict=True))
        self._repeating = ops.Repeating()

    def operation(self, x: Tensor, *others: Tensor) -> Any:
        """The group as an operation on its present parameters, or why no kernel knows it."""
        try:
            return self._kind(*[value if read is None else read(value, others) for read, value in self._fields])
        except UnknownLayerError:
            return "it is of a class that the kernels do not know, or has a forward of its own"

    def plain(self, x: Tensor, *others: Tensor) -> Tensor:
        """The group by its own modules."""
        return self._kind(*[each.read(others) if isinstance(each, (Input, Parameter)) else each for each in self.given]).plainly(x)

    def way(self, x: Tensor, *others: Tensor) -> Way | str:
        """How the kernel computes the group for these inputs, or why it cannot."""
        operation = self.operation(x, *others)
        return operation if isinstance(operation, str) else ops.way(x, operation)

    def likeness(self) -> tuple[object, ...]:
        """A key that differs for groups that take different times, besides the sizes of their inputs."""
        return self._kind, *map(_likeness, self._leaves)

    def fused(self, x: Tensor, *others: Tensor) -> Tensor | None:
        """The group by its kernel; None where this does not take the inputs."""
        way = self.way(x, *others)
        return None if isinstance(way, str) else way.run()

    def trained(self, x: Tensor, *others: Tensor) -> Tensor | str:
        """The group with fused gradients, in the dtype of x or that of autocast, or why it has none."""
        if self._kind is not ops.Attention:  # whose inputs autocast has cast, or PyTorch casts
            dtype = product_dtype(x)
            x, *others = (each.to(dtype) for each in (x, *others))  # pyright: ignore[reportAssignmentType]
        operation = self.operation(x, *others)
        if isinstance(operation, str):
            return operation
        if isinstance(operation, ops.Attention):
            return operation.wrong(x) or ops.attended(x, operation)
        if isinstance(operation, ops.PatchEmbedding):
            return operation.wrong_sizes(x) or ops.embedded(x, operation)
        reason, stream = ops.training_reason(x, operation), self.stream  # another thread's stream has another x
        if reason is None and stream is not None and stream.x is x:
            y, stream.x = ops.trained_with_x(x, operation)
            return y
        return reason or ops.trained(x, operation)

    def read(self) -> Iterable[nn.Module]:
        """The modules whose own parameters, not those of their children, ``fused`` reads."""
        return [*self.modules(), *(each.module for each in self.held)]

    @torch.compiler.disable
    def forward(self, x: Tensor, *others: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's annotation
        with _unwatched(x):
            if self.trains and self.enabled and torch.is_grad_enabled():
                y = self.trained(x, *others)
                if not isinstance(y, str):
                    return y
            elif self.enabled and not self.trains and not under_autocast(x):
                y = self._repeating(self.fused, self.read, x, *others)
                if y is not None:
                    return y
        return self.plain(x, *others)


class NormStep(Step):
    """A layer norm by itself, as one module whose place the step takes."""

    def plain(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.layers[0].forward(x)  # its hooks are those of the module in its place


class PatchesStep(Step):
    """Patches of images as a convolution gives them. Where no kernel takes them, PyTorch makes one product of them."""

    def way(self, x: Tensor, *others: Tensor) -> Way | str:
        operation = self.operation(x)
        wrong = operation.wrong(x)
        found = wrong or ops.way(x, operation)
        by_product = Stage((), lambda y, x, given: given.by_product(x))
        return Way((by_product,), x, operation) if isinstance(found, str) and not wrong else found


class EmbeddingStep(Step):
    """Patches with their position and the tokens before them: the result of ``together`` for images of the traced size."""

    def __init__(self, together: Together, image: tuple[int, ...], *fields: Any) -> None:
        super().__init__(ops.PatchEmbedding, *fields)
        self.image = image
        self._together = (together,)  # in a tuple, so that it is no child: it holds the whole model

    def operation(self, x: Tensor, *others: Tensor) -> ops.PatchEmbedding | str:
        if tuple(x.shape[1:]) != self.image:
            return f"position is that of images of {self.image}, got {tuple(x.shape)}"
        return super().operation(x, *others)

    def plain(self, x: Tensor, *others: Tensor) -> Tensor:
        return self._together[0](x)


def _group(value: tuple[Any, ...], inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Parameters, or a projection, which may have several parts side by side."""
    if all(type(each) is Parameter for each in value):
        return tuple([getattr(*each) for each in value])
    (linear,) = value
    split = type(linear) is SplitLinear and is_plain(linear)
    return tuple([_linear(part) for part in (linear._modules.values() if split else value)])  # pyright: ignore[reportArgumentType]


def _linear(linear: nn.Module, inputs: tuple[Tensor, ...] = ()) -> ops.Linear:
    """The factors or the weight of a linear layer, and its bias, as they are now."""
    if is_plain(linear):
        if type(linear) is ButterflyLinear:
            return FusedFactors(*linear.own_parameters())
        if type(linear) is nn.Linear:
            return Dense(linear.weight, linear.bias)
    raise UnknownLayerError


def _gated(value: Any, inputs: tuple[Tensor, ...]) -> Gated:
    return Gated(tuple(map(_linear, value.members)), value.gate)


_READERS: dict[type, Callable[[Any, tuple[Tensor, ...]], Any]]
_READERS = {Gated: _gated, tuple: _group, Input: Input.read, Parameter: Parameter.read, Normalized: Normalized.read}
"""What reads a field of a step's operation as tensors; ``_linear`` reads modules, and all else stays as it is."""


def _likeness(leaf: Any) -> object:
    if isinstance(leaf, Parameter):
        tensor = getattr(*leaf)
        return None if tensor is None else tensor.shape
    if isinstance(leaf, Normalized):
        leaf = leaf.module
    return tuple((name, each.shape) for name, each in leaf.named_parameters()) if isinstance(leaf, nn.Module) else leaf


def watched() -> bool:
    """Whether a mode that watches functions of PyTorch, or a hook on all modules, must see all calls of a module."""
    return bool(torch._C._len_torch_function_stack() or nn.modules.module._has_any_global_hook())


def _unwatched(x: Tensor) -> AbstractContextManager[object]:
    """A block in which modes that watch functions of PyTorch, such as ``Attending``, do not see accesses to plain tensors."""
    return torch._C.DisableTorchFunction() if type(x) is Tensor else nullcontext()


def under_autocast(x: Tensor) -> bool:
    """Whether autocast decides the dtype of each operation here, so that no kernel, which computes in the dtype of x, may run."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
