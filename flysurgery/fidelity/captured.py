"""What keeps a GPU busy: updates as a CUDA graph, in place of some thousand launches, and batches made beside the update before theirs."""

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

WARM_UP = 3  # updates that are made one launch at a time before the capture, so that all that an update keeps is there

Batch = TypeVar("Batch", bound=tuple[Tensor, ...])


class Captured:
    """Calls ``once``, which makes an update from the tensors of its batch; after ``WARM_UP`` calls it replays a graph of it.

    ``once`` is the same in each call. It gives one tensor, reads nothing from the device, and writes to ``written`` in place. It comes with
    each call and is not kept: a cycle of references would leave the graph to the garbage collector, which may run while another graph is
    captured, and that capture would fail.
    Batches of other shapes run as they come, and so do all without ``captures``, or where PyTorch cannot capture ``once``. What is captured
    reads and writes the tensors of then: after any of them was replaced, as a loaded state replaces those of an optimizer, call ``forget``.
    """

    def __init__(self, written: Sequence[Tensor], *, captures: bool = True) -> None:
        self._written = written
        self._can_capture, self._side = captures, torch.cuda.Stream() if captures else None
        self.forget()

    def forget(self) -> None:
        """Discard the graph; the next calls make another one."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: tuple[Tensor, ...] = ()
        self._result = torch.empty(0)
        self._calls = 0

    def __call__(self, once: Callable[..., Tensor], *batch: Tensor) -> Tensor:
        if self._side is None:
            return once(*batch)
        if self._graph is None and self._can_capture and self._calls >= WARM_UP:
            self._capture(once, batch)
        if self._graph is None or [each.shape for each in batch] != [each.shape for each in self._batch]:
            return self._at_once(once, batch, self._side)
        for mine, given in zip(self._batch, batch, strict=True):
            mine.copy_(given)
        self._graph.replay()
        increment_version(self._written)  # a replay counts no writes, by which copies in other layouts know that they are old
        return self._result.clone()

    def _at_once(self, once: Callable[..., Tensor], batch: Sequence[Tensor], side: torch.cuda.Stream) -> Tensor:
        """Make an update on a stream of its own, as a capture does, so that nothing that it leaves belongs to another stream."""
        self._calls += 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), _noting_waits() if self._calls == WARM_UP else nullcontext([]) as waits:
            result = once(*batch)
        self._can_capture = self._can_capture and not waits
        torch.cuda.current_stream().wait_stream(side)
        return result

    def _capture(self, once: Callable[..., Tensor], batch: Sequence[Tensor]) -> None:
        graph, held = torch.cuda.CUDAGraph(), tuple(each.clone() for each in batch)
        try:
            # other threads, such as those that pin the memory of images, go on
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result = once(*held)
            torch.cuda.synchronize()  # a capture sets random numbers back on its own stream, which a replay may not overtake
        except RuntimeError:  # something else than a wait, such as a library that allocates memory of its own
            self._can_capture = False
            # a capture that succeeds: after one that failed, PyTorch's generator draws nothing outside of graphs
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.zeros((), device="cuda")
            return
        self._graph, self._batch, self._result = graph, held, result


@contextmanager
def _noting_waits() -> Iterator[list[str]]:
    """Give a list that has, at the end, what waited for the device, which no graph can hold. A capture that fails does damage."""
    before, waits = torch.cuda.get_sync_debug_mode(), list[str]()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits += [text for each in found if "synchronizing CUDA operation" in (text := str(each.message))]


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
