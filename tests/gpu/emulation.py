"""The CUDA backend on the CPU: everything but the kernels, which the definition stands in for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flysurgery.factors import ks_einsum
from flysurgery.gpu.modes import HALVES
from flysurgery.gpu.product import _split
from flysurgery.gpu.table import TunedCase
from flysurgery.patterns import Architecture


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

    def run(self, x: Tensor, packed: Sequence[Tensor], with_bias: bool, early: bool = False) -> Tensor:
        length, outputs, dtype = len(self.architecture), [], x.dtype
        images = packed[:-1] if with_bias else packed
        if self.mode in HALVES:
            x = x.float()
        for start in range(0, len(images), length):
            value = x
            for image in reversed(images[start : start + length]):
                value = ks_einsum(value, image.to(x.dtype))
            outputs.append(value)
        y = torch.cat(outputs, dim=-1)
        return (y + packed[-1][: y.shape[-1]].to(x.dtype) if with_bias else y).to(dtype)
