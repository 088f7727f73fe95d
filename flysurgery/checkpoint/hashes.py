"""The hashes by which a checkpoint vouches for its tensors and its plan."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

MAX_THREADS = 8
"""Most threads that hash; memory gives no more than a few can read."""


def sha256_of_each(names: Iterable[str], tensor_of: Callable[[str], Tensor]) -> dict[str, str]:
    """The SHA-256, in hexadecimal, of the bytes of each named tensor, which is contiguous and on the CPU; by several threads."""

    def sha256(name: str) -> str:
        # hashlib takes what offers its memory, which NumPy does for bytes, and PyTorch for no dtype.
        return hashlib.sha256(bytes_of(tensor_of(name)).numpy().data).hexdigest()

    listed = list(names)
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        return dict(zip(listed, threads.map(sha256, listed), strict=True))


def sha256_of_text(text: str) -> str:
    """The SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def canonical(value: Any) -> str:
    """JSON in one way only: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def bytes_of(tensor: Tensor) -> Tensor:  # shape: (bytes,)
    """The bytes of a tensor, one after the other; a view where it is contiguous."""
    return tensor.detach().reshape(-1).view(torch.uint8)
