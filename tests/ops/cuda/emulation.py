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

    def pack(self, factors: tuple[Tensor, ...], transposed: bool) -> tuple[Tensor, ...]:
        EmulatedProduct.packs += 1
        linears = _split(factors, self.linears, transposed)
        shapes = [pattern.factor_shape for pattern in self.architecture]
        assert all(tuple(factor.shape) == shape for factors in linears for factor, shape in zip(factors, shapes, strict=True))
        return tuple(factor.detach().clone() for factors in linears for factor in factors)

    def run(self, x: Tensor, images: tuple[Tensor, ...], bias: Tensor | None) -> Tensor:
        length, outputs = len(self.architecture), []
        for start in range(0, len(images), length):
            value = x
            for image in reversed(images[start : start + length]):
                value = ks_einsum(value, image.to(x.dtype))
            outputs.append(value)
        y = torch.cat(outputs, dim=1)
        return y if bias is None else y + bias


class EmulatedGradient:
    """Stands in for ``WeightGradient``."""

    def __init__(self, pattern: Pattern, mode: str, device_index: int | None, rows: int) -> None:
        self.pattern, self.mode, self.device_index = pattern, mode, 0

    def cases(self, rows: int) -> list[TunedCase]:
        return [TunedCase("emulated", "factor_grad", Architecture((self.pattern,)), self.mode, 1, rows)]

    def run(self, x: Tensor, dy: Tensor) -> Tensor:
        a, b, c, d = self.pattern.factor_shape
        return torch.einsum("ripj,riqj->ipqj", dy.reshape(-1, a, b, d), x.reshape(-1, a, c, d)).contiguous()
