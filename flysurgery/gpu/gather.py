"""Packs half-precision images in one launch, by a table, for weights that change at every step."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from flysurgery.gpu.kernel import current_stream, sized_kernel
from flysurgery.gpu.modes import DTYPE_NUMBERS, HALF_MODES, HALVES, dtype_of

_THREADS = 256
_PER_THREAD = 8
_ALIGNMENT = 128
"""Elements: each image begins at a multiple of 256 bytes."""
_BASE = 256
"""Whole numbers up to it are exact in bfloat16."""

Pack = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


class Packer:
    """Packs weights by ``plainly``, torch operations; halves of one dtype by one launch, once the place of each weight is known.

    Args:
        plainly: gives images, tensors of one dimension; for half-precision modes it only moves and rounds.
        halved: the images are those of half the weights.
    """

    def __init__(self, plainly: Pack, mode: str, *, halved: bool = False) -> None:
        self.plainly, self.mode, self.halved = plainly, mode, halved
        self._places: tuple[Tensor, list[int], list[int]] | None = None  # all tables, the images' sizes, where each source begins

    def __call__(self, sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The images in order; those out of a table in the dtype of the mode, each filled up to the beginning of the next one."""
        source = sources[0].dtype
        alike = all(each.dtype == source and each.is_contiguous() for each in sources)
        if self.mode not in HALVES or source not in DTYPE_NUMBERS or not alike:
            return self._by_pytorch(sources)
        if self._places is None:
            if torch.cuda.is_current_stream_capturing():  # a graph computes values only when it replays
                return self._by_pytorch(sources)
            tables = [torch.nn.functional.pad(each, (0, -len(each) % _ALIGNMENT), value=-1) for each in self._make_tables(sources)]
            starts = [*accumulate((source.numel() for source in sources[:-1]), initial=0)]
            self._places = torch.cat(tables), [*map(len, tables)], starts
        table, sizes, starts = self._places
        images, device_index = torch.empty_like(table, dtype=dtype_of(self.mode)), table.device.index
        grid = (-(-len(table) // (_THREADS * _PER_THREAD)), 1, 1)
        kernel = sized_kernel("gather", device_index, slots=len(sources), source=source, target=images.dtype, halved=self.halved)
        kernel.launch(grid, (_THREADS, 1, 1), 0, current_stream(device_index), *sources, table, images, len(table), *starts)
        return torch.split_with_sizes(images, sizes)

    def _by_pytorch(self, sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.plainly(tuple(source * 0.5 for source in sources) if self.halved else sources)

    def _make_tables(self, sources: Sequence[Tensor]) -> list[Tensor]:  # shapes: (count,), int32, one an image
        """Find where ``plainly`` puts each weight: for each 16-bit element of an image its index among the sources, or -1.

        Half-precision images only move and round their weights. So this packs sources whose values are the digits of their own
        indices, and reads the indices from the images. Indices count through all sources in order.
        """
        sizes = [source.numel() for source in sources]
        places = torch.arange(sum(sizes), device=sources[0].device)

        def packed(values: Tensor) -> list[Tensor]:
            parts = zip(values.float().split(sizes), sources, strict=True)
            images = self.plainly(tuple(part.view(source.shape) for part, source in parts))
            return [image.view(dtype_of(self.mode)).int() for image in images]

        tables = [found - 1 for found in packed(torch.ones_like(places))]
        scale = 1
        while scale < len(places):
            for table, digits in zip(tables, packed(places // scale % _BASE), strict=True):
                table += digits * scale
            scale *= _BASE
        return tables


def by_places(
    places: Sequence[Tensor],  # shapes: (elements,), one for each image
    dtype: torch.dtype,
    *,
    halved: bool = False,
) -> Packer:
    """A packer whose images consist of these elements of all sources, counted through one after the other; -1 stands for zero."""

    def plainly(sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        together = torch.cat([*[source.reshape(-1) for source in sources], sources[0].new_zeros(1)])  # -1 takes the zero at the end
        return tuple(together[each].to(dtype) for each in places)

    return Packer(plainly, HALF_MODES[dtype], halved=halved)
