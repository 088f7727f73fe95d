"""A series of launches as one graph of the driver's: queueing it takes the host about as long as two launches."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.bindings import cuda_module
from flysurgery.ops.cuda.kernel import Prepared, Series, make_context_current, outside_capture
from flysurgery.ops.cuda.notes import refuse


class GraphSeries(Series):
    """A ``Series`` none of whose kernels begins early. While somebody captures a graph, its kernels are launched into that one by one.

    The driver copies the addresses when they are set, so one graph serves any number of calls that are still to run. Calls on several
    streams run one after the other.
    """

    def __init__(self, launches: Sequence[tuple[Prepared, Sequence[int]]], addresses: int) -> None:
        super().__init__(launches, addresses)
        self._driver = cuda_module("bindings.driver")
        self._graph: tuple[Any, list[tuple[Any, Any]]] | None = None

    def __call__(self, stream: int, *addresses: int) -> None:
        """Queue the kernels on a stream. The device must be the current one. Raises as ``Kernel.launch``."""
        if torch.cuda.is_current_stream_capturing():
            super().__call__(stream, *addresses)
            return
        refuse()
        with self._lock:
            self._pack(self._table, 0, *addresses)
            result = self._queue(stream)
            if result != 0 and result.name == "CUDA_ERROR_INVALID_CONTEXT":
                make_context_current(self._launches[0][0].device_index)
                result = self._queue(stream)
        if result != 0:
            names = ", ".join(kernel.name for kernel, _, _ in self._launches)
            raise BackendError(f"a graph of the kernels {names} was not launched: {result.name}")

    def _queue(self, stream: int) -> Any:
        if self._graph is None:
            self._graph = self._make()
        graph, nodes = self._graph
        for node, parameters in nodes:
            result = self._driver.cuGraphExecKernelNodeSetParams(graph, node, parameters)[0]
            if result != 0:
                return result
        return self._driver.cuGraphLaunch(graph, stream)[0]

    def _make(self) -> tuple[Any, list[tuple[Any, Any]]]:
        """The graph, and each node of it with its parameters, whose addresses are read where the table has them."""
        driver, device_index = self._driver, self._launches[0][0].device_index
        with torch.cuda.device(device_index), outside_capture():
            make_context_current(device_index)
            template = _value(driver.cuGraphCreate(0))
            nodes = list[tuple[Any, Any]]()
            for kernel, config, pointers in self._launches:
                parameters = kernel.node_parameters(config, pointers)
                before = [node for node, _ in nodes[-1:]]
                nodes.append((_value(driver.cuGraphAddKernelNode(template, before, len(before), parameters)), parameters))
            graph = _value(driver.cuGraphInstantiate(template, 0))
        for destroy, own in ((driver.cuGraphExecDestroy, graph), (driver.cuGraphDestroy, template)):
            weakref.finalize(self, destroy, own).atexit = False  # the driver may be gone before
        return graph, nodes


def _value(answer: tuple[Any, ...]) -> Any:
    """What a call of the driver's gives beside its result."""
    result, value = answer
    if result != 0:
        raise BackendError(f"the CUDA driver makes no graph of kernels: {result.name}; update the driver")
    return value
