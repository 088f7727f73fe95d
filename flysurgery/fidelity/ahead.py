"""Batches that the device makes beside the update before theirs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

Batch = TypeVar("Batch", bound=tuple[Tensor, ...])


def made_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Give the same batches; on CUDA each is made on a stream of its own while the update of the one before runs.

    Pictures and their views are made by hundreds of small kernels, which leave most of a GPU idle. Takes memory for one batch more, and
    draws from the generators one batch earlier.
    """
    if device.type != "cuda":
        yield from batches
        return
    side = torch.cuda.Stream(device)

    def make() -> Batch | None:
        side.wait_stream(torch.cuda.current_stream(device))  # so it is made beside one update, and not beside all that are queued
        with torch.cuda.stream(side):
            return next(batches, None)

    batch = make()
    while batch is not None:
        present = torch.cuda.current_stream(device)
        present.wait_stream(side)
        following = make()
        for each in batch:
            each.record_stream(present)
        yield batch
        batch = following
