"""Why the kernels cannot run a size. The answers are cached, because the search for a tile takes longer than a launch."""

from __future__ import annotations

from functools import lru_cache

import torch

from flysurgery.gpu.fused import fused_reason
from flysurgery.gpu.single import single_reason
from flysurgery.patterns import Architecture


@lru_cache(maxsize=64)
def shared_limit_of(device_index: int) -> int:
    """Bytes of shared memory that a block may use."""
    return torch.cuda.get_device_properties(device_index).shared_memory_per_block_optin


@lru_cache(maxsize=64)
def multiprocessors_of(device_index: int) -> int:
    """The number of multiprocessors, cached because PyTorch needs longer than a launch to give it."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


@lru_cache(maxsize=4096)
def product_obstacle(architecture: Architecture, mode: str, linears: int, shared_limit: int) -> str | None:
    """Why no kernel can run an architecture: neither the fused one nor, for one linear, a launch for each factor; None when one can."""
    fused = fused_reason(architecture, mode, linears, shared_limit)
    if fused is None or linears > 1:
        return fused
    reasons = (single_reason(pattern, mode, shared_limit) for pattern in architecture)
    chain = next((reason for reason in reasons if reason is not None), None)
    return None if chain is None else f"{fused}; {chain}"
