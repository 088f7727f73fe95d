"""Transposes matrices within rows, by ``kernels/transpose.cu``: separates residues into blocks, and interleaves blocks again."""

from __future__ import annotations

from math import ceil, gcd

import torch
from torch import Tensor

from flysurgery.gpu.kernel import Kernel, Sizes, current_stream, load_kernel

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_THREADS = 256
_LOADS = 8
"""The most vectors of a thread in a tile; a tile also has at most 16 KB."""
_TILE_BYTES = 16 << 10
_VECTOR_BYTES = 16
_SHORT_SIDE = 64
_STEP = 16


class Transposition:
    """Rows of ``matrices`` matrices of one size; each matrix is transposed and keeps its position in the row.

    Cost: x read once and out written once.
    """

    def __init__(self, matrices: int, slow: int, fast: int) -> None:
        self.matrices, self.slow, self.fast = matrices, slow, fast
        self._launchers: dict[tuple[object, ...], tuple[Kernel, Sizes]] = {}

    def defines(self, dtype: torch.dtype, aligned: bool) -> dict[str, int]:
        """The macros that the kernel is compiled with; ``aligned``: addresses and strides are multiples of 16 bytes."""
        widest = _VECTOR_BYTES // dtype.itemsize if aligned else 1
        in_vector, out_vector = gcd(self.fast, widest), gcd(self.slow, widest)
        elements = min(_LOADS * _THREADS * in_vector, _TILE_BYTES // dtype.itemsize)
        short = _part(min(self.slow, self.fast), _SHORT_SIDE)
        long = _part(max(self.slow, self.fast), elements // short)
        tile_slow, tile_fast = (short, long) if self.slow < self.fast else (long, short)
        whole = (tile_slow, tile_fast) == (self.slow, self.fast)
        return {
            "TYPE": _TYPES[dtype],
            "MATRICES": self.matrices,
            "SLOW": self.slow,
            "FAST": self.fast,
            "TILE_SLOW": tile_slow,
            "TILE_FAST": tile_fast,
            "TOGETHER": max(1, elements // (tile_slow * tile_fast)) if whole else 1,
            "IN_VECTOR": in_vector,
            "OUT_VECTOR": out_vector,
        }

    def run(
        self,
        x: Tensor,  # shape: (rows, matrices*slow*fast)
        out: Tensor,  # shape: (rows, matrices*fast*slow)
        bias: Tensor | None = None,  # shape: (matrices*fast*slow,)
    ) -> None:
        """Write x transposed, plus the bias, on the current stream. Rows may be strided; their elements must be adjacent."""
        width, bias_address = x.element_size(), 0 if bias is None else bias.data_ptr()
        places = x.data_ptr() | out.data_ptr() | bias_address | x.stride(0) * width | out.stride(0) * width
        key = (len(x), x.dtype, x.device.index, places % _VECTOR_BYTES == 0)
        kernel, sizes = self._launchers.get(key) or self._launcher(*key)
        kernel.launch(*sizes, current_stream(x.device.index), x, bias, out, len(x), x.stride(0), out.stride(0))

    def _launcher(self, rows: int, dtype: torch.dtype, device: int, aligned: bool) -> tuple[Kernel, Sizes]:
        defines = self.defines(dtype, aligned)
        kernel = load_kernel("transpose.cu", defines, name="transpose", device_index=device)
        tiles = ceil(self.slow / defines["TILE_SLOW"]) * ceil(self.fast / defines["TILE_FAST"])
        grid = (tiles * ceil(rows * self.matrices / defines["TOGETHER"]), 1, 1)
        found = self._launchers[rows, dtype, device, aligned] = kernel, (grid, (_THREADS, 1, 1), 0)
        return found


def _part(size: int, limit: int) -> int:
    """A side of a tile, of few parts that are nearly equal, in steps of 16 elements; all of it where it is within the limit."""
    parts = ceil(size / limit)
    return size if parts == 1 else ceil(size / parts / _STEP) * _STEP
