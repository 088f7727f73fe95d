"""The CUDA backend on the CPU: everything but the kernels, which the definition stands in for."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flysurgery.factors import ks_einsum
from flysurgery.gpu.factor_grad import GradientSplits, GradLaunch
from flysurgery.gpu.gather import Gather
from flysurgery.gpu.kernel import Rows, in_rows
from flysurgery.gpu.modes import HALVES, dtype_of
from flysurgery.gpu.product import _split
from flysurgery.gpu.table import TunedCase
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

    def _parts(self, image: Tensor) -> list[Tensor]:
        """The factors of one image of halves."""
        shapes = [pattern.factor_shape for pattern in self.architecture] * self.linears
        sizes = [math.prod(shape) for shape in shapes]
        return [part.view(shape) for part, shape in zip(image[: sum(sizes)].split(sizes), shapes, strict=True)]

    is_one_launch = True

    def pack_plainly(self, factors: tuple[Tensor, ...], biases: tuple[Tensor, ...], transposed: bool) -> tuple[Tensor, ...]:
        """One image of halves, and one of the biases."""
        parts = (factors, biases) if biases else (factors,)
        return tuple(torch.cat([tensor.flatten() for tensor in part]).to(dtype_of(self.mode)) for part in parts)

    def prepared(self, x: Rows) -> tuple[Callable[..., None], tuple[str, ...]]:
        def launch(stream: int, x_at: int, image_at: int, bias_at: int, y_at: int) -> None:
            outputs, size = self.linears * self.architecture.out_features, self.linears * self.architecture.num_parameters
            biases = [memory(bias_at, 1, outputs, x.dtype)[0]] if bias_at else []
            values = memory(x_at, x.rows, x.features, x.dtype, x.stride)
            y = self.run(values, (memory(image_at, 1, size, x.dtype)[0], *biases), bool(biases))
            memory(y_at, x.rows, outputs, x.dtype).copy_(y)

        return launch, ("x", "image", "bias", "y")

    def readable(self, x: Tensor) -> Tensor:
        return in_rows(x)[0]

    def run(self, x: Tensor, packed: Sequence[Tensor], with_bias: bool, early: bool = False) -> Tensor:
        length, outputs, dtype = len(self.architecture), [], x.dtype
        images = packed[:-1] if with_bias else packed
        if self.mode in HALVES:
            x, images = x.float(), self._parts(images[0].float())
        for start in range(0, len(images), length):
            value = x
            for image in reversed(images[start : start + length]):
                value = ks_einsum(value, image.to(x.dtype))
            outputs.append(value)
        y = torch.cat(outputs, dim=-1)
        return (y + packed[-1][: y.shape[-1]].to(x.dtype) if with_bias else y).to(dtype)


class EmulatedSingle:
    """Stands in for ``SingleFactor``."""

    def __init__(self, pattern: Pattern, mode: str, device_index: int | None, rows: int, segments: int = 1, wide: bool = False) -> None:
        self.pattern, self.segments = pattern, segments
        self.dtype = dtype_of(mode) if mode in HALVES else None
        self.wide = wide and self.dtype is not None

    fits = True

    def pack(self, factor: Tensor) -> Tensor:
        self.dtype = self.dtype or factor.dtype
        return factor.detach().reshape(-1).to(self.dtype, copy=True)

    def run(self, x: Tensor, image: Tensor, bias: None, linears: int) -> Tensor:
        a, b, c, d = self.pattern.factor_shape
        return torch.cat([ks_einsum(x, factor) for factor in image.to(x.dtype).view(linears, a, b, c, d)], dim=-1)

    def prepared(self, x: Rows, linears: int, device_index: int | None) -> Callable[..., None]:
        def launch(stream: int, x_at: int, image_at: int, bias_at: int, y_at: int) -> None:
            a, b, c, d = self.pattern.factor_shape
            values = memory(x_at, x.rows, x.features, x.dtype, x.stride)
            if self.segments > 1:
                values = values.reshape(-1, self.segments, a, c // self.segments, d).transpose(1, 2).reshape(-1, a * c * d)
            assert self.dtype is not None, "it has packed"
            images = memory(image_at, linears, a * b * c * d, self.dtype).to(x.dtype).view(linears, a, b, c, d)
            parts = [values] * linears if values.shape[1] == self.pattern.in_features else values.chunk(linears, dim=1)
            y = torch.cat([ks_einsum(part, factor) for part, factor in zip(parts, images, strict=True)], dim=1)
            assert not bias_at, "gradients have no bias"
            memory(y_at, y.shape[0], y.shape[1], torch.float32 if self.wide else x.dtype).copy_(y)

        return launch


class EmulatedGradient:
    """Stands in for ``FactorGrad``, with two splits of the rows."""

    sums_dy = True

    def __init__(self, pattern: Pattern, mode: str, device_index: int | None, rows: int, joined: int = 1) -> None:
        self.pattern = pattern

    def prepared(self, x: Rows, dy: Rows, linears: int, with_bias: bool, device_index: int | None) -> GradLaunch:
        a, b, c, d = self.pattern.factor_shape
        of_factors, of_biases = linears * a * b * c * d, dy.features if with_bias else 0
        step, dtype = of_factors + of_biases, torch.promote_types(x.dtype, torch.float32)
        EmulatedSum.dtype = dtype

        def product(stream: int, x_at: int, dy_at: int, out_at: int, bias_at: int) -> None:
            assert bias_at == out_at + of_factors * dtype.itemsize
            values, gradients = (memory(at, m.rows, m.features, m.dtype, m.stride).to(dtype) for at, m in ((x_at, x), (dy_at, dy)))
            for index, split in enumerate((slice(0, x.rows // 2), slice(x.rows // 2, None))):
                out = memory(out_at, 2, step, dtype)[index]
                own = values[split]
                parts = [own] * linears if x.features == self.pattern.in_features else own.chunk(linears, dim=1)
                pairs = zip(parts, gradients[split].chunk(linears, dim=1), strict=True)
                found = [torch.einsum("ripj,riqj->ipqj", g.reshape(-1, a, b, d), part.reshape(-1, a, c, d)).flatten() for part, g in pairs]
                out.copy_(torch.cat([*found, gradients[split].sum(0)[:of_biases]]))

        return GradLaunch(product, 2, step, of_factors)  # pyright: ignore[reportArgumentType]


class EmulatedSum:
    """Stands in for what ``sum_of_splits`` gives, in the dtype of the gradients that were prepared last."""

    dtype = torch.float64

    def __init__(self, parts: Sequence[GradientSplits], device_index: int | None) -> None:
        self.parts, self.dtype = parts, EmulatedSum.dtype

    def __call__(self, stream: int, splits_at: int, *gradients: int) -> None:
        for part, to in zip(self.parts, gradients, strict=True):
            splits = memory(splits_at + part.first * self.dtype.itemsize, part.splits, part.size, self.dtype, part.step)
            memory(to, 1, part.size, self.dtype)[0] = splits.sum(0)


def emulated_gather(gather: Gather, dtype: torch.dtype) -> Callable[..., None]:
    """Stands in for ``Gather.prepared``."""
    starts, table = gather._starts, gather._table
    ends = [*starts[1:], int(table.max()) + 1]

    def launch(stream: int, *addresses: int) -> None:
        *sources, table_at, images_at = addresses
        assert table_at == table.data_ptr()
        values = [memory(at, 1, end - start, dtype)[0] for at, start, end in zip(sources, starts, ends, strict=True)]
        placed = torch.where(table >= 0, torch.cat(values)[table.clamp_min(0)], 0)
        memory(images_at, 1, len(table), gather._dtype)[0] = placed.to(gather._dtype)

    return launch


class EmulatedSeries:
    """Stands in for ``Series``."""

    def __init__(self, launches: Sequence[tuple[Callable[..., None], Sequence[int]]], addresses: int) -> None:
        self.launches = launches

    def __call__(self, stream: int, *addresses: int) -> None:
        for launch, places in self.launches:
            launch(stream, *[addresses[place] for place in places])


def memory(address: int, rows: int, features: int, dtype: torch.dtype, stride: int | None = None) -> Tensor:
    """The matrix at an address, as a kernel sees it."""
    stride = features if stride is None else stride
    size = ((rows - 1) * stride + features) * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).as_strided((rows, features), (stride, 1))
