"""What a computation must spend: that of a module, that of one factor."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flysurgery.bench.ceilings import Work
from flysurgery.patterns import Pattern


def work_of(module: nn.Module, x: Tensor) -> Work:
    """Bytes of x, the output and the parameters, each once; operations of all matrix products, counted on one sample.

    What lies between is left out: a computation that keeps it on the chip moves no more. Norms and activations are not counted.
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        out = module(x[:1])
    weights = sum(parameter.nbytes for parameter in module.parameters())
    return Work(weights + x.nbytes + x.shape[0] * out.nbytes, x.shape[0] * counter.get_total_flops())


def work_of_factor(pattern: Pattern, rows: int, element_bytes: int) -> Work:
    """Bytes of x, y and the factor, each once, and the operations of the product."""
    entries = rows * (pattern.in_features + pattern.out_features) + pattern.nnz
    return Work(element_bytes * entries, rows * pattern.flops_per_row)
