"""Packs half-precision images in one launch, by a table, for weights that change at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from flysurgery.gpu.kernel import Kernel, current_stream, load_kernel
from flysurgery.gpu.modes import HALVES, dtype_of

_THREADS = 256
_PER_THREAD = 8
_ALIGNMENT = 128
"""Elements: each image begins at a multiple of 256 bytes."""
_SOURCES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_BASE = 256
"""Whole numbers up to it are exact in bfloat16."""

Pack = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


def _can_gather(sources: Sequence[Tensor], mode: str) -> bool:
    """Whether a table packs these tensors."""
    dtype = sources[0].dtype
    return mode in HALVES and dtype in _SOURCES and all(each.dtype == dtype and each.is_contiguous() for each in sources)


def make_tables(pack: Pack, sources: Sequence[Tensor], mode: str) -> tuple[Tensor, ...]:  # shapes: (count,), int32, one an image
    """Find where ``pack`` puts each weight: for each 16-bit element of an image its index among the sources, or -1.

    Half-precision images only move and round their weights. So this function packs sources whose values are the digits of their own
    indices, and reads the indices from the images. Indices count through all sources in order.
    """
    sizes = [source.numel() for source in sources]
    places = torch.arange(sum(sizes), device=sources[0].device)

    def packed(values: Tensor) -> list[Tensor]:
        parts = zip(values.float().split(sizes), sources, strict=True)
        images = pack(tuple(part.view(source.shape) for part, source in parts))
        return [image.view(dtype_of(mode)).int() for image in images]

    tables = [present - 1 for present in packed(torch.ones_like(places))]
    scale = 1
    while scale < len(places):
        for table, digits in zip(tables, packed(places // scale % _BASE), strict=True):
            table += digits * scale
        scale *= _BASE
    return tuple(tables)


def _aligned(elements: int) -> int:
    """The number of elements with the padding up to the next possible beginning of an image."""
    return -(-elements // _ALIGNMENT) * _ALIGNMENT


class Gather:
    """The table in use: packs all images of one list of sources by one launch."""

    def __init__(self, tables: Sequence[Tensor], sources: Sequence[Tensor], mode: str) -> None:
        filled = [torch.nn.functional.pad(table, (0, _aligned(len(table)) - len(table)), value=-1) for table in tables]
        self._table = torch.cat(filled)
        self._sizes, self._dtype = [*map(len, filled)], dtype_of(mode)
        self._starts = [*accumulate((source.numel() for source in sources[:-1]), initial=0)]
        self._kernels: dict[torch.dtype, Kernel] = {}

    def __call__(self, sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The images in order, each with what fills it up to the beginning of the next one; on the current stream."""
        images = torch.empty_like(self._table, dtype=self._dtype)
        grid, stream = (-(-len(self._table) // (_THREADS * _PER_THREAD)), 1, 1), current_stream(self._table.device.index)
        arguments = *sources, self._table, images, len(self._table), *self._starts
        self._kernel(sources[0].dtype).launch(grid, (_THREADS, 1, 1), 0, stream, *arguments)
        return torch.split_with_sizes(images, self._sizes)

    def _kernel(self, dtype: torch.dtype) -> Kernel:
        """The kernel for sources of a dtype."""
        if dtype not in self._kernels:
            defines = {"SLOTS": len(self._starts), "SOURCE": _SOURCES[dtype], "TARGET": _SOURCES[self._dtype]}
            self._kernels[dtype] = load_kernel("gather", defines, self._table.device.index)
        return self._kernels[dtype]


class Packer:
    """Packs weights by ``plainly``, torch operations; halves of one dtype by one launch, once the place of each weight is known.

    Args:
        plainly: gives images, tensors of one dimension; for half-precision modes it only moves and rounds.
    """

    def __init__(self, plainly: Pack, mode: str) -> None:
        self.plainly = plainly
        self.mode = mode
        self._gather: Gather | None = None

    def __call__(self, sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The images; those out of a table in the dtype of the mode, with what fills them up."""
        if not _can_gather(sources, self.mode):
            return self.plainly(sources)
        if self._gather is None:
            if torch.cuda.is_current_stream_capturing():  # a graph computes values only when it replays
                return self.plainly(sources)
            self._gather = Gather(make_tables(self.plainly, sources, self.mode), sources, self.mode)
        return self._gather(sources)
