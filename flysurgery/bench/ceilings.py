"""What a computation must spend, and how fast a device moves and computes at best, measured in the same run."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flysurgery.bench.timing import in_mode, time_interleaved

COPY_BYTES, PRODUCT_SIZE = {"cuda": 1 << 30, "cpu": 1 << 27}, {"cuda": 8192, "cpu": 512}
"""Sizes that fill a device: larger than any cache, and with work for every core."""

ROUNDS = 5


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
        """Give the time that no implementation can beat: the longer of moving and computing."""
        return max(work.bytes_moved / self.bytes_per_ms, work.flops / self.flops_per_ms)


@cache
def measure_ceilings(mode: str, device: torch.device) -> Ceilings:
    """Time a copy far larger than the caches, and a large matrix product in ``mode``; once for each process.

    Mode ``fp32`` on CUDA takes the better of a float32 product and a third of the half-precision rate: three products of halves can
    make a product with the accuracy of float32.
    """
    kind = "cuda" if device.type == "cuda" else "cpu"
    block = torch.ones(COPY_BYTES[kind] // 4, device=device)
    # A kernel is faster than the copy engine on some devices.
    copy = time_interleaved({"copy": lambda x: x + 1}, block, rounds=ROUNDS)["copy"]
    rate = _product_rate(mode, PRODUCT_SIZE[kind], device)
    if mode == "fp32" and kind == "cuda":
        rate = max(rate, _product_rate("fp16", PRODUCT_SIZE[kind], device) / 3)
    return Ceilings(2 * block.nbytes / copy.median_ms, rate)


def _product_rate(mode: str, size: int, device: torch.device) -> float:
    with in_mode(mode) as dtype, torch.inference_mode():
        # Drawn on the CPU: a graph that could not be captured leaves CUDA's generator unusable.
        x = torch.randn(size, size).to(device, dtype)
        return 2 * size**3 / time_interleaved({"product": lambda a: a @ a}, x, rounds=ROUNDS)["product"].median_ms


def work_of(module: nn.Module, x: Tensor) -> Work:
    """Count bytes of x, the output and the parameters, each once, and operations of all matrix products, on one sample.

    What lies between is left out: a computation that keeps it on the chip does not move it. Norms and activations are not counted.
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        out = module(x[:1])
    weights = sum(parameter.nbytes for parameter in module.parameters())
    return Work(weights + x.nbytes + x.shape[0] * out.nbytes, x.shape[0] * counter.get_total_flops())
