"""What the copy engine has to know of a matrix of halves, to bring boxes of it by one request each (sm_90a)."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.bindings import cuda_module

WORDS = 16
"""64-bit integers of a tensor map, which a kernel takes as one struct."""


def swizzled_boxes(
    x: Tensor,  # shape: (rows, features)
    rows: int,
    columns: int = 64,
) -> tuple[int, ...]:
    """The map of boxes of so many rows and columns, as the arguments of a launch; rows of x begin at multiples of 16 bytes
    and do not overlap.

    A row of a box takes 128 bytes of shared memory, whose 16-byte pieces are swizzled as ``kernels/wgmma_rows.cuh`` reads them. What lies
    outside of x comes as zeros.

    Raises:
        BackendError: the driver refuses the map.
    """
    height, width = x.shape
    return _encoded(x.data_ptr(), height, width, x.stride(0) if height > 1 else width, x.dtype, rows, columns)


@lru_cache(maxsize=4096)  # the same addresses come again, and the driver takes longer than a launch
def _encoded(address: int, height: int, width: int, stride: int, dtype: torch.dtype, rows: int, columns: int) -> tuple[int, ...]:
    driver = cuda_module("bindings.driver")
    kind = driver.CUtensorMapDataType
    result, made = driver.cuTensorMapEncodeTiled(
        kind.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if dtype == torch.bfloat16 else kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        2,
        address,
        [driver.cuuint64_t(size) for size in (width, height)],
        [driver.cuuint64_t(stride * dtype.itemsize)],
        [driver.cuuint32_t(size) for size in (columns, rows)],
        [driver.cuuint32_t(1)] * 2,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if result != 0:
        raise BackendError(f"the CUDA driver makes no map of a matrix of {height} rows of {width} elements, {stride} apart: {result.name}")
    return tuple((ctypes.c_int64 * WORDS).from_address(int(made.getPtr())))
