"""One factor in one launch: ``y = x Kᵀ (+ bias)`` for any pattern."""

from functools import lru_cache

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.gpu.device import multiprocessors_of
from flysurgery.gpu.kernel import Kernel, Sizes, current_stream, in_rows, kernel_of
from flysurgery.gpu.modes import HALVES, dtype_of, in_halves, scaled_rows
from flysurgery.gpu.recording import fresh
from flysurgery.gpu.single_tiling import HEADER_BYTES, SingleConfig, SingleTiling, candidates, single_reason
from flysurgery.patterns import Pattern


class SingleFactor:
    """One factor of one pattern, mode and configuration.

    Args:
        pattern: compiled into the kernel.
        mode: ``fp16`` and ``bf16`` for inputs of these types; ``tf32`` and ``fp32`` for float32 inputs.
        config: one of ``candidates``; None takes the first.
        shared_limit: bytes of shared memory that a block may use on the device.

    Raises:
        BackendError: the kernel cannot run this; ``single_reason`` tells beforehand.

    Cost of a call of R rows: ``R * flops_per_row`` operations (three times in mode ``fp32``), x read once from device
    memory and y written once.
    """

    def __init__(self, pattern: Pattern, mode: str, config: SingleConfig | None = None, *, shared_limit: int) -> None:
        reason = single_reason(pattern, mode, shared_limit)
        if config is None and reason is not None:
            raise BackendError(reason)
        self._tile = SingleTiling(pattern, mode, config or candidates(pattern, mode, shared_limit)[0])
        self._vector = self._tile.x_vector
        self._launcher = lru_cache(maxsize=1024)(self._find_launcher)

    def pack(
        self,
        factor: Tensor,  # shape: (a, b, c, d)
    ) -> Tensor:  # shape: (image_bytes,), uint8
        """The weights as the kernel reads them: a header with the exponent of their scale, then one piece a block and chunk.

        A piece is [residue][plane][k/8][output][8], the 16 inputs of a step in the order of the x fragment.
        """
        tile, config = self._tile, self._tile.config
        a, b, c, d = tile.pattern.factor_shape
        ranges, outputs, chunks = tile.counts
        padding = (0, ranges * config.block_residues - d, 0, chunks * config.chunk - c, 0, outputs * config.block_outputs - b)
        padded = torch.nn.functional.pad(factor.detach(), padding)
        # 16 inputs are q = 4t + 2h + e, or (h, e, t) where they interleave; slot k = 8h + 2t + e
        inputs = (chunks, config.chunk // 16, *((2, 2, 4) if config.interleaved else (4, 2, 2)))
        split = padded.reshape(a, outputs, config.block_outputs, *inputs, ranges, config.block_residues)
        h, t, e = (5, 7, 6) if config.interleaved else (6, 5, 7)
        panels = split.permute(0, 8, 1, 3, 9, 4, h, 2, t, e)  # shape: (a, ranges, outputs, chunks, J, steps, 2, BN, 4, 2)
        if tile.mode in HALVES:
            planes, exponent = panels.to(dtype_of(tile.mode)), torch.zeros(1, dtype=torch.int32, device=factor.device)
        else:
            scaled, exponent = scaled_rows(panels.float().reshape(1, -1))
            planes = torch.stack(in_halves(scaled.view(panels.shape), tile.images), dim=5)
        header = torch.nn.functional.pad(exponent, (0, HEADER_BYTES // 4 - 1)).view(torch.uint8)
        return torch.cat((header, planes.contiguous().reshape(-1).view(torch.uint8)))

    def run(
        self,
        x: Tensor,  # shape: (*batch, a*c*d)
        image: Tensor,
        bias: Tensor | None = None,  # shape: (a*b*d,)
    ) -> Tensor:  # shape: (*batch, a*b*d)
        """Launch on the current stream. Rows of x may be strided, and may begin at any element; inputs that lie differently are copied."""
        x, rows, stride = in_rows(x)
        y = fresh((*x.shape[:-1], self._tile.pattern.out_features), x.dtype, x.device)
        if rows:
            device, width = x.device.index, x.element_size()
            aligned = (x.data_ptr() | stride * width) % self._vector == 0
            kernel, sizes, tiles = self._launcher(rows, self._vector if aligned else width, device)
            kernel.launch(*sizes, current_stream(device), x, image, bias, y, rows, stride, tiles)
        return y

    def _find_launcher(self, rows: int, x_vector: int, device_index: int) -> tuple[Kernel, Sizes, int]:
        """The kernel for this many rows, the sizes of its launch, and the tiles of rows that a block takes."""
        row_chunks, tiles = self._tile.row_chunks(rows, multiprocessors_of(device_index))
        grid, block = (self._tile.groups * row_chunks, 1, 1), (self._tile.config.threads, 1, 1)
        return kernel_of(self._tile, device_index, x_vector), (grid, block, self._tile.shared_bytes), tiles
