"""One factor in one launch: ``y = x Kᵀ (+ bias)`` for any pattern."""

from __future__ import annotations

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.kernel import Kernel, current_stream, load_kernel
from flysurgery.ops.cuda.single_choice import configs
from flysurgery.ops.cuda.single_tiling import HEADER_BYTES, MODES, SingleConfig, SingleTiling
from flysurgery.patterns import Pattern

_HOPPER_SHARED_BYTES = 227 * 1024
_WEIGHT_EXPONENT = 11
_LARGEST_SCALE = 123
_SMALLEST_SCALE = -115


def single_reason(pattern: Pattern, mode: str, shared_limit: int = _HOPPER_SHARED_BYTES) -> str | None:
    """Why the single-factor kernel cannot run a pattern, or None where it can.

    Args:
        mode: ``fp16``, ``bf16``, ``tf32``, ``fp32`` or ``exact``.
        shared_limit: bytes of shared memory that a block may use on the device.
    """
    if mode not in MODES:
        return f"the single-factor kernel has no mode '{mode}', only {', '.join(MODES)}"
    if not configs(pattern, mode, shared_limit):
        return f"no tile of pattern {pattern} in mode {mode} fits in {shared_limit} bytes of shared memory"
    return None


def candidates(pattern: Pattern, mode: str, shared_limit: int = _HOPPER_SHARED_BYTES) -> tuple[SingleConfig, ...]:
    """Configurations to choose from, the most promising first."""
    return configs(pattern, mode, shared_limit)


class SingleFactor:
    """One factor of one pattern, mode and configuration.

    Args:
        pattern: compiled into the kernel.
        mode: ``fp16`` and ``bf16`` for inputs of these types; ``tf32``, ``fp32`` and ``exact`` for float32 inputs.
        config: one of ``candidates``; None takes the first.
        shared_limit: bytes of shared memory that a block may use on the device.

    Raises:
        BackendError: the kernel cannot run this; ``single_reason`` tells beforehand.

    Cost of a call of R rows: ``R * flops_per_row`` operations (three times in mode ``fp32``), x read once from device
    memory and y written once.
    """

    def __init__(
        self, pattern: Pattern, mode: str, config: SingleConfig | None = None, *, shared_limit: int = _HOPPER_SHARED_BYTES
    ) -> None:
        reason = single_reason(pattern, mode, shared_limit)
        if config is None and reason is not None:
            raise BackendError(reason)
        self.pattern = pattern
        self.mode = mode
        self.tile = SingleTiling(pattern, mode, config or configs(pattern, mode, shared_limit)[0])
        self.shared_bytes = self.tile.shared_bytes
        self._kernels: dict[tuple[int, int], Kernel] = {}
        self._row_chunks: dict[tuple[int, int], tuple[int, int]] = {}

    def pack(
        self,
        factor: Tensor,  # shape: (a, b, c, d)
    ) -> Tensor:  # shape: (image_bytes,), uint8
        """The weights as the kernel reads them: a header with the exponent of their scale, then one piece a block and chunk.

        A piece is [residue][plane][k/8][output][8], the 16 inputs of a step in the order of the x fragment; mode
        ``exact`` keeps float32 as [residue][input][output].
        """
        tile, config = self.tile, self.tile.config
        a, b, c, d = self.pattern.factor_shape
        ranges, outputs, chunks = tile.counts
        padding = (0, ranges * config.block_residues - d, 0, chunks * config.chunk - c, 0, outputs * config.block_outputs - b)
        padded = torch.nn.functional.pad(factor.detach(), padding)
        # shape: (a, outputs, BN, chunks, KC, ranges, J)
        tiled = padded.reshape(a, outputs, config.block_outputs, chunks, config.chunk, ranges, config.block_residues)
        if self.mode == "exact":
            planes = tiled.float().permute(0, 5, 1, 3, 6, 4, 2)
            return _with_header(planes, torch.zeros(1, dtype=torch.int32, device=factor.device))
        # 16 inputs are q = 4t + 2h + e, or (h, e, t) where they interleave; slot k = 8h + 2t + e
        steps = config.chunk // 16
        split = tiled.reshape(
            a, outputs, config.block_outputs, chunks, steps, *((2, 2, 4) if config.interleaved else (4, 2, 2)), ranges, -1
        )
        h, t, e = (5, 7, 6) if config.interleaved else (6, 5, 7)
        panels = split.permute(0, 8, 1, 3, 9, 4, h, 2, t, e)  # shape: (a, ranges, outputs, chunks, J, steps, 2, BN, 4, 2)
        if self.mode in ("fp16", "bf16"):
            dtype = torch.float16 if self.mode == "fp16" else torch.bfloat16
            return _with_header(panels.to(dtype), torch.zeros(1, dtype=torch.int32, device=factor.device))
        exponent = _scale_exponent(factor.detach())
        scaled = panels.float() * _power_of_two(exponent)
        high = scaled.half()
        if self.mode == "tf32":
            return _with_header(high, exponent)
        low = (scaled - high.float()).half()
        return _with_header(torch.stack((high, low), dim=5), exponent)

    def run(
        self,
        x: Tensor,  # shape: (rows, a*c*d)
        image: Tensor,
        bias: Tensor | None = None,  # shape: (a*b*d,)
    ) -> Tensor:  # shape: (rows, a*b*d)
        """Launch on the current stream. Rows of x may be strided, features must be adjacent; any alignment of whole elements.

        Raises:
            BackendError: the features of x are not adjacent.
        """
        rows = x.shape[0]
        y = torch.empty((rows, self.pattern.out_features), dtype=x.dtype, device=x.device)
        if rows == 0:
            return y
        if x.stride(1) != 1 and x.shape[1] > 1:
            raise BackendError(f"the single-factor kernel needs adjacent features, x has strides {x.stride()}; call .contiguous() first")
        device = x.device.index
        aligned = (x.data_ptr() | x.stride(0) * x.element_size()) % self.tile.x_vector == 0
        kernel = self._kernel(device, self.tile.x_vector if aligned else x.element_size())
        row_chunks, tiles = self._chunks(rows, device)
        kernel.launch(
            (self.tile.groups * row_chunks, 1, 1),
            (self.tile.config.threads, 1, 1),
            self.shared_bytes,
            current_stream(device),
            *(x, image, bias, y, rows, x.stride(0), tiles),
        )
        return y

    def _kernel(self, device: int, x_vector: int) -> Kernel:
        kernel = self._kernels.get((device, x_vector))
        if kernel is None:
            kernel = load_kernel("single_factor.cu", self.tile.defines(x_vector), name="single_factor", device_index=device)
            self._kernels[device, x_vector] = kernel
        return kernel

    def _chunks(self, rows: int, device: int) -> tuple[int, int]:
        found = self._row_chunks.get((rows, device))
        if found is None:
            found = self.tile.row_chunks(rows, torch.cuda.get_device_properties(device).multi_processor_count)
            self._row_chunks[rows, device] = found
        return found


def _with_header(planes: Tensor, exponent: Tensor) -> Tensor:
    header = torch.nn.functional.pad(exponent, (0, HEADER_BYTES // 4 - 1)).view(torch.uint8)
    return torch.cat((header, planes.contiguous().reshape(-1).view(torch.uint8)))


def _scale_exponent(factor: Tensor) -> Tensor:  # shape: (1,), int32
    """The power of two that brings the largest finite weight to [2^11, 2^12), without a synchronization."""
    weights = factor.float()
    largest = torch.where(weights.isfinite(), weights.abs(), 0.0).amax().reshape(1)
    return (_WEIGHT_EXPONENT + 127 - (largest.view(torch.int32) >> 23)).clamp(_SMALLEST_SCALE, _LARGEST_SCALE)


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).view(torch.float32)
