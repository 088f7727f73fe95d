"""Why the kernels cannot run a size. The answers are cached, because the search for a tile takes longer than a launch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch

from flysurgery.gpu.fused import fused_reason
from flysurgery.gpu.single import single_reason
from flysurgery.patterns import Architecture, Pattern

_REMEMBERED = 4096


@lru_cache(maxsize=64)
def shared_limit_of(device_index: int) -> int:
    """Bytes of shared memory that a block may use."""
    return torch.cuda.get_device_properties(device_index).shared_memory_per_block_optin


@lru_cache(maxsize=64)
def multiprocessors_of(device_index: int) -> int:
    """The number of multiprocessors, cached because PyTorch needs longer than a launch to give it."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


@lru_cache(maxsize=_REMEMBERED)
def fused_obstacle(architecture: Architecture, mode: str, linears: int, shared_limit: int) -> str | None:
    """Why this many linears of an architecture cannot run in one launch."""
    return fused_reason(architecture, mode, linears, shared_limit)


@lru_cache(maxsize=_REMEMBERED)
def product_obstacle(architecture: Architecture, mode: str, linears: int, shared_limit: int) -> str | None:
    """Why no kernel can run an architecture: neither the fused one nor, for one linear, a launch for each factor; None when one can."""
    fused = fused_obstacle(architecture, mode, linears, shared_limit)
    if fused is None or linears > 1:
        return fused
    chain = _first(_single_obstacle(pattern, mode, shared_limit) for pattern in architecture)
    return None if chain is None else f"{fused}; {chain}"


@lru_cache(maxsize=_REMEMBERED)
def gradient_obstacle(architecture: Architecture, mode: str, shared_limit: int) -> str | None:
    """Why the gradient of the input of an architecture cannot be computed; None when it can. Those of factors always can."""
    return product_obstacle(architecture.transpose, mode, 1, shared_limit)


@lru_cache(maxsize=_REMEMBERED)
def _single_obstacle(pattern: Pattern, mode: str, shared_limit: int) -> str | None:
    return single_reason(pattern, mode, shared_limit)


def _first(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)
