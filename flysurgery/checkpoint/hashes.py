"""Hashes of the data of tensors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

MAX_THREADS = 8
"""Most threads that hash; memory gives no more than a few can read."""


def sha256_of_each(names: Iterable[str], tensor_of: Callable[[str], Tensor]) -> list[tuple[str, str]]:
    """The SHA-256, in hexadecimal, of the bytes of each named tensor, which is contiguous and on the CPU.

    Several threads share the work, as hashing takes longer than reading.
    """
    listed = list(names)
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        return list(zip(listed, threads.map(lambda name: _sha256(tensor_of(name)), listed), strict=True))


def _sha256(tensor: Tensor) -> str:
    # hashlib takes what offers its memory, which NumPy does for bytes, and PyTorch for no dtype.
    return hashlib.sha256(tensor.detach().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
