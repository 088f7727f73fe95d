"""The fused two-factor layer: one launch for ``act(x (K1 K2)ᵀ + bias) + residual``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.image import pack, panel_indices
from flysurgery.ops.cuda.kernel import Kernel, current_stream, device_arch, load_kernel
from flysurgery.ops.cuda.tiling import FusedConfig, configs, every_config, fits, tiling
from flysurgery.patterns import Architecture

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "silu")
_ALIGNMENT = 16


def fused_reason(architecture: Architecture, mode: str, linears: int, shared_limit: int) -> str | None:
    """Why the fused kernel cannot run an architecture, or None where it can.

    Args:
        mode: ``fp16``, ``bf16``, ``tf32`` or ``fp32``.
        linears: number of linears of this architecture that read the same x.
        shared_limit: bytes of shared memory that a block may use on the device.
    """
    tile = tiling(architecture, mode, linears)
    if isinstance(tile, str):
        return tile
    if next(every_config(tile, shared_limit, wgmma=False), None) is None:
        return f"no tile of {linears} x {architecture} in mode {mode} fits in the registers and {shared_limit} bytes of shared memory"
    return None


class FusedLinear:
    """A compiled fused layer of one architecture, mode and configuration on one device.

    Args:
        architecture: two patterns; the sizes are compiled in.
        mode: ``fp16`` and ``bf16`` for inputs of these types; ``tf32`` and ``fp32`` for float32 inputs.
        linears: how many linears of this architecture read the same x; their outputs lie side by side.
        config: one of ``candidates``; None takes the first.
        device_index: CUDA device.

    Raises:
        BackendError: the kernel cannot run this; ``fused_reason`` tells beforehand.

    Cost of a call of R rows: ``R * flops_per_row`` operations (three times in mode ``fp32``) and
    ``R * (in_features + linears * out_features)`` elements moved, plus the weights once a block from the L2 cache.
    """

    def __init__(
        self, architecture: Architecture, mode: str, linears: int = 1, *, config: FusedConfig | None = None, device_index: int
    ) -> None:
        tile = tiling(architecture, mode, linears)
        if isinstance(tile, str):
            raise BackendError(tile)
        found = [config] if config is not None else self.candidates(architecture, mode, linears, device_index=device_index)
        if not found:
            raise BackendError(f"no configuration of the fused kernel fits {architecture} in mode {mode} on device {device_index}")
        self.tile = tile
        self.config = found[0]
        self.device = torch.device("cuda", device_index)
        self._kernels: dict[tuple[str, bool], Kernel] = {}
        self._shared_bytes = tile.shared_bytes(self.config)
        self._out_features = tile.out_features
        self._multiprocessors = torch.cuda.get_device_properties(device_index).multi_processor_count

    @staticmethod
    def candidates(architecture: Architecture, mode: str, linears: int = 1, *, device_index: int) -> list[FusedConfig]:
        """Configurations to choose from on a device, the most promising first."""
        tile = tiling(architecture, mode, linears)
        if isinstance(tile, str):
            return []
        limit = torch.cuda.get_device_properties(device_index).shared_memory_per_block_optin
        return configs(tile, limit, wgmma=device_arch(device_index) == "sm_90a")

    @staticmethod
    def tuned(architecture: Architecture, mode: str, linears: int, fields: dict[str, Any], *, device_index: int) -> FusedConfig | None:
        """The configuration that a table's entry describes; None where today's kernel or this device does not offer it."""
        tile = tiling(architecture, mode, linears)
        try:
            config = FusedConfig(**fields)
        except TypeError:
            return None
        limit = torch.cuda.get_device_properties(device_index).shared_memory_per_block_optin
        wgmma = device_arch(device_index) == "sm_90a"
        return config if not isinstance(tile, str) and fits(tile, config, limit, wgmma=wgmma) else None

    @cached_property
    def _indices(self) -> tuple[Tensor, Tensor]:
        first, second = panel_indices(self.tile, self.config)
        return torch.from_numpy(first).long().to(self.device), torch.from_numpy(second).long().to(self.device)

    def pack(self, linears: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """The weights' image, uint8, for ``run``; each linear gives its left and its right factor, canonical (a, b, c, d)."""
        return pack(self.tile, self.config, linears, self._indices)

    def run(
        self,
        x: Tensor,  # shape: (rows, in_features)
        image: Tensor,
        bias: Tensor | None = None,  # shape: (linears * out_features,)
        residual: Tensor | None = None,  # shape: (rows, linears * out_features)
        activation: str = "none",
    ) -> Tensor:  # shape: (rows, linears * out_features)
        """Launch on the current stream. Rows of x and residual may be strided, features must be adjacent.

        Raises:
            BackendError: x or residual do not start, or their rows do not follow, at multiples of 16 bytes.
        """
        rows = x.shape[0]
        y = x.new_empty((rows, self._out_features))
        if rows == 0:
            return y
        for name, tensor in (("x", x), ("residual", residual), ("bias", bias)):
            if tensor is not None and not aligned(tensor):
                raise BackendError(f"the fused kernel reads {name} in vectors of 16 bytes; call .contiguous() on it first")
        kernel = self._kernel(activation, residual is not None)
        unit = 64 if self.config.wgmma else 16 * self.config.row_tiles
        grid = min(-(-rows // unit), self._multiprocessors)
        stride = x.stride(0) * x.element_size()
        residual_stride = 0 if residual is None else residual.stride(0) * residual.element_size()
        kernel.launch(
            (grid, 1, 1),
            (32 * self.config.warps, 1, 1),
            self._shared_bytes,
            current_stream(self.device.index),
            *(x, image, bias, residual, y, rows, stride, residual_stride),
        )
        return y

    def _kernel(self, activation: str, residual: bool) -> Kernel:
        kernel = self._kernels.get((activation, residual))
        if kernel is None:
            defines = {**self.tile.defines(self.config), "ACTIVATION": ACTIVATIONS.index(activation), "RESIDUAL": int(residual)}
            kernel = load_kernel("fused_linear.cu", defines, name="fused_linear", device_index=self.device.index)
            self._kernels[activation, residual] = kernel
        return kernel


def aligned(tensor: Tensor) -> bool:
    """Whether a tensor's last dimension is adjacent and its rows begin at multiples of 16 bytes."""
    *strides, adjacent = tensor.stride()
    if adjacent != 1 or tensor.data_ptr() % _ALIGNMENT:
        return False
    return not any(stride * tensor.element_size() % _ALIGNMENT for stride in strides)


def readable(tensor: Tensor) -> Tensor:
    """The tensor itself where it is aligned, else a contiguous copy."""
    return tensor if aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)
