"""The fused modules. Each computes one group by its kernel, or by the group's own modules if the kernel does not take the call."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from flysurgery import ops
from flysurgery.inference import operands
from flysurgery.ops import Way

UNKNOWN = "it is of a class that the kernels do not know, or has a forward of its own"

Normalized = tuple[nn.Module, float]
"""A layer norm's module, and its epsilon."""

_ACTIVATIONS = {"gelu": functional.gelu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"), "silu": functional.silu}


class Step(nn.Module):
    """A group of operators. ``enabled`` is false if the kernel must not be used although it could run."""

    enabled = True

    def __init__(self) -> None:
        super().__init__()
        self._repeating = ops.Repeating()

    def way(self, x: Tensor, *others: Tensor) -> Way | str:
        """How the kernel computes the group for these inputs, or why it cannot."""
        raise NotImplementedError

    def likeness(self) -> tuple[object, ...]:
        """A key that differs for groups that take different times, besides the sizes of their inputs."""
        raise NotImplementedError

    def plain(self, x: Tensor, *others: Tensor) -> Tensor:
        """The group by its own modules."""
        raise NotImplementedError

    def fused(self, x: Tensor, *others: Tensor) -> Tensor | None:
        """The group by its kernel; None where this does not take the inputs."""
        way = self.way(x, *others)
        return None if isinstance(way, str) else way.run()

    def read(self) -> Iterable[nn.Module]:
        """The modules whose own parameters, not those of their children, ``fused`` reads."""
        return self.modules()

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        with operands.unwatched(x):
            if self.enabled and operands.under_autocast(x) is None:
                y = self._repeating(self.fused, self.read, x, *others)
                if y is not None:
                    return y
        return self.plain(x, *others)


class NormLinearStep(Step):
    """``linear(norm(x))``, where ``linear`` may be a projection of several parts side by side."""

    def __init__(self, norm: nn.Module, eps: float, linear: nn.Module) -> None:
        super().__init__()
        self.norm, self.eps, self.linear = norm, eps, linear

    def way(self, x: Tensor, *others: Tensor) -> Way | str:
        group = operands.group_of(self.linear)
        return UNKNOWN if group is None else ops.way(x, ops.NormLinears(operands.norm_of(self.norm, self.eps), group))

    def likeness(self) -> tuple[object, ...]:
        return shapes_of(self.norm, self.linear)

    def plain(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class LayerNormStep(Step):
    """A single layer norm. A compiler makes its own, which it fuses with its neighbours. PyTorch 2.11's compiler does not end where an
    operator that it does not know first appears behind many residual sums."""

    def __init__(self, norm: nn.Module, eps: float) -> None:
        super().__init__()
        self.norm, self.eps = norm, eps

    def way(self, x: Tensor, *others: Tensor) -> Way | str:
        if torch.compiler.is_compiling():
            return "a compiler takes norms by itself"
        return ops.way(x, ops.LayerNorm(operands.norm_of(self.norm, self.eps)))

    def likeness(self) -> tuple[object, ...]:
        return shapes_of(self.norm)

    def plain(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.norm(x)


class LinearResidualStep(Step):
    """``residual + scale * linear(x)``; called with x and the residual."""

    def __init__(self, linear: nn.Module, scale: tuple[nn.Module, str] | None) -> None:
        super().__init__()
        self.linear = linear
        self._scale = scale

    def way(self, x: Tensor, *others: Tensor) -> Way | str:
        linear = operands.linear_of(self.linear)
        return UNKNOWN if linear is None else ops.way(x, ops.LinearResidual(linear, others[0], value_of(self._scale)))

    def read(self) -> Iterable[nn.Module]:
        return _with_owner(self.modules(), self._scale)

    def leaves_moments(self, x: Tensor, residual: Tensor) -> bool:
        """Whether ``with_moments`` can be called for these inputs."""
        linear = operands.linear_of(self.linear)
        if not self.enabled or linear is None or operands.under_autocast(x) is not None:
            return False
        return ops.leaves_moments(x, ops.LinearResidual(linear, residual, value_of(self._scale)))

    def with_moments(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The group by its kernel, and the moments of the rows of its result, which a ``FeedForwardStep`` may read."""
        linear = operands.linear_of(self.linear)
        assert linear is not None
        return ops.run_with_moments(x, ops.LinearResidual(linear, residual, value_of(self._scale)))

    def likeness(self) -> tuple[object, ...]:
        return (*shapes_of(self.linear), self._scale is None)

    def plain(self, x: Tensor, *others: Tensor) -> Tensor:
        return others[0] + _scaled(self.linear(x), self._scale)


class AttentionStep(Step):
    """Attention of q with k and v; ``scale`` None stands for one over the root of a head's features."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.scale = scale

    def way(self, x: Tensor, *others: Tensor) -> Way | str:
        return ops.way(x, ops.Attention(others[0], others[1], self.scale))

    def likeness(self) -> tuple[object, ...]:
        return ()

    def plain(self, x: Tensor, *others: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, others[0], others[1], scale=self.scale)


class FeedForwardStep(Step):
    """``x + scale * second(inner(hidden(norm(x))))``; without ``x +`` where ``residual`` is false, ``inner`` a norm or nothing.

    ``hidden`` is ``activation(first(x))``. Where ``gate`` is the index of a gate, ``first`` gives it and a value, by two layers or as the
    halves of one's outputs, and ``hidden`` is ``activation(gate) * value``.
    """

    def __init__(
        self,
        norm: Normalized,
        first: tuple[nn.Module, ...],
        gate: int | None,
        activation: str,
        inner: Normalized | None,
        second: nn.Module,
        scale: tuple[nn.Module, str] | None,
        residual: bool,
    ) -> None:
        super().__init__()
        self.norms, self.first, self.second = nn.ModuleList([norm[0], *inner[:1]] if inner else [norm[0]]), nn.ModuleList(first), second
        self.eps = (norm[1], *inner[1:]) if inner else (norm[1],)
        self.gate, self.activation, self._scale, self.residual = gate, activation, scale, residual

    def way(self, x: Tensor, *others: Tensor) -> Way | str:
        first, second = [operands.linear_of(each) for each in self.first], operands.linear_of(self.second)
        known = [each for each in first if each is not None]
        if second is None or len(known) != len(first):
            return UNKNOWN
        norm, *inner = [operands.norm_of(each, eps) for each, eps in zip(self.norms, self.eps, strict=True)]
        up = known[0] if self.gate is None else ops.Gated(tuple(known), self.gate)
        last = inner[0] if inner else None
        return ops.way(x, ops.FeedForward(norm, up, second, self.activation, value_of(self._scale), self.residual, last, *others))

    def read(self) -> Iterable[nn.Module]:
        return _with_owner(self.modules(), self._scale)

    def reads_moments(self, x: Tensor) -> bool:
        """Whether a call with x can use the moments of its rows as a second argument."""
        if not self.enabled or operands.under_autocast(x) is not None:
            return False
        way = self.way(x)
        return not isinstance(way, str) and way.launches()[:1] == (ops.MOMENTS,)

    def likeness(self) -> tuple[object, ...]:
        return (*shapes_of(self.norms, self.first, self.second), self.gate, self.activation, self._scale is None, self.residual)

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
        branch = _scaled(self.second(hidden), self._scale)
        return x + branch if self.residual else branch


def shapes_of(*modules: nn.Module) -> tuple[object, ...]:
    """The names and shapes of the parameters of each module."""
    return tuple(tuple((name, parameter.shape) for name, parameter in module.named_parameters()) for module in modules)


def value_of(scale: tuple[nn.Module, str] | None) -> Tensor | None:
    """The tensor of a layer scale, given by its module and its name there."""
    return None if scale is None else getattr(*scale)


def _with_owner(modules: Iterable[nn.Module], scale: tuple[nn.Module, str] | None) -> list[nn.Module]:
    return [*modules, *(() if scale is None else scale[:1])]


def _scaled(branch: Tensor, scale: tuple[nn.Module, str] | None) -> Tensor:
    return branch if scale is None else branch * getattr(*scale)
