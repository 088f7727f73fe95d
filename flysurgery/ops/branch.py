"""Small launches beside large ones, in CUDA graphs that are being captured."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Found = TypeVar("Found")


class Branch:
    """Work that runs beside what follows on the current stream of a device, until ``join``.

    A graph that is being captured has two branches then: gradients of factors, casts and sums take few multiprocessors, and each of them
    would hold up the large products behind it. Outside of captures all runs in order, as events cost the host more than they save.
    """

    def __init__(self, device: torch.device) -> None:
        captures = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self._main = torch.cuda.current_stream(device) if captures else None
        self._kept = list[object]()

    def run(self, function: Callable[Given, Found], *args: Given.args, **kwargs: Given.kwargs) -> Found:
        """Queue a function. Its result may be read after ``join``. Its arguments are kept until then, as others would take their memory."""
        if self._main is None:
            return function(*args, **kwargs)
        side = _side_of(self._main.device_index, self._main.cuda_stream)
        side.wait_stream(self._main)
        self._kept += [args, kwargs]
        with torch.cuda.stream(side):
            return function(*args, **kwargs)

    def join(self) -> None:
        """Let the current stream wait for all that was queued."""
        if self._main is not None and self._kept:
            self._main.wait_stream(_side_of(self._main.device_index, self._main.cuda_stream))
            self._kept.clear()


@lru_cache(maxsize=64)
def _side_of(device_index: int, stream: int) -> torch.cuda.Stream:
    """The stream beside another one: one for each, so that captures of several threads stay apart."""
    return torch.cuda.Stream(device_index, priority=-1)
