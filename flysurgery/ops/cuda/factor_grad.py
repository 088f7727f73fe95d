"""The gradient of one factor, without permuted copies of the activations."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.grad_choice import grad_configs, grad_reason
from flysurgery.ops.cuda.grad_tiling import GradConfig, GradTiling
from flysurgery.ops.cuda.kernel import Kernel, current_stream, load_kernel
from flysurgery.patterns import Pattern

__all__ = ["FactorGrad", "grad_configs", "grad_reason"]

_SUMS_A_BLOCK = 32
_SUMS_BLOCK = (256, 1, 1)
_Key = tuple[int, int, int, bool, tuple[int, int]]
_Grid = tuple[int, int, int]
_Launches = tuple[Kernel, Kernel, _Grid, _Grid, int, int, int]
"""The kernels, their grids, the splits, the chunks of rows and the elements of each."""


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
        self._shared_bytes = self.tile.shared_bytes
        self._vectors = self.tile.x_vector, self.tile.dy_vector
        self._block = (self.tile.config.threads, 1, 1)
        self._launches: dict[_Key, _Launches] = {}

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
        x: Tensor,  # shape: (rows, a*c*d), or (rows, linears*a*c*d)
        dy: Tensor,  # shape: (rows, linears*a*b*d)
        out: Tensor,  # contiguous, float32
        start: int,
        bias_start: int | None = None,
        linears: int = 1,
    ) -> None:
        """Write the gradients of linears that share x, or have it side by side, on the current stream; one row at least.

        They come one after the other, each (a, b, c, d), at element ``start`` of ``out``; at ``bias_start`` the sums of the
        columns of dy, for modes that can. Rows may be strided, features must be adjacent; any alignment of whole elements.

        Raises:
            BackendError: the features of x or dy are not adjacent.
        """
        for name, tensor in (("x", x), ("dy", dy)):
            if tensor.stride(1) != 1 and tensor.shape[1] > 1:
                raise BackendError(f"the factor-gradient kernel needs adjacent features, {name} has strides {tensor.stride()}")
        pattern, device, rows = self.pattern, x.device.index, x.shape[0]
        vectors = _vector(x, self._vectors[0]), _vector(dy, self._vectors[1])
        key = (rows, linears, device, bias_start is not None, vectors)
        product, total, grid, sums_grid, splits, chunks, size = self._launches.get(key) or self._prepare(*key)
        of_factors = linears * pattern.nnz
        address = out.data_ptr()
        out_at, bias_at = address + 4 * start, address + 4 * (bias_start or 0)
        stream = current_stream(device)
        sizes = (rows, x.stride(0), dy.stride(0), chunks, size, linears)
        steps = (0 if x.shape[1] == pattern.in_features else pattern.in_features, pattern.out_features)
        if splits == 1:
            product.launch(grid, self._block, self._shared_bytes, stream, x, dy, out_at, bias_at, *sizes, *steps)
            return
        partial = torch.empty(splits * size, dtype=torch.float32, device=x.device)
        bias_parts = partial.data_ptr() + 4 * of_factors
        product.launch(grid, self._block, self._shared_bytes, stream, x, dy, partial, bias_parts, *sizes, *steps)
        total.launch(sums_grid, _SUMS_BLOCK, 0, stream, partial, out_at, bias_at, splits, size, of_factors)

    def _prepare(self, rows: int, linears: int, device: int, bias: bool, vectors: tuple[int, int]) -> _Launches:
        defines = self.tile.defines(*vectors, bias)
        product = load_kernel("factor_grad.cu", defines, name="factor_grad", device_index=device)
        total = load_kernel("factor_grad.cu", defines, name="factor_grad_sum", device_index=device)
        splits, chunks = self.tile.splits(rows, torch.cuda.get_device_properties(device).multi_processor_count, linears)
        size = linears * (self.pattern.nnz + (self.pattern.out_features if bias else 0))
        grids = (self.tile.groups * linears * splits, 1, 1), (ceil(size / _SUMS_A_BLOCK), 1, 1)
        found = self._launches[rows, linears, device, bias, vectors] = (product, total, *grids, splits, chunks, size)
        return found


def _vector(tensor: Tensor, widest: int) -> int:
    aligned = (tensor.data_ptr() | tensor.stride(0) * tensor.element_size()) % widest == 0
    return widest if aligned else tensor.element_size()
