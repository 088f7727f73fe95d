"""The fused modules: each computes one group by its kernel, or by the modules of the group where the kernel does not take the call."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from flysurgery import ops
from flysurgery.inference import kernels

UNKNOWN = "it is of a class that the kernels do not know, or has a forward of its own"

Normalized = tuple[nn.Module, float]
"""A layer norm's module, and what it adds to the variance."""

_ACTIVATIONS = {"gelu": functional.gelu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"), "silu": functional.silu}


class Step(nn.Module):
    """A group of operators. ``enabled`` is false where the kernel is not to be used although it could run."""

    enabled = True

    def obstacle(self, x: Tensor, *others: Tensor) -> str | None:
        """Why the kernel cannot compute the group for these inputs; None where it can."""
        raise NotImplementedError

    def launches(self, x: Tensor, *others: Tensor) -> tuple[str, ...]:
        """What the launches of the fused group compute, one after the other, where there is no obstacle; empty where that is not told."""
        return ()

    def likeness(self) -> tuple[object, ...]:
        """What tells apart groups that take different times, besides the sizes of their inputs."""
        raise NotImplementedError

    def plain(self, x: Tensor, *others: Tensor) -> Tensor:
        """The group by its own modules."""
        raise NotImplementedError

    def fused(self, x: Tensor, *others: Tensor) -> Tensor:
        """The group by its kernel."""
        raise NotImplementedError

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        if self.enabled and kernels.under_autocast(x) is None and self.obstacle(x, *others) is None:
            return self.fused(x, *others)
        return self.plain(x, *others)


class NormLinear(Step):
    """``linear(norm(x))``, where ``linear`` may be a projection of several parts side by side."""

    def __init__(self, norm: nn.Module, eps: float, linear: nn.Module) -> None:
        super().__init__()
        self.norm, self.eps, self.linear = norm, eps, linear

    def obstacle(self, x: Tensor, *others: Tensor) -> str | None:
        group = kernels.group_of(self.linear)
        return UNKNOWN if group is None else ops.norm_linear_reason(x, kernels.norm_of(self.norm, self.eps), group)

    def launches(self, x: Tensor, *others: Tensor) -> tuple[str, ...]:
        return ops.norm_linear_launches(x, kernels.norm_of(self.norm, self.eps), kernels.group_of(self.linear) or ())

    def likeness(self) -> tuple[object, ...]:
        return _shapes(self.norm, self.linear)

    def plain(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.linear(self.norm(x))

    def fused(self, x: Tensor, *others: Tensor) -> Tensor:
        group = kernels.group_of(self.linear)
        assert group is not None  # else there was an obstacle
        return ops.norm_linear(x, kernels.norm_of(self.norm, self.eps), group)


class LinearResidual(Step):
    """``residual + scale * linear(x)``; called with x and the residual."""

    def __init__(self, linear: nn.Module, scale: tuple[nn.Module, str] | None) -> None:
        super().__init__()
        self.linear = linear
        self._scale = scale

    def obstacle(self, x: Tensor, *others: Tensor) -> str | None:
        linear = kernels.linear_of(self.linear)
        return UNKNOWN if linear is None else ops.linear_residual_reason(x, linear, others[0], _value(self._scale))

    def likeness(self) -> tuple[object, ...]:
        return (*_shapes(self.linear), self._scale is None)

    def plain(self, x: Tensor, *others: Tensor) -> Tensor:
        return others[0] + _scaled(self.linear(x), self._scale)

    def fused(self, x: Tensor, *others: Tensor) -> Tensor:
        linear = kernels.linear_of(self.linear)
        assert linear is not None  # else there was an obstacle
        return ops.linear_residual(x, linear, others[0], _value(self._scale))


class Attention(Step):
    """Attention of q with k and v; ``scale`` None stands for one over the root of a head's features."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.scale = scale

    def obstacle(self, x: Tensor, *others: Tensor) -> str | None:
        return ops.attention_reason(x, others[0], others[1])

    def likeness(self) -> tuple[object, ...]:
        return ()

    def plain(self, x: Tensor, *others: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, others[0], others[1], scale=self.scale)

    def fused(self, x: Tensor, *others: Tensor) -> Tensor:
        return ops.attention(x, others[0], others[1], self.scale)


class FeedForward(Step):
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

    def obstacle(self, x: Tensor, *others: Tensor) -> str | None:
        operands = self._operands(x)
        return UNKNOWN if operands is None else ops.ffn_reason(*operands)

    def launches(self, x: Tensor, *others: Tensor) -> tuple[str, ...]:
        operands = self._operands(x)
        return () if operands is None else ops.ffn_launches(*operands)

    def likeness(self) -> tuple[object, ...]:
        return (*_shapes(self.norms, self.first, self.second), self.gate, self.activation, self._scale is None, self.residual)

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

    def fused(self, x: Tensor, *others: Tensor) -> Tensor:
        operands = self._operands(x)
        assert operands is not None  # else there was an obstacle
        return ops.ffn(*operands)

    def _operands(self, x: Tensor) -> tuple[Any, ...] | None:
        """What the operator takes; None where a layer is no linear one."""
        first, second = [kernels.linear_of(each) for each in self.first], kernels.linear_of(self.second)
        known = [each for each in first if each is not None]
        if second is None or len(known) != len(first):
            return None
        norm, *inner = [kernels.norm_of(each, eps) for each, eps in zip(self.norms, self.eps, strict=True)]
        up = known[0] if self.gate is None else ops.Gated(tuple(known), self.gate)
        return (x, norm, up, second, self.activation, _value(self._scale), self.residual, inner[0] if inner else None)


class Patches(Step):
    """A convolution whose stride is its kernel's size, as one product of the flattened patches and a matrix.

    Gives what the convolution gives, (images, features, rows, columns), with the features of a patch side by side in memory.
    """

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution

    def obstacle(self, x: Tensor, *others: Tensor) -> str | None:
        weight = self.convolution.weight
        if x.dim() != 4 or x.shape[2] % weight.shape[2] or x.shape[3] % weight.shape[3]:
            return f"the patches of {weight.shape[2]}x{weight.shape[3]} do not tile the image"
        if x.dtype != weight.dtype:
            return f"images are {x.dtype}, the weight is {weight.dtype}"
        return None

    def likeness(self) -> tuple[object, ...]:
        return _shapes(self.convolution)

    def plain(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.convolution(x)

    def fused(self, x: Tensor, *others: Tensor) -> Tensor:
        weight, bias = self.convolution.weight, self.convolution.bias
        if ops.patch_embedding_reason(x, weight, bias) is None:
            tokens = ops.patch_embedding(x, weight, bias)
        else:
            images, channels, height, width = x.shape
            rows, columns = height // weight.shape[2], width // weight.shape[3]
            patches = x.reshape(images, channels, rows, weight.shape[2], columns, weight.shape[3]).permute(0, 2, 4, 1, 3, 5)
            tokens = functional.linear(patches.reshape(images, rows * columns, -1), weight.flatten(1), bias)
        return tokens.transpose(1, 2).unflatten(2, (x.shape[2] // weight.shape[2], x.shape[3] // weight.shape[3]))


def _shapes(*modules: nn.Module) -> tuple[object, ...]:
    return tuple(tuple((name, parameter.shape) for name, parameter in module.named_parameters()) for module in modules)


def _value(scale: tuple[nn.Module, str] | None) -> Tensor | None:
    return None if scale is None else getattr(*scale)


def _scaled(branch: Tensor, scale: tuple[nn.Module, str] | None) -> Tensor:
    return branch if scale is None else branch * getattr(*scale)
