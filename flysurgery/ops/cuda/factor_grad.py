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

    @property
    def sums_dy(self) -> bool:
        """Whether ``write`` can give the gradient of a bias as well: halves meet ones without rounding."""
        return self.tile.element_bytes == 2

    def run(
        self,
        x: Tensor,  # shape: (rows, a*c*d)
        dy: Tensor,  # shape: (rows, a*b*d)
    ) -> Tensor:  # shape: (a, b, c, d), float32
        """The gradient as a tensor of its own."""
        out = torch.empty(self.pattern.factor_shape, dtype=torch.float32, device=x.device)
        if x.shape[0] == 0:
            return out.zero_()
        self.write(x, dy, out, 0)
        return out

    def write(
        self,
        x: Tensor,  # shape: (*batch, a*c*d), or (*batch, linears*a*c*d)
        dy: Tensor,  # shape: (*batch, linears*a*b*d)
        out: Tensor,  # contiguous, float32
        start: int,
        bias_start: int | None = None,
        linears: int = 1,
    ) -> None:
        """Write the gradients of linears that share x, or have it side by side, on the current stream; one row at least.

        They come one after the other, each (a, b, c, d), at element ``start`` of ``out``; at ``bias_start`` the sums of the
        columns of dy, for modes that can. Rows may be strided, features must be adjacent; any alignment of whole elements.

        Raises:
            BackendError: the features of x or dy are not adjacent, or no one stride leads through their rows.
        """
        of_x, of_dy = rows_and_stride(x), rows_and_stride(dy)
        if of_x is None or of_dy is None:
            raise BackendError(f"the factor-gradient kernel needs adjacent features; x has strides {x.stride()}, dy {dy.stride()}")
        (rows, x_stride), (_, dy_stride), features = of_x, of_dy, x.shape[-1]
        device, x_at, dy_at, width = x.device.index, x.data_ptr(), dy.data_ptr(), self._width
        x_vector = self._x_vector if (x_at | x_stride * width) % self._x_vector == 0 else width
        dy_vector = self._dy_vector if (dy_at | dy_stride * width) % self._dy_vector == 0 else width
        key = (rows, features, linears, device, bias_start is not None, x_stride, dy_stride, x_vector, dy_vector)
        product, total, size, of_factors = self._launches.get(key) or self._prepare(*key)
        stream, address = current_stream(device), out.data_ptr()
        out_at, bias_at = address + 4 * start, address + 4 * (bias_start or 0)
        if total is None:
            product(stream, x_at, dy_at, out_at, bias_at)
            return
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        partial_at = partial.data_ptr()
        product(stream, x_at, dy_at, partial_at, partial_at + 4 * of_factors)
        total(stream, partial_at, out_at, bias_at)

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
