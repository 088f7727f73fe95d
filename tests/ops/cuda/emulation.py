"""The CUDA backend on the CPU: everything but the kernels, which the definition stands in for."""

from __future__ import annotations

import torch
from torch import Tensor

from flysurgery.factors import ks_einsum
from flysurgery.ops.cuda.product import _split
from flysurgery.ops.cuda.table import TunedCase
from flysurgery.patterns import Architecture, Pattern


class EmulatedProduct:
    """Stands in for ``Product``; counts how often it packs."""

    packs = 0

    def __init__(self, architecture: Architecture, mode: str, linears: int, device_index: int | None, rows: int) -> None:
        self.architecture, self.mode, self.linears, self.device_index = architecture, mode, linears, 0

    def cases(self, rows: int) -> list[TunedCase]:
        return [TunedCase("emulated", "fused_linear", self.architecture, self.mode, self.linears, rows)]

    def pack(self, factors: tuple[Tensor, ...], biases: tuple[Tensor, ...], transposed: bool) -> tuple[Tensor, ...]:
        EmulatedProduct.packs += 1
        linears = _split(factors, self.linears, transposed)
        shapes = [pattern.factor_shape for pattern in self.architecture]
        assert all(tuple(factor.shape) == shape for factors in linears for factor, shape in zip(factors, shapes, strict=True))
        images = tuple(factor.detach().clone() for factors in linears for factor in factors)
        return (*images, torch.cat(biases).detach()) if biases else images

    def run(self, x: Tensor, packed: tuple[Tensor, ...], with_bias: bool) -> Tensor:
        length, outputs = len(self.architecture), []
        images = packed[:-1] if with_bias else packed
        for start in range(0, len(images), length):
            value = x
            for image in reversed(images[start : start + length]):
                value = ks_einsum(value, image.to(x.dtype))
            outputs.append(value)
        y = torch.cat(outputs, dim=-1)
        return y + packed[-1].to(x.dtype) if with_bias else y


class EmulatedSingle:
    """Stands in for ``SingleFactor``."""

    def __init__(self, pattern: Pattern, mode: str, device_index: int | None, rows: int, segments: int = 1) -> None:
        self.pattern, self.segments = pattern, segments

    def pack(self, factor: Tensor) -> Tensor:
        return factor.detach().reshape(-1).clone()

    def run(self, x: Tensor, image: Tensor, bias: Tensor | None = None, linears: int = 1) -> Tensor:
        if x.dim() > 2:
            return self.run(x.flatten(0, -2), image, bias, linears).unflatten(0, x.shape[:-1])
        a, _, c, d = self.pattern.factor_shape
        if self.segments > 1:
            x = x.reshape(-1, self.segments, a, c // self.segments, d).transpose(1, 2).reshape(-1, a * c * d)
        images = image.to(x.dtype).view(linears, *self.pattern.factor_shape)
        parts = [x] * linears if x.shape[1] == self.pattern.in_features else x.chunk(linears, dim=1)
        y = torch.cat([ks_einsum(part, factor) for part, factor in zip(parts, images, strict=True)], dim=1)
        return y if bias is None else y + bias


class EmulatedGradient:
    """Stands in for ``FactorGrad``."""

    def __init__(self, pattern: Pattern, mode: str, device_index: int | None, rows: int) -> None:
        self.pattern = pattern

    def run(self, x: Tensor, dy: Tensor, linears: int = 1, with_bias: bool = False) -> list[Tensor]:
        x, dy = x.flatten(0, -2), dy.flatten(0, -2)
        a, b, c, d = self.pattern.factor_shape
        parts = [x] * linears if x.shape[1] == self.pattern.in_features else x.chunk(linears, dim=1)
        pairs = zip(parts, dy.chunk(linears, dim=1), strict=True)
        found = [torch.einsum("ripj,riqj->ipqj", own.reshape(-1, a, b, d), part.reshape(-1, a, c, d)) for part, own in pairs]
        return [torch.cat(found), dy.sum(0)] if with_bias else [torch.cat(found)]
