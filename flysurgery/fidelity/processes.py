"""Several processes that fit one model: what they agree on, and the mean of their gradients."""

# pyright: reportPrivateImportUsage=false
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from flysurgery.errors import SurgeryError

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """``count`` processes, of which this one has the number ``rank``, from 0; of one alone every method does nothing.

    All processes call the same methods in the same order. Decisions go from CPU to CPU through gloo; tensors on CUDA go through
    NCCL, without waiting for the device, so a CUDA graph can replay ``average``. Where another process has ended, methods raise
    SurgeryError; on CUDA, ``average`` may do so only later.
    """

    count: int = 1
    rank: int = 0
    _decisions: Any = None
    _tensors: Any = None

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
def connected(device: torch.device) -> Iterator[Processes]:
    """Give the processes that ``torch.distributed`` connects where it is initialized, else this one alone; their tensors are on ``device``.

    They have connections of their own as long as the ``with`` block lasts; graphs that hold ``average`` must be gone by its end.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        yield Processes()
        return
    with _told():
        decisions: Any = dist.new_group(backend="gloo")
        tensors: Any = dist.new_group(backend="nccl") if device.type == "cuda" else decisions
    # after an error the others may be gone, and closing would wait for them; the connections end with the process
    yield Processes(dist.get_world_size(), dist.get_rank(), decisions, tensors)
    for group in dict.fromkeys((tensors, decisions)):
        dist.destroy_process_group(group)


@contextmanager
def _told() -> Iterator[None]:
    """Turn what gloo and NCCL raise where a process is missing into one sentence."""
    try:
        yield
    except RuntimeError as error:
        # gloo's messages begin with a place in its sources, and end with advice to developers after the first sentence
        reason = re.sub(r"^\[[^]]*\] ", "", next(iter(str(error).splitlines()), "")).split(". ")[0].rstrip(".")
        raise SurgeryError(f"another process of this run has ended or cannot be reached, so this one ends too ({reason})") from error
