"""The gradient of one factor, without permuted copies of the activations."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.grad_choice import HOPPER_SHARED_BYTES, grad_configs, grad_reason
from flysurgery.ops.cuda.grad_tiling import GradConfig, GradTiling
from flysurgery.ops.cuda.kernel import Kernel, current_stream, load_kernel
from flysurgery.patterns import Pattern

__all__ = ["FactorGrad", "grad_configs", "grad_reason"]

_SUMS_A_BLOCK = 32


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

    def __init__(self, pattern: Pattern, mode: str, config: GradConfig | None = None, *, shared_limit: int = HOPPER_SHARED_BYTES) -> None:
        reason = grad_reason(pattern, mode, shared_limit)
        if config is None and reason is not None:
            raise BackendError(reason)
        self.pattern = pattern
        self.mode = mode
        self.tile = GradTiling(pattern, mode, config or grad_configs(pattern, mode, shared_limit)[0])
        self.shared_bytes = self.tile.shared_bytes
        self._kernels: dict[tuple[int, int, int], tuple[Kernel, Kernel]] = {}
        self._splits: dict[tuple[int, int], tuple[int, int]] = {}

    def run(
        self,
        x: Tensor,  # shape: (rows, a*c*d)
        dy: Tensor,  # shape: (rows, a*b*d)
    ) -> Tensor:  # shape: (a, b, c, d), float32
        """Launch on the current stream. Rows may be strided, features must be adjacent; any alignment of whole elements.

        Raises:
            BackendError: the features of x or dy are not adjacent.
        """
        rows = x.shape[0]
        if rows == 0:
            return torch.zeros(self.pattern.factor_shape, dtype=torch.float32, device=x.device)
        for name, tensor in (("x", x), ("dy", dy)):
            if tensor.stride(1) != 1 and tensor.shape[1] > 1:
                raise BackendError(f"the factor-gradient kernel needs adjacent features, {name} has strides {tensor.stride()}")
        device = x.device.index
        product, total = self._load(device, _vector(x, self.tile.x_vector), _vector(dy, self.tile.dy_vector))
        splits, chunks = self._split(rows, device)
        out = torch.empty(self.pattern.factor_shape, dtype=torch.float32, device=x.device)
        partial = out if splits == 1 else torch.empty((splits, self.pattern.nnz), dtype=torch.float32, device=x.device)
        stream = current_stream(device)
        product.launch(
            (self.tile.groups * splits, 1, 1),
            (self.tile.config.threads, 1, 1),
            self.shared_bytes,
            stream,
            *(x, dy, partial, rows, x.stride(0), dy.stride(0), chunks),
        )
        if splits > 1:
            total.launch((ceil(self.pattern.nnz / _SUMS_A_BLOCK), 1, 1), (256, 1, 1), 0, stream, partial, out, splits)
        return out

    def _load(self, device: int, x_vector: int, dy_vector: int) -> tuple[Kernel, Kernel]:
        kernels = self._kernels.get((device, x_vector, dy_vector))
        if kernels is None:
            defines = self.tile.defines(x_vector, dy_vector)
            kernels = (
                load_kernel("factor_grad.cu", defines, name="factor_grad", device_index=device),
                load_kernel("factor_grad.cu", defines, name="factor_grad_sum", device_index=device),
            )
            self._kernels[device, x_vector, dy_vector] = kernels
        return kernels

    def _split(self, rows: int, device: int) -> tuple[int, int]:
        found = self._splits.get((rows, device))
        if found is None:
            found = self.tile.splits(rows, torch.cuda.get_device_properties(device).multi_processor_count)
            self._splits[rows, device] = found
        return found


def _vector(tensor: Tensor, widest: int) -> int:
    aligned = (tensor.data_ptr() | tensor.stride(0) * tensor.element_size()) % widest == 0
    return widest if aligned else tensor.element_size()
