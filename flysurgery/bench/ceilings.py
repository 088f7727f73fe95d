"""What this machine reaches at best, measured in the same run: bytes by a copy, operations by a matrix product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flysurgery.bench.modes import TIMED_MODES, in_mode
from flysurgery.bench.timing import time_interleaved

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}
"""Sizes that fill a device: beyond any cache, and with work for every core."""


@dataclass(frozen=True)
class Work:
    """What a computation must spend, however it is done: bytes of its inputs, outputs and weights, each once, and operations."""

    bytes_moved: int
    flops: int


@dataclass(frozen=True)
class Ceilings:
    """The two rates of a device in one mode."""

    bytes_per_ms: float
    flops_per_ms: float

    def bound_ms(self, work: Work) -> float:
        """The time below which no implementation gets: the longer of moving and computing."""
        return max(work.bytes_moved / self.bytes_per_ms, work.flops / self.flops_per_ms)


def measure_ceilings(mode: str, device: torch.device, *, quick: bool = False) -> Ceilings:
    """Time a copy far larger than the caches, and a large matrix product in ``mode``.

    Mode ``fp32`` on CUDA takes the better of a float32 product and a third of the half-precision rate: products of float32's grade can
    be made of three products of halves.
    """
    rounds = 5 if quick else 10
    kind = "cuda" if device.type == "cuda" else "cpu"
    block = torch.ones((COPY_BYTES[kind] >> (2 * quick)) // 4, device=device)
    copy = time_interleaved({"copy": _copy}, block, rounds=rounds)["copy"]
    del block
    size = PRODUCT_SIZE[kind] >> quick
    rate = _product_rate(mode, size, device, rounds)
    if mode == "fp32" and kind == "cuda":
        rate = max(rate, _product_rate("fp16", size, device, rounds) / 3)
    return Ceilings(2 * (COPY_BYTES[kind] >> (2 * quick)) / copy.median_ms, rate)


def _copy(x: Tensor) -> Tensor:
    return x + 1  # a kernel: on some devices faster than the copy engine


def _product_rate(mode: str, size: int, device: torch.device, rounds: int) -> float:
    with in_mode(mode), torch.inference_mode():
        x = torch.randn(size, size, device=device, dtype=TIMED_MODES[mode])
        return 2 * size**3 / time_interleaved({"product": lambda a: a @ a}, x, rounds=rounds)["product"].median_ms
