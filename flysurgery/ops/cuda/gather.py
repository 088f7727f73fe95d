"""Packing by a table: half-precision images in one launch, for weights that change at every step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from flysurgery.ops.cuda.kernel import Kernel, current_stream, load_kernel
from flysurgery.ops.cuda.modes import HALF_MODES, dtype_of

_SLOTS = 8
_THREADS = 256
_PER_THREAD = 8
_SOURCES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_BASE = 256
"""Whole numbers up to it are exact in bfloat16."""

Pack = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


def can_gather(factors: Sequence[Tensor], mode: str) -> bool:
    """Whether ``gather`` packs these factors."""
    dtype = factors[0].dtype
    alike = all(factor.dtype == dtype and factor.is_contiguous() for factor in factors)
    return mode in HALF_MODES.values() and dtype in _SOURCES and alike and len(factors) <= _SLOTS


def make_tables(pack: Pack, factors: Sequence[Tensor], mode: str) -> tuple[Tensor, ...]:  # shapes: (count,), int32, one an image
    """Learn where ``pack`` puts each weight: for each 16-bit element of an image its place among the factors, or -1.

    Half-precision images only move and round their weights. So factors are packed that hold the digits of their own
    places, and the places are read off the images. Places count through all factors, one after the other.
    """
    sizes = [factor.numel() for factor in factors]
    places = torch.arange(sum(sizes), device=factors[0].device)

    def packed(values: Tensor) -> list[Tensor]:
        parts = zip(values.float().split(sizes), factors, strict=True)
        images = pack(tuple(part.view(factor.shape) for part, factor in parts))
        return [image.view(dtype_of(mode)).int() for image in images]

    tables = [present - 1 for present in packed(torch.ones_like(places))]
    scale = 1
    while scale < len(places):
        for table, digits in zip(tables, packed(places // scale % _BASE), strict=True):
            table += digits * scale
        scale *= _BASE
    return tuple(tables)


def gather(
    factors: Sequence[Tensor],  # contiguous, of one dtype
    table: Tensor,  # shape: (count,), int32
    mode: str,
) -> Tensor:  # shape: (2*count,), uint8
    """The image that a table describes, in one launch on the current stream."""
    count = len(table)
    image = torch.empty(2 * count, dtype=torch.uint8, device=table.device)
    starts = list(accumulate(factor.numel() for factor in factors))  # of the second factor, the third, ...
    starts[-1:] = [2**31 - 1] * (_SLOTS - len(factors))
    device_index = table.device.index
    _kernel(_SOURCES[factors[0].dtype], _SOURCES[dtype_of(mode)], device_index).launch(
        (-(-count // (_THREADS * _PER_THREAD)), 1, 1),
        (_THREADS, 1, 1),
        0,
        current_stream(device_index),
        *(table, image, ctypes.c_int32(count)),
        *(*factors, *[None] * (_SLOTS - len(factors))),
        *map(ctypes.c_int32, starts),
    )
    return image


@lru_cache(maxsize=64)
def _kernel(source: int, target: int, device_index: int) -> Kernel:
    return load_kernel("gather.cu", {"SOURCE": source, "TARGET": target}, name="gather", device_index=device_index)
