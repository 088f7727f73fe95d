"""Work that does not fit into memory, as a sentence."""

from __future__ import annotations

import torch

CPU_ALLOCATOR = "DefaultCPUAllocator"
"""In the message of the plain RuntimeError that PyTorch raises where a CPU has no memory left."""


def sentence_if_full(error: RuntimeError) -> str | None:
    """What to tell a user whose work did not fit; None for any other error."""
    if isinstance(error, torch.OutOfMemoryError):
        return "this does not fit into the memory of the GPU; take fewer images or rows, or a smaller model"
    if CPU_ALLOCATOR in str(error):
        return "this does not fit into this machine's memory; take fewer images or rows, or a smaller model"
    return None
