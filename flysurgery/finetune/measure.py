"""Accuracy during training, with the held-out images shared out among the processes."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Subset

from flysurgery.evaluation import Accuracy, ImageData, evaluate

if TYPE_CHECKING:
    from accelerate import Accelerator


def measure(model: nn.Module, data: ImageData, accelerator: Accelerator, batch_size: int) -> Accuracy:
    """The accuracy of a prepared model on all of ``data``; every process gets it.

    Each process looks at its share. Where the weights themselves are shared out, every forward is one of all processes, so each
    looks at everything.
    """
    started = perf_counter()
    if accelerator.num_processes == 1 or sharded(accelerator):
        return evaluate(model, data, batch_size=batch_size)
    mine = range(accelerator.process_index, data.samples, accelerator.num_processes)
    found = Accuracy(0.0, 0.0, 0, 0.0)
    if mine:
        share = replace(data, dataset=Subset(data.dataset, list(mine)), samples=len(mine))
        found = evaluate(accelerator.unwrap_model(model), share, batch_size=batch_size)
    counts = torch.tensor([found.top1 * found.samples, found.top5 * found.samples], device=accelerator.device)
    summed: Any = accelerator.reduce(counts, "sum")
    first, among = summed.tolist()
    return Accuracy(round(first) / data.samples, round(among) / data.samples, data.samples, perf_counter() - started)


def sharded(accelerator: Accelerator) -> bool:
    """Whether each process holds only a part of the weights."""
    return accelerator.distributed_type.value == "FSDP"
