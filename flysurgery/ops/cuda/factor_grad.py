"""The gradient of one factor, without permuted copies of the activations."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.grad_choice import grad_configs, grad_reason
from flysurgery.ops.cuda.grad_tiling import GradConfig, GradTiling
from flysurgery.ops.cuda.kernel import Prepared, current_stream, load_kernel, rows_and_stride
from flysurgery.patterns import Pattern

__all__ = ["FactorGrad", "grad_configs", "grad_reason"]

_SUMS_A_BLOCK = 32
_Launches = tuple[Prepared, Prepared | None, int, int]
"""The gradients of the splits, their sum where there are several, and the elements of all splits and of the factors in one."""


class FactorGrad:
    """The gradient of one factor of one pattern and mode.

    Args:
        pattern: compiled into the kernel.
        mode: ``fp16`` and ``bf16`` for inputs of these types; ``tf32`` and ``fp32`` for float32 inputs.
        config: one of ``grad_configs``; None takes the first.
        shared_limit: bytes of shared memory that a block may use on the device.

    Raises:
        BackendError: the kernel cannot run this; ``grad_reason`` tells beforehand.

    Cost of a call of R rows: ``R * flops_per_row`` operations (three times in mode ``fp32``), x and dy read from device
    memory once, and a workspace of at most 32 MiB or one factor. Two runs give equal bits.
    """

    def __init__(self, pattern: Pattern, mode: str, config: GradConfig | None = None, *, shared_limit: int) -> None:
        reason = grad_reason(pattern, mode, shared_limit)
        if config is None and reason is not None:
            raise BackendError(reason)
        self.pattern = pattern
        self.mode = mode
        self.tile = GradTiling(pattern, mode, config or grad_configs(pattern, mode, shared_limit)[0])
        self._x_vector, self._dy_vector, self._width = self.tile.x_vector, self.tile.dy_vector, self.tile.element_bytes
        self._launches: dict[tuple[int, int, int, int, bool, int, int, int, int], _Launches] = {}

    def run(
        self,
        x: Tensor,  # shape: (*batch, a*c*d), or (*batch, linears*a*c*d)
        dy: Tensor,  # shape: (*batch, linears*a*b*d)
        linears: int = 1,
        with_bias: bool = False,
    ) -> list[Tensor]:  # shapes: (linears*a, b, c, d), float32, and (linears*a*b*d,) where biases are asked for
        """The gradients of linears that share x, or have it side by side, and the sums of the columns of dy; on the current stream.

        Rows may be strided, features must be adjacent; any alignment of whole elements.

        Raises:
            BackendError: the features of x or dy are not adjacent, or no one stride leads through their rows.
        """
        of_x, of_dy = rows_and_stride(x), rows_and_stride(dy)
        if of_x is None or of_dy is None:
            raise BackendError(f"the factor-gradient kernel needs adjacent features; x has strides {x.stride()}, dy {dy.stride()}")
        (rows, x_stride), (_, dy_stride), features = of_x, of_dy, x.shape[-1]
        a, b, c, d = self.pattern.factor_shape
        device, width = x.device, self._width
        out = torch.empty((linears * a, b, c, d), dtype=torch.float32, device=device)
        found, bias_at = [out], 0
        if with_bias:
            # halves meet ones without rounding; other products with ones would round dy
            sums = torch.empty(dy.shape[-1], dtype=torch.float32, device=device) if width == 2 else dy.flatten(0, -2).sum(0)
            found.append(sums)
            bias_at = sums.data_ptr() if width == 2 else 0
        if rows == 0:
            return [gradient.zero_() for gradient in found]
        x_at, dy_at, out_at = x.data_ptr(), dy.data_ptr(), out.data_ptr()
        x_vector = self._x_vector if (x_at | x_stride * width) % self._x_vector == 0 else width
        dy_vector = self._dy_vector if (dy_at | dy_stride * width) % self._dy_vector == 0 else width
        key = (rows, features, linears, device.index, bias_at != 0, x_stride, dy_stride, x_vector, dy_vector)
        product, total, size, of_factors = self._launches.get(key) or self._prepare(*key)
        stream = current_stream(device.index)
        if total is None:
            product(stream, x_at, dy_at, out_at, bias_at)
            return found
        partial = torch.empty(size, dtype=torch.float32, device=device)
        partial_at = partial.data_ptr()
        product(stream, x_at, dy_at, partial_at, partial_at + 4 * of_factors)
        total(stream, partial_at, out_at, bias_at)
        return found

    def _prepare(
        self,
        rows: int,
        features: int,
        linears: int,
        device: int,
        bias: bool,
        x_stride: int,
        dy_stride: int,
        x_vector: int,
        dy_vector: int,
    ) -> _Launches:
        tile, pattern = self.tile, self.pattern
        defines = tile.defines(x_vector, dy_vector, bias)
        splits, chunks = tile.splits(rows, torch.cuda.get_device_properties(device).multi_processor_count, linears)
        of_factors = linears * pattern.nnz
        size = of_factors + (linears * pattern.out_features if bias else 0)
        step = 0 if features == pattern.in_features else pattern.in_features
        kernel = load_kernel("factor_grad.cu", defines, name="factor_grad", device_index=device)
        grid, block = (tile.groups * linears * splits, 1, 1), (tile.config.threads, 1, 1)
        numbers = (rows, x_stride, dy_stride, chunks, size, linears, step, pattern.out_features)
        product, total = kernel.prepare(grid, block, tile.shared_bytes, *numbers), None
        if splits > 1:
            kernel = load_kernel("factor_grad.cu", defines, name="factor_grad_sum", device_index=device)
            total = kernel.prepare((ceil(size / _SUMS_A_BLOCK), 1, 1), (256, 1, 1), 0, splits, size, of_factors)
        found = product, total, splits * size, of_factors
        self._launches[rows, features, linears, device, bias, x_stride, dy_stride, x_vector, dy_vector] = found
        return found
