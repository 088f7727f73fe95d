"""One factor by PyTorch's batched product of its dense blocks: for large blocks, whose arithmetic takes longer than moving x and y."""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd

import torch
from torch import Tensor

from flysurgery.gpu.kernel import Kernel, Sizes, current_stream, in_rows, load_kernel
from flysurgery.gpu.modes import dtype_of, macros
from flysurgery.patterns import Pattern

_THREADS = 256
_LOADS = 8
"""The most vectors of a thread in a tile; a tile also has at most 16 KB."""
_TILE_BYTES = 16 << 10
_VECTOR_BYTES = 16
_SHORT_SIDE = 64
_STEP = 16

_LEAST_WEIGHT = {"fp16": 300, "bf16": 300, "tf32": 400}
"""See ``batched_pays``. The fp32 grade has no entry: PyTorch's float32 product runs on the ordinary cores."""
_LEAST_DENSE = {"fp16": 0, "bf16": 0, "tf32": 100}
_FEWEST_ROWS = 192
_MOST_RESIDUES = 64
_ROW_STEP = 128
_SCRATCH_MB = 256


class Transposition:
    """Rows of ``matrices`` matrices of one size; each matrix is transposed and keeps its position in the row.

    Cost: x read once and out written once.
    """

    def __init__(self, matrices: int, slow: int, fast: int) -> None:
        self.matrices, self.slow, self.fast = matrices, slow, fast
        self._launcher = lru_cache(maxsize=1024)(self._find_launcher)

    def run(
        self,
        x: Tensor,  # shape: (rows, matrices*slow*fast)
        out: Tensor,  # shape: (rows, matrices*fast*slow)
        bias: Tensor | None = None,  # shape: (matrices*fast*slow,)
    ) -> None:
        """Write x transposed, plus the bias, on the current stream. Rows may be strided; their elements must be adjacent."""
        width, bias_address = x.element_size(), 0 if bias is None else bias.data_ptr()
        places = x.data_ptr() | out.data_ptr() | bias_address | x.stride(0) * width | out.stride(0) * width
        kernel, sizes = self._launcher(len(x), x.dtype, x.device.index, places % _VECTOR_BYTES == 0)
        kernel.launch(*sizes, current_stream(x.device.index), x, bias, out, len(x), x.stride(0), out.stride(0))

    def _find_launcher(self, rows: int, dtype: torch.dtype, device_index: int, aligned: bool) -> tuple[Kernel, Sizes]:
        """The kernel and its launch; ``aligned``: addresses and strides are multiples of 16 bytes."""
        widest = _VECTOR_BYTES // dtype.itemsize if aligned else 1
        in_vector, out_vector = gcd(self.fast, widest), gcd(self.slow, widest)
        elements = min(_LOADS * _THREADS * in_vector, _TILE_BYTES // dtype.itemsize)
        short = _part(min(self.slow, self.fast), _SHORT_SIDE)
        long = _part(max(self.slow, self.fast), elements // short)
        tile_slow, tile_fast = (short, long) if self.slow < self.fast else (long, short)
        whole = (tile_slow, tile_fast) == (self.slow, self.fast)
        together = max(1, elements // (tile_slow * tile_fast)) if whole else 1
        tile = {"tile_slow": tile_slow, "tile_fast": tile_fast, "together": together, "in_vector": in_vector, "out_vector": out_vector}
        defines = macros(mode=dtype, matrices=self.matrices, slow=self.slow, fast=self.fast, **tile)
        tiles = ceil(self.slow / tile_slow) * ceil(self.fast / tile_fast)
        grid = (tiles * ceil(rows * self.matrices / together), 1, 1)
        return load_kernel("transpose", defines, device_index), (grid, (_THREADS, 1, 1), 0)


def _part(size: int, limit: int) -> int:
    """A side of a tile, of few parts that are nearly equal, in steps of 16 elements; all of it where it is within the limit."""
    parts = ceil(size / limit)
    return size if parts == 1 else ceil(size / parts / _STEP) * _STEP


@dataclass(frozen=True)
class BatchedConfig:
    """One way to run a batched product; ``scratch_mb`` bounds the memory for its operands and results, in MB."""

    scratch_mb: int


def batched_configs(mode: str) -> tuple[BatchedConfig, ...]:
    """Configurations to time; none for modes in which PyTorch has no product of the same grade and speed."""
    return (BatchedConfig(_SCRATCH_MB),) if mode in _LEAST_WEIGHT else ()


def batched_pays(pattern: Pattern, mode: str, rows: int) -> bool:
    """Whether a batched product is expected to take less time than the single-factor kernel.

    The operations for each element of x and y grow with bc / (b + c). The kernel's time for them grows with d, roughly as its root.
    So bc / (b + c) * sqrt(d) is compared with a bound, and a plain dense product, a = d = 1, has a lower bound. The times of both ways on
    an H200 at 25088 rows set the bounds; fewer than 197 rows have not been timed.
    """
    if mode not in _LEAST_WEIGHT or rows <= _FEWEST_ROWS:
        return False
    weight = pattern.b * pattern.c / (pattern.b + pattern.c) * min(pattern.d, _MOST_RESIDUES) ** 0.5
    return weight >= (_LEAST_DENSE if pattern.a * pattern.d == 1 else _LEAST_WEIGHT)[mode]


class BatchedFactor:
    """Stands in for ``SingleFactor``: ``y = x Kᵀ (+ bias)`` by ``torch.bmm`` over the a*d dense blocks of a factor.

    One transposition separates the residues of x, so that each block's inputs are adjacent, and one interleaves the results. Where
    d = 1 nothing is transposed. Rows pass through scratch memory in pieces of at least 128 rows. The results are rounded
    to the dtype of x before the transposition adds the bias.

    Args:
        mode: ``fp16``, ``bf16``, or ``tf32`` while PyTorch rounds the inputs of its own float32 products too.

    Cost of a call of R rows: ``R * flops_per_row`` operations; x and y are read and written once, and twice more where d > 1.
    """

    def __init__(self, pattern: Pattern, mode: str, config: BatchedConfig) -> None:
        a, b, c, d = pattern.factor_shape
        self._pattern, self._dtype = pattern, dtype_of(mode)
        steps = (config.scratch_mb << 20) // self._dtype.itemsize // (_ROW_STEP * (pattern.in_features + pattern.out_features))
        self._rows = _ROW_STEP * max(steps, 1)
        self._apart, self._together = Transposition(a, c, d), Transposition(a, d, b)

    def pack(
        self,
        factor: Tensor,  # shape: (a, b, c, d)
    ) -> Tensor:  # shape: (nnz,)
        """The blocks one after the other, in the dtype of the mode."""
        return factor.detach().permute(0, 3, 1, 2).to(self._dtype, copy=True).reshape(-1)

    def run(
        self,
        x: Tensor,  # shape: (*batch, a*c*d)
        image: Tensor,
        bias: Tensor | None = None,  # shape: (a*b*d,)
    ) -> Tensor:  # shape: (*batch, a*b*d)
        """As ``SingleFactor.run``. The padding of image and bias is ignored."""
        y = x.new_empty((*x.shape[:-1], self._pattern.out_features))
        if x.numel() == 0:
            return y
        a, b, c, d = self._pattern.factor_shape
        x, out = in_rows(x)[0].reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        bias, blocks = None if bias is None else bias[: y.shape[-1]], image[: self._pattern.nnz].view(a * d, b, c).mT
        if d == 1:
            _multiply(x, blocks, bias, out)
            return y
        piece = min(self._rows, len(x))
        apart, products = x.new_empty((piece, x.shape[1])), out.new_empty((piece, out.shape[1]))
        for part, into in zip(x.split(piece), out.split(piece), strict=True):
            rows = len(part)
            self._apart.run(part, apart[:rows])
            _multiply(apart[:rows], blocks, None, products[:rows])
            self._together.run(products[:rows], into, bias)
        return y


def _multiply(
    x: Tensor,  # shape: (rows, n*c)
    blocks: Tensor,  # shape: (n, c, b)
    bias: Tensor | None,  # shape: (n*b,)
    y: Tensor,  # shape: (rows, n*b)
) -> None:
    """Each block's part of y, read and written in place."""
    if len(blocks) == 1:
        torch.mm(x, blocks[0], out=y) if bias is None else torch.addmm(bias, x, blocks[0], out=y)
        return
    left, out = (tensor.unflatten(1, (len(blocks), -1)).transpose(0, 1) for tensor in (x, y))
    torch.bmm(left, blocks, out=out) if bias is None else torch.baddbmm(bias.view(len(blocks), 1, -1), left, blocks, out=out)
