"""The CUDA backend on the CPU: everything but the kernels, which the definition stands in for."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from flysurgery.factors import ks_einsum
from flysurgery.ops.cuda.factor_grad import GradLaunches
from flysurgery.ops.cuda.kernel import Rows
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

    def __init__(self, pattern: Pattern, mode: str, device_index: int | None, rows: int, segments: int = 1, wide: bool = False) -> None:
        self.pattern, self.segments = pattern, segments

    def pack(self, factor: Tensor) -> Tensor:
        self.dtype = factor.dtype
        return factor.detach().reshape(-1).clone()

    def run(self, x: Tensor, image: Tensor, bias: None, linears: int) -> Tensor:
        a, b, c, d = self.pattern.factor_shape
        return torch.cat([ks_einsum(x, factor) for factor in image.to(x.dtype).view(linears, a, b, c, d)], dim=-1)

    def prepared(self, x: Rows, linears: int, device_index: int | None) -> Callable[..., None]:
        def launch(stream: int, x_at: int, image_at: int, bias_at: int, y_at: int) -> None:
            a, b, c, d = self.pattern.factor_shape
            values = memory(x_at, x.rows, x.features, x.dtype, x.stride)
            if self.segments > 1:
                values = values.reshape(-1, self.segments, a, c // self.segments, d).transpose(1, 2).reshape(-1, a * c * d)
            images = memory(image_at, linears, a * b * c * d, self.dtype).to(x.dtype).view(linears, a, b, c, d)
            parts = [values] * linears if values.shape[1] == self.pattern.in_features else values.chunk(linears, dim=1)
            y = torch.cat([ks_einsum(part, factor) for part, factor in zip(parts, images, strict=True)], dim=1)
            assert not bias_at, "gradients have no bias"
            memory(y_at, y.shape[0], y.shape[1], x.dtype).copy_(y)

        return launch


class EmulatedGradient:
    """Stands in for ``FactorGrad``, with two splits of the rows."""

    sums_dy = True

    def __init__(self, pattern: Pattern, mode: str, device_index: int | None, rows: int, joined: int = 1) -> None:
        self.pattern = pattern

    def prepared(self, x: Rows, dy: Rows, linears: int, with_bias: bool, device_index: int | None) -> GradLaunches:
        a, b, c, d = self.pattern.factor_shape
        of_factors, of_biases = linears * a * b * c * d, dy.features if with_bias else 0
        size, words = of_factors + of_biases, x.dtype.itemsize // 4  # kernels count words of four bytes

        def product(stream: int, x_at: int, dy_at: int, out_at: int, bias_at: int) -> None:
            assert not with_bias or bias_at == out_at + of_factors * x.dtype.itemsize
            values, gradients = memory(x_at, x.rows, x.features, x.dtype, x.stride), memory(dy_at, dy.rows, dy.features, x.dtype, dy.stride)
            for index, split in enumerate((slice(0, x.rows // 2), slice(x.rows // 2, None))):
                out = memory(out_at, 2, size, x.dtype)[index]
                own = values[split]
                parts = [own] * linears if x.features == self.pattern.in_features else own.chunk(linears, dim=1)
                pairs = zip(parts, gradients[split].chunk(linears, dim=1), strict=True)
                found = [torch.einsum("ripj,riqj->ipqj", g.reshape(-1, a, b, d), part.reshape(-1, a, c, d)).flatten() for part, g in pairs]
                out.copy_(torch.cat([*found, gradients[split].sum(0)[:of_biases]]))

        def total(stream: int, splits_at: int, out_at: int, bias_at: int) -> None:
            summed = memory(splits_at, 2, size, x.dtype).sum(0)
            memory(out_at, 1, of_factors, x.dtype)[0] = summed[:of_factors]
            assert bool(bias_at) == with_bias
            if with_bias:
                memory(bias_at, 1, of_biases, x.dtype)[0] = summed[of_factors:]

        return GradLaunches(product, total, 2 * size * words, of_factors * words)  # pyright: ignore[reportArgumentType]


def memory(address: int, rows: int, features: int, dtype: torch.dtype, stride: int | None = None) -> Tensor:
    """The matrix at an address, as a kernel sees it."""
    stride = features if stride is None else stride
    size = ((rows - 1) * stride + features) * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).as_strided((rows, features), (stride, 1))
