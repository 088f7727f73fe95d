"""A series of launches as one graph: what the driver is told on the CPU, and what comes out on a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops.cuda import graph_series
from flysurgery.ops.cuda import kernel as kernels
from flysurgery.ops.cuda.graph_series import GraphSeries
from flysurgery.ops.cuda.kernel import Prepared, Series
from tests.ops.cuda.gpu_layer import Layer, rows_of
from tests.ops.cuda.test_kernel import Config, read
from tests.support.tolerance import assert_equal

SIZES = (1, 2, 3, 4, 5, 6, 7)


class Kernel:
    """Stands in for a kernel of two addresses and a number, and keeps what it is launched with."""

    name, device_index, parameter_sizes = "some", 3, [8, 8, 4]

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def node_parameters(self, config: Config, address: int) -> tuple[Config, int]:
        return config, address

    def queue(self, config: Config, address: int) -> None:
        self.seen.append(words_at(address))


def words_at(address: int) -> list[int]:
    return [int.from_bytes(part, "little") for part in read(address, Kernel.parameter_sizes)]


class Driver:
    """Stands in for the driver: a graph of the words that its nodes were given last. ``results`` are those of the next launches."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.made: list[tuple[int, list[int]]] = []
        self.words: dict[int, list[int]] = {}
        self.seen: list[tuple[int, list[list[int]]]] = []

    def cuGraphCreate(self, flags: int) -> tuple[int, str]:  # noqa: N802 - the driver's names
        return 0, "template"

    def cuGraphAddKernelNode(self, graph: str, before: list[int], count: int, parameters: tuple[Config, int]) -> tuple[int, int]:  # noqa: N802
        assert graph == "template"
        assert count == len(before)
        self.made.append((len(self.made), [*before]))
        return 0, len(self.made) - 1

    def cuGraphInstantiate(self, graph: str, flags: int) -> tuple[int, str]:  # noqa: N802
        return 0, "graph"

    def cuGraphExecKernelNodeSetParams(self, graph: str, node: int, parameters: tuple[Config, int]) -> tuple[int]:  # noqa: N802
        assert graph == "graph"
        self.words[node] = words_at(parameters[1])
        return (0,)

    def cuGraphLaunch(self, graph: str, stream: int) -> tuple[Any]:  # noqa: N802
        result = self.results.pop(0) if self.results else 0
        if result == 0:
            self.seen.append((stream, [self.words[node] for node in sorted(self.words)]))
        return (result,)

    def cuGraphExecDestroy(self, graph: str) -> None:  # noqa: N802
        self.seen.append((0, []))

    cuGraphDestroy = cuGraphExecDestroy  # noqa: N815


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(kernels, "launch_config", Config)
    monkeypatch.setattr(graph_series, "cuda_module", lambda name: driver)
    monkeypatch.setattr(graph_series, "outside_capture", nullcontext)
    monkeypatch.setattr(graph_series, "make_context_current", lambda index: None)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return driver


def series_of(kernel: Kernel) -> GraphSeries:
    first, second = (Prepared(kernel, SIZES, (number,)) for number in (8, 9))  # pyright: ignore[reportArgumentType]
    return GraphSeries([(first, (0, 1)), (second, (2, 0))], 3)


def test_addresses_are_set_for_each_call(driver: Driver) -> None:
    series = series_of(Kernel())
    series(77, 100, 200, 300)
    series(78, 10, 20, 30)
    assert driver.made == [(0, []), (1, [0])], "one graph, one kernel after the other"
    assert driver.seen == [(77, [[100, 200, 8], [300, 100, 9]]), (78, [[10, 20, 8], [30, 10, 9]])]
    del series
    assert len(driver.seen) == 4, "the graph and what it was made from are given back"


def test_a_capture_gets_the_launches(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernel = Kernel()
    series_of(kernel)(77, 100, 200, 300)
    assert kernel.seen == [[100, 200, 8], [300, 100, 9]]
    assert not driver.made


def test_a_refused_launch_is_told_and_a_missing_context_made(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    series, made = series_of(Kernel()), list[int]()
    series(77, 100, 200, 300)
    monkeypatch.setattr(graph_series, "make_context_current", made.append)
    driver.results = [SimpleNamespace(name="CUDA_ERROR_INVALID_CONTEXT")]
    series(78, 100, 200, 300)
    assert made == [3]
    assert [stream for stream, _ in driver.seen] == [77, 78]
    driver.results = [SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE")]
    with pytest.raises(BackendError, match="a graph of the kernels some, some was not launched: CUDA_ERROR_INVALID_VALUE"):
        series(79, 100, 200, 300)


@pytest.mark.gpu
def test_calls_that_still_wait_keep_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many calls of one shape, queued before the first has ended, on two streams, give what launches one by one give."""
    layer, batches = Layer(), [rows_of(5000).requires_grad_() for _ in range(12)]
    for number, batch in enumerate(batches):
        batch.data.mul_(number + 1)

    def gradients() -> list[list[Tensor]]:
        found: list[list[Tensor]] = []
        other = torch.cuda.Stream()
        for number, batch in enumerate(batches):
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other if number % 3 == 2 else torch.cuda.current_stream()):
                found.append([*torch.autograd.grad(layer(batch).float().square().mean(), (batch, *layer.parameters()))])
        torch.cuda.synchronize()
        return found

    by_graphs = gradients()
    monkeypatch.setattr(GraphSeries, "__call__", Series.__call__)
    for left, right in zip(by_graphs, gradients(), strict=True):
        for graphed, launched in zip(left, right, strict=True):
            assert_equal(graphed, launched)
