"""Several processes that fit one model: what they agree on, and the mean of their gradients."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from flysurgery.errors import SurgeryError

T = TypeVar("T")


class Processes(AbstractContextManager["Processes"]):
    """The processes that ``torch.distributed`` connects where it is initialized; else this one alone, for which every method does nothing.

    All processes call the same methods in the same order. Decisions go from CPU to CPU through gloo; tensors on CUDA go through
    NCCL, without waiting for the device, so a CUDA graph can replay ``average``. Connections of their own serve both, as
    long as the ``with`` block lasts; graphs that hold ``average`` must be gone by its end. Where another process has ended,
    methods raise SurgeryError; on CUDA, ``average`` may do so only later.

    Args:
        device: where the tensors are.

    Attributes:
        count: how many processes there are.
        rank: the number of this one, from 0.
    """

    def __init__(self, device: torch.device) -> None:
        connected = dist.is_available() and dist.is_initialized()
        self.count = dist.get_world_size() if connected else 1
        self.rank = dist.get_rank() if connected else 0
        self._device = device
        self._decisions: Any = None
        self._tensors: Any = None

    def __enter__(self) -> Processes:
        if self.count > 1:
            with _told():
                self._decisions = dist.new_group(backend="gloo")
                self._tensors = dist.new_group(backend="nccl") if self._device.type == "cuda" else self._decisions
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # after an error the others may be gone, and closing would wait for them; the connections end with the process
        if self.count > 1 and kind is None:
            if self._tensors is not self._decisions:
                dist.destroy_process_group(self._tensors)
            dist.destroy_process_group(self._decisions)

    def agreed(self, value: T) -> T:
        """Give what ``value`` is in the first process."""
        if self.count == 1:
            return value
        box = [value]
        with _told():
            dist.broadcast_object_list(box, src=0, group=self._decisions)
        return box[0]

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Give the tensors, in place, the values that they have in the first process."""
        if self.count == 1:
            return
        shapes = [tuple(each.shape) for each in tensors]
        found: list[Any] = [None] * self.count
        with _told():
            dist.all_gather_object(found, shapes, group=self._decisions)
        if any(each != shapes for each in found):
            raise SurgeryError("the processes converted the model by different plans, so they cannot fit it together; give all of them one")
        self._in_one(tensors, lambda flat: dist.broadcast(flat, src=0, group=self._tensors))

    def average(self, gradients: Sequence[Tensor]) -> None:
        """Replace the gradients, in place, by their means over all processes; takes memory for one copy of them."""

        def mean(flat: Tensor) -> None:
            dist.all_reduce(flat, group=self._tensors)
            flat /= self.count

        self._in_one(gradients, mean)

    @torch.no_grad()
    def _in_one(self, tensors: Sequence[Tensor], send: Callable[[Tensor], object]) -> None:
        """Send all tensors as one, and write what came into them."""
        if self.count == 1 or not tensors:
            return
        flat = torch.cat([each.flatten() for each in tensors])
        with _told():
            send(flat)
        parts = flat.split([each.numel() for each in tensors])
        torch._foreach_copy_(list(tensors), [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)])


@contextmanager
def _told() -> Iterator[None]:
    """Turn what gloo and NCCL raise where a process is missing into one sentence."""
    try:
        yield
    except RuntimeError as error:
        # gloo's messages begin with a place in its sources, and end with advice to developers after the first sentence
        reason = re.sub(r"^\[[^]]*\] ", "", next(iter(str(error).splitlines()), "")).split(". ")[0].rstrip(".")
        raise SurgeryError(f"another process of this run has ended or cannot be reached, so this one ends too ({reason})") from error
