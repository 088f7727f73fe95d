"""What the copy engine has to know of a matrix of halves, to bring boxes of it by one request each (sm_90a)."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.bindings import cuda_module

WORDS = 16
"""64-bit integers of a tensor map, which a kernel takes as one struct."""


class Boxes(NamedTuple):
    """Boxes of a matrix, as an argument of a launch, which takes a map of them as ``WORDS`` integers.

    A row of a box takes 128 bytes of shared memory, whose 16-byte pieces are swizzled as ``kernels/wgmma_rows.cuh`` reads them. What lies
    outside of the matrix comes as zeros.
    """

    at: Any  # what has the address of the matrix
    shape: tuple[int, int]
    row_bytes: int
    dtype: torch.dtype
    box: tuple[int, int]

    def words(self, address: int) -> tuple[int, ...]:
        """The map of such a matrix at an address.

        Raises:
            BackendError: the driver refuses it.
        """
        return _map(address, *self[1:])


def swizzled_boxes(
    x: Tensor,  # shape: (rows, features)
    rows: int,
    columns: int = 64,
) -> Boxes:
    """Boxes of so many rows and columns of halves; rows of x begin at multiples of 16 bytes and do not overlap."""
    height, width = x.shape
    return Boxes(x, (height, width), (x.stride(0) if height > 1 else width) * x.element_size(), x.dtype, (rows, columns))


@lru_cache(maxsize=4096)  # the same addresses come again, and the driver takes longer than a launch
def _map(address: int, shape: tuple[int, int], row_bytes: int, dtype: torch.dtype, box: tuple[int, int]) -> tuple[int, ...]:
    driver = cuda_module("bindings.driver")
    kind = driver.CUtensorMapDataType
    result, made = driver.cuTensorMapEncodeTiled(
        kind.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if dtype == torch.bfloat16 else kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        2,
        address,
        [driver.cuuint64_t(size) for size in reversed(shape)],
        [driver.cuuint64_t(row_bytes)],
        [driver.cuuint32_t(size) for size in reversed(box)],
        [driver.cuuint32_t(1)] * 2,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if result != 0:
        raise BackendError(f"the CUDA driver makes no map of a matrix of shape {shape} and rows of {row_bytes} bytes: {result.name}")
    return tuple((ctypes.c_int64 * WORDS).from_address(int(made.getPtr())))
