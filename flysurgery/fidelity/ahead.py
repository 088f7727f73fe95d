"""Batches that the device makes beside the update before theirs."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

Batch = TypeVar("Batch", bound=tuple[Tensor, ...])


def made_ahead(batches: Iterator[Batch], device: torch.device) -> Generator[Batch, None, None]:
    """Give the same batches; on CUDA each is made on a stream of its own while the update of the one before runs.

    Pictures and their views are made by hundreds of small kernels, which leave most of a GPU idle. Takes memory for one batch more, and
    draws from the generators one batch earlier. A batch is used on the stream that is current when it is asked for, until the next one is.
    """
    if device.type != "cuda":
        yield from batches
        return
    side = _stream_of(device)

    def make() -> Batch | None:
        # Behind all uses of the memory that earlier batches left; and beside one update, not beside all that are queued.
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            return next(batches, None)

    try:
        batch = make()
        while batch is not None:
            torch.cuda.current_stream(device).wait_stream(side)
            following = make()
            yield batch
            batch = following
    finally:
        if not torch.cuda.is_current_stream_capturing():  # as where it is left to the garbage collector
            torch.cuda.current_stream(device).wait_stream(side)  # what the last batch is made from may be freed now


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """One stream for all batches of a device, as memory is kept for each stream."""
    return torch.cuda.Stream(device)
