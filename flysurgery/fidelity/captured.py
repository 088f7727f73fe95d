"""Updates as a CUDA graph: the host launches one graph in place of some thousand kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

WARM_UP = 3
"""Updates that are made one launch at a time before the capture, so that all that an update keeps is there."""


class Captured:
    """Calls ``once``, which makes an update from the tensors of its batch; after ``WARM_UP`` calls it replays a graph of it.

    ``once`` gives one tensor, reads nothing from the device, and writes to ``written`` in place. Batches of other shapes run as they come,
    and so do all where PyTorch cannot capture ``once``. What is captured reads and writes the tensors of then: after any of them was
    replaced, as a loaded state replaces those of an optimizer, call ``forget``.
    """

    def __init__(self, once: Callable[..., Tensor], written: Sequence[Tensor]) -> None:
        self._once, self._written = once, written
        self._can_capture, self._side = True, torch.cuda.Stream()
        self.forget()

    def forget(self) -> None:
        """Discard the graph; the next calls make another one."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: tuple[Tensor, ...] = ()
        self._result = torch.empty(0)
        self._calls = 0

    def __call__(self, *batch: Tensor) -> Tensor:
        if self._graph is None and self._can_capture and self._calls >= WARM_UP:
            self._capture(batch)
        if self._graph is None or [each.shape for each in batch] != [each.shape for each in self._batch]:
            return self._at_once(batch)
        for mine, given in zip(self._batch, batch, strict=True):
            mine.copy_(given)
        self._graph.replay()
        increment_version(self._written)  # a replay counts no writes, by which copies in other layouts know that they are old
        return self._result.clone()

    def _at_once(self, batch: Sequence[Tensor]) -> Tensor:
        """Make an update on a stream of its own, as a capture does, so that nothing that it leaves belongs to another stream."""
        self._calls += 1
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            result = self._once(*batch)
        torch.cuda.current_stream().wait_stream(self._side)
        return result

    def _capture(self, batch: Sequence[Tensor]) -> None:
        graph, held = torch.cuda.CUDAGraph(), tuple(each.clone() for each in batch)
        try:
            # other threads, such as those that pin the memory of images, go on
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result = self._once(*held)
        except RuntimeError:  # a model that reads from the device, or an optimizer that does
            self._can_capture = False
            return
        self._graph, self._batch, self._result = graph, held, result
