"""Copies of strided tensors by PyTorch, which moves a few wide elements faster than many narrow ones."""

import torch
from torch import Tensor


def copy_wide(to: Tensor, source: Tensor) -> None:
    """``to.copy_(source)``, for tensors of one shape and dtype, by the widest elements of which the memory of both consists."""
    for dtype in (torch.complex128, torch.int64, torch.int32):
        each = dtype.itemsize // to.element_size()
        if each > 1 and _consists(to, each) and _consists(source, each):
            to, source = to.view(dtype), source.view(dtype)
            break
    to.copy_(source)


def _consists(tensor: Tensor, each: int) -> bool:
    """Whether the last dimension consists of groups of so many elements, which begin at multiples of their size."""
    aligned = tensor.data_ptr() % (each * tensor.element_size()) == 0 and tensor.stride(-1) == 1
    return aligned and not any(size % each for size in (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1]))
