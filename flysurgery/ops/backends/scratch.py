"""Memory on the CPU for what lies between two factors, kept from call to call."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

SCRATCH_BYTES = 8 << 20
"""The memory that each thread keeps: enough rows to keep BLAS busy, few enough for the cache."""


class _Kept(threading.local):
    memory: Tensor | None = None


_kept = _Kept()


def scratch_memory(size: int, dtype: torch.dtype) -> Tensor:  # shape: (size,)
    """Give memory with arbitrary content, which holds until this thread asks again.

    The allocator returns memory of this size to the system at the end of a call, and new pages cost as much
    as a small product. Larger requests than ``SCRATCH_BYTES`` are not kept.
    """
    nbytes = size * dtype.itemsize
    if nbytes > SCRATCH_BYTES:
        return torch.empty(size, dtype=dtype, device="cpu")
    if _kept.memory is None:
        with torch.inference_mode(False):  # what is made in inference mode cannot be written to outside it
            _kept.memory = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device="cpu")
    return _kept.memory[:nbytes].view(dtype)
