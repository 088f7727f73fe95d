"""Describes a tensor of halves to the copy engine, which then loads boxes of it by one request each (sm_90a)."""

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.gpu.compile import cuda_module
from flysurgery.gpu.device import make_context_current

WORDS = 16
"""64-bit integers of a tensor map, which a kernel takes as one struct."""


class Boxes(NamedTuple):
    """Boxes of a tensor of halves, as an argument of a launch, which takes a map of them as ``WORDS`` integers.

    Dimensions are listed from the innermost on, whose elements are adjacent. Elements outside of the tensor are read as zeros and are not
    written. A row of a swizzled box takes 128 bytes of shared memory, with its 16-byte pieces in the order of ``kernels/wgmma_rows.cuh``.
    Other boxes have no gaps in shared memory.
    """

    at: Any  # an object with the address of the tensor
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, of all dimensions but the innermost; multiples of 16
    dtype: torch.dtype
    box: tuple[int, ...]
    swizzled: bool

    def words(self, address: int) -> tuple[int, ...]:
        """The map of such a tensor at an address on the current device.

        Raises:
            BackendError: the driver refuses it.
        """
        return _map(address, *self[1:])


def boxes(
    x: Tensor,  # shape: (rows, features), or (batch, heads, tokens, 64)
    rows: int,
    columns: int = 64,
    *,
    swizzled: bool = True,
) -> Boxes:
    """Boxes of this many rows, or tokens of a head, and columns. Rows of x begin at multiples of 16 bytes and do not overlap."""
    box, sizes, strides = (columns, rows, *[1] * (x.dim() - 2)), x.shape[::-1], x.stride()[::-1]
    steps = (stride if size > 1 else sizes[0] for size, stride in zip(sizes[1:], strides[1:], strict=True))
    return Boxes(x, (*sizes,), tuple([step * x.element_size() for step in steps]), x.dtype, box, swizzled)


@lru_cache(maxsize=4096)  # addresses repeat, and the driver needs longer than a launch
def _map(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, box: tuple[int, ...], swizzled: bool
) -> tuple[int, ...]:
    driver = cuda_module("bindings.driver")
    kind, swizzle = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    arguments = (
        kind.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if dtype == torch.bfloat16 else kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        len(sizes),
        address,
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle.CU_TENSOR_MAP_SWIZZLE_128B if swizzled else swizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    result, made = driver.cuTensorMapEncodeTiled(*arguments)
    if result != 0 and result.name == "CUDA_ERROR_INVALID_CONTEXT":  # in a thread that has launched nothing yet
        make_context_current(torch.cuda.current_device())
        result, made = driver.cuTensorMapEncodeTiled(*arguments)
    if result != 0:
        raise BackendError(f"the CUDA driver makes no map of sizes {sizes} and strides of {strides} bytes: {result.name}")
    return tuple((ctypes.c_int64 * WORDS).from_address(int(made.getPtr())))
