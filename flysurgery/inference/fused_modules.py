"""The fused modules. Each computes one group by its kernel, or by the group's own modules if the kernel does not take the call."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

from flysurgery import ops
from flysurgery.inference.standin import Together, is_plain
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.ops import Dense, FusedFactors, Linear, Norm, Operation, Stage, Way
from flysurgery.torch_state import product_dtype

UNKNOWN = "it is of a class that the kernels do not know, or has a forward of its own"

Normalized = tuple[nn.Module, float]
"""A layer norm's module, and its epsilon."""

Parameter = tuple[nn.Module, str]
"""A parameter that any module may hold: this module, and its name there."""

_ACTIVATIONS = {"gelu": functional.gelu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"), "silu": functional.silu}


class Step(nn.Module):
    """A group of operators. ``enabled`` is false if the kernel must not be used although it could run.

    Its children are the modules of the group; ``held`` are the parameters that it reads of other modules. ``options`` are what
    groups of equal shapes may differ in. A step that ``trains`` serves calls with gradients, also under autocast, and no others.
    A compiler does not trace a step: compiled code calls it from Python.
    """

    enabled = True
    trains = False

    def __init__(self, held: Iterable[Parameter | None] = (), options: tuple[object, ...] = ()) -> None:
        super().__init__()
        self.held, self.options = tuple(held), options
        self._repeating = ops.Repeating()

    def operation(self, x: Tensor, *others: Tensor) -> Operation | str:
        """The group as an operation on its present parameters, or why no kernel knows it."""
        raise NotImplementedError

    def plain(self, x: Tensor, *others: Tensor) -> Tensor:
        """The group by its own modules."""
        raise NotImplementedError

    def way(self, x: Tensor, *others: Tensor) -> Way | str:
        """How the kernel computes the group for these inputs, or why it cannot."""
        operation = self.operation(x, *others)
        return operation if isinstance(operation, str) else ops.way(x, operation)

    def likeness(self) -> tuple[object, ...]:
        """A key that differs for groups that take different times, besides the sizes of their inputs."""
        shapes = tuple((name, parameter.shape) for name, parameter in self.named_parameters())
        return shapes, tuple(each is None for each in self.held), self.options

    def fused(self, x: Tensor, *others: Tensor) -> Tensor | None:
        """The group by its kernel; None where this does not take the inputs."""
        way = self.way(x, *others)
        return None if isinstance(way, str) else way.run()

    def trained(self, x: Tensor, *others: Tensor) -> Tensor | str:
        """The group with fused gradients, in the dtype of x or that of autocast, or why it has none."""
        dtype = product_dtype(x)
        x, *others = (each.to(dtype) for each in (x, *others))  # pyright: ignore[reportAssignmentType]
        operation = self.operation(x, *others)
        if isinstance(operation, str):
            return operation
        return ops.training_reason(x, operation) or ops.trained(x, operation)

    def read(self) -> Iterable[nn.Module]:
        """The modules whose own parameters, not those of their children, ``fused`` reads."""
        return [*self.modules(), *(each[0] for each in self.held if each is not None)]

    @torch.compiler.disable
    def forward(self, x: Tensor, *others: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's annotation
        with _unwatched(x):
            if self.trains and self.enabled and torch.is_grad_enabled():
                y = self.trained(x, *others)
                if not isinstance(y, str):
                    return y
            elif self.enabled and not self.trains and not _under_autocast(x):
                y = self._repeating(self.fused, self.read, x, *others)
                if y is not None:
                    return y
        return self.plain(x, *others)

    def _held(self, index: int) -> Tensor | None:
        """A held parameter as it is now."""
        held = self.held[index]
        return None if held is None else getattr(*held)


class NormLinearStep(Step):
    """``linear(norm(x))``, where ``linear`` may be a projection of several parts side by side."""

    def __init__(self, norm: nn.Module, eps: float, linear: nn.Module) -> None:
        super().__init__()
        self.norm, self.eps, self.linear = norm, eps, linear

    def operation(self, x: Tensor, *others: Tensor) -> Operation | str:
        split = type(self.linear) is SplitLinear and is_plain(self.linear)
        group = [linear_of(part) for part in (self.linear._modules.values() if split else (self.linear,))]
        known = tuple(each for each in group if each is not None)
        return ops.NormLinears(norm_of(self.norm, self.eps), known) if len(known) == len(group) else UNKNOWN

    def plain(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class LinearResidualStep(Step):
    """``residual + scale * linear(x)``; called with x and the residual."""

    def __init__(self, linear: nn.Module, scale: Parameter | None) -> None:
        super().__init__((scale,))
        self.linear = linear

    def operation(self, x: Tensor, *others: Tensor) -> ops.LinearResidual | str:
        linear = linear_of(self.linear)
        return UNKNOWN if linear is None else ops.LinearResidual(linear, others[0], self._held(0))

    def leaves_moments(self, x: Tensor, residual: Tensor) -> bool:
        """Whether ``with_moments`` can be called for these inputs."""
        if not self.enabled or _under_autocast(x):
            return False
        operation = self.operation(x, residual)
        return not isinstance(operation, str) and ops.leaves_moments(x, operation)

    def with_moments(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The group by its kernel, and the moments of the rows of its result, which a ``FeedForwardStep`` may read."""
        operation = self.operation(x, residual)
        assert not isinstance(operation, str)  # leaves_moments has said so
        return ops.run_with_moments(x, operation)

    def plain(self, x: Tensor, *others: Tensor) -> Tensor:
        return others[0] + _scaled(self.linear(x), self._held(0))


class AttentionStep(Step):
    """Attention of q with k and v; ``scale`` None stands for one over the root of a head's features."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.scale = scale

    def operation(self, x: Tensor, *others: Tensor) -> Operation | str:
        return ops.Attention(others[0], others[1], self.scale)

    def trained(self, x: Tensor, *others: Tensor) -> Tensor | str:
        given = ops.Attention(others[0], others[1], self.scale)
        return given.wrong(x) or ops.attended(x, given)

    def plain(self, x: Tensor, *others: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, others[0], others[1], scale=self.scale)


class FeedForwardStep(Step):
    """``x + scale * second(inner(hidden(norm(x))))``; without ``x +`` where ``residual`` is false, ``inner`` a norm or nothing.

    ``hidden`` is ``activation(first(x))``. Where ``gate`` is the index of a gate, ``first`` gives it and a value, by two layers or as the
    halves of one's outputs, and ``hidden`` is ``activation(gate) * value``. The moments of the rows of x may be a second argument.
    """

    def __init__(
        self,
        norm: Normalized,
        first: Iterable[nn.Module],
        gate: int | None,
        activation: str,
        inner: Normalized | None,
        second: nn.Module,
        scale: Parameter | None,
        residual: bool,
    ) -> None:
        super().__init__((scale,), (gate, activation, residual))
        norms = [norm] if inner is None else [norm, inner]
        self.norms, self.eps = nn.ModuleList(each for each, _ in norms), [eps for _, eps in norms]
        self.first, self.second = nn.ModuleList(first), second
        self.gate, self.activation, self.residual = gate, activation, residual

    def operation(self, x: Tensor, *others: Tensor) -> Operation | str:
        first, second = [linear_of(each) for each in self.first], linear_of(self.second)
        known = [each for each in first if each is not None]
        if second is None or len(known) != len(first):
            return UNKNOWN
        norm, *inner = [norm_of(each, eps) for each, eps in zip(self.norms, self.eps, strict=True)]
        up = known[0] if self.gate is None else ops.Gated(tuple(known), self.gate)
        last = inner[0] if inner else None
        return ops.FeedForward(norm, up, second, self.activation, self._held(0), self.residual, last, *others)

    def reads_moments(self, x: Tensor) -> bool:
        """Whether a call with x can use the moments of its rows as a second argument."""
        if not self.enabled or _under_autocast(x):
            return False
        way = self.way(x)
        return not isinstance(way, str) and way.launches()[:1] == (ops.MOMENTS,)

    def plain(self, x: Tensor, *others: Tensor) -> Tensor:
        activation, normed = _ACTIVATIONS[self.activation], self.norms[0](x)
        parts = [first(normed) for first in self.first]
        if self.gate is None:
            hidden = activation(parts[0])
        else:
            parts = parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)
            hidden = activation(parts[self.gate]) * parts[1 - self.gate]
        for inner in self.norms[1:]:
            hidden = inner(hidden)
        branch = _scaled(self.second(hidden), self._held(0))
        return x + branch if self.residual else branch


class PatchesStep(Step):
    """A convolution whose stride is its kernel's size, as one product of the flattened patches and a matrix.

    Gives what the convolution gives, (images, features, rows, columns), with the features of a patch side by side in memory.
    """

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution

    def operation(self, x: Tensor, *others: Tensor) -> Operation | str:
        operation = ops.PatchEmbedding(self.convolution.weight, self.convolution.bias)
        return operation.wrong(x) or operation

    def way(self, x: Tensor, *others: Tensor) -> Way | str:
        operation = self.operation(x)
        if isinstance(operation, str):
            return operation
        way = ops.way(x, operation)
        stages = (Stage((), lambda y, x, given: given.by_product(x)),) if isinstance(way, str) else way.stages
        return Way((*stages, Stage((), _as_image)), x, operation)

    def trained(self, x: Tensor, *others: Tensor) -> Tensor | str:
        operation = ops.PatchEmbedding(self.convolution.weight, self.convolution.bias)
        return operation.wrong_sizes(x) or _as_image(operation.by_product(x), x, operation)

    def plain(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.convolution.forward(x)  # its hooks are run by what replaces it


class EmbeddingStep(Step):
    """Patches with their position and the tokens before them: the result of ``together`` for images of the traced size."""

    def __init__(
        self,
        together: Together,
        convolution: nn.Conv2d,
        position: Parameter | None,
        prefix: Iterable[Parameter],
        image: tuple[int, ...],
    ) -> None:
        super().__init__((position, *prefix))
        self.convolution, self.image = convolution, image
        self._together = (together,)  # in a tuple, so that it is no child: it holds the whole model

    def operation(self, x: Tensor, *others: Tensor) -> ops.PatchEmbedding | str:
        if tuple(x.shape[1:]) != self.image:
            return f"position is that of images of {self.image}, got {tuple(x.shape)}"
        prefix = [getattr(*each) for each in self.held[1:] if each is not None]
        return ops.PatchEmbedding(self.convolution.weight, self.convolution.bias, self._held(0), prefix)

    def trained(self, x: Tensor, *others: Tensor) -> Tensor | str:
        operation = self.operation(x)
        if isinstance(operation, str):
            return operation
        return operation.wrong_sizes(x) or operation.by_product(x).to(product_dtype(x))

    def plain(self, x: Tensor, *others: Tensor) -> Tensor:
        return self._together[0](x)


def linear_of(linear: nn.Module | None) -> Linear | None:
    """The factors or the weight of a linear layer, and its bias, as they are now; None for any other module."""
    if linear is None or not is_plain(linear):
        return None
    if type(linear) is ButterflyLinear:
        return FusedFactors(*linear.own_parameters())
    return Dense(linear.weight, linear.bias) if type(linear) is nn.Linear else None


def norm_of(norm: nn.Module, eps: float) -> Norm:
    """The weight and bias of a layer norm as they are now."""
    return Norm(getattr(norm, "weight", None), getattr(norm, "bias", None), eps)


def watched() -> bool:
    """Whether a mode that watches functions of PyTorch, or a hook on all modules, must see all calls of a module."""
    return bool(torch._C._len_torch_function_stack() or nn.modules.module._has_any_global_hook())


def _unwatched(x: Tensor) -> AbstractContextManager[object]:
    """A block in which modes that watch functions of PyTorch, such as ``Attending``, do not see accesses to plain tensors."""
    return torch._C.DisableTorchFunction() if type(x) is Tensor else nullcontext()


def _under_autocast(x: Tensor) -> bool:
    """Whether autocast decides the dtype of each operation here, so that no kernel, which computes in the dtype of x, may run."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def _scaled(branch: Tensor, scale: Tensor | None) -> Tensor:
    return branch if scale is None else branch * scale


def _as_image(y: Tensor, x: Tensor, given: ops.PatchEmbedding) -> Tensor:
    _, _, high, wide = given.weight.shape
    return y.transpose(1, 2).unflatten(2, (x.shape[2] // high, x.shape[3] // wide))
