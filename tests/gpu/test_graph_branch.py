"""What is packed in a captured graph runs ahead of what is queued, and behind every write to what it is packed from."""

import gc
from contextlib import suppress
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from flysurgery.gpu import graph_branch
from flysurgery.gpu.graph_branch import Branch, ahead, begin_ahead
from tests.gpu.writes import CPU, WRITES, Use, uncounted, unseen
from tests.support.captured import Capture, Stream


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    return Capture(monkeypatch)


@pytest.fixture
def weight() -> nn.Parameter:
    """One that a call before the capture has packed."""
    weight = nn.Parameter(torch.ones(4, 4))
    pack(weight)
    return weight


def pack(weight: Tensor) -> list[Tensor]:
    """By each of the branches."""
    with torch.no_grad():
        return [ahead((weight,), lambda: weight * 2.0) for _ in range(graph_branch._BRANCHES)]


def filled_again(weight: nn.Parameter, use: Use) -> None:
    """As FSDP2 fills a parameter whose memory it has taken."""
    size = weight.untyped_storage().nbytes()
    weight.untyped_storage().resize_(0)
    begin_ahead(CPU)
    weight.untyped_storage().resize_(size)
    uncounted(weight)


OF_CAPTURES = WRITES | {
    "the same memory, filled again": filled_again,
    "through data, before the model begins again": lambda weight, use: (unseen(weight), begin_ahead(CPU)),
}


@pytest.mark.parametrize("write", OF_CAPTURES)
def test_writes_are_waited_for(capture: Capture, weight: nn.Parameter, write: str) -> None:
    weight.grad = torch.ones_like(weight)
    with capture:
        begin_ahead(CPU)
        for _ in range(2):
            pack(weight)
            OF_CAPTURES[write](weight, lambda: pack(weight))
        pack(weight)
    assert capture.races == []


@pytest.mark.parametrize("known", [True, False])
def test_branches_do_not_wait_without_need(capture: Capture, weight: nn.Parameter, known: bool) -> None:
    with capture:
        source = weight if known else weight.detach() * 1.0
        begin_ahead(CPU)
        before = set(capture.main.behind)
        torch.ones(3).add_(1.0)
        queued = capture.main.behind - before
        pack(source)
        main, *sides = [stream for stream in capture.streams if stream.captures]
        assert len(sides) == graph_branch._BRANCHES and all(side.behind <= main.behind for side in sides), "they are joined"
        assert [queued <= side.behind for side in sides] == [not known] * len(sides)
    assert capture.races == []


def test_a_write_on_another_stream_is_waited_for_once_it_is_joined(capture: Capture, weight: nn.Parameter) -> None:
    other = Stream()
    with capture:
        begin_ahead(CPU)
        other.wait_stream(capture.main)
        with capture.on(other), torch.no_grad():
            weight.mul_(2.0)
        pack(torch.ones(3))  # puts the branches behind the current stream, which is not behind the write
        capture.main.wait_stream(other)
        begin_ahead(CPU)
        pack(weight)
    assert capture.races == []


def test_another_capture_begins_anew(capture: Capture, weight: nn.Parameter) -> None:
    """Also after one that has failed."""
    for factor in (0.0, 1.0):
        with suppress(ZeroDivisionError), capture:
            weight.detach().mul_(2.0)
            pack(weight)
            ahead((weight,), lambda factor=factor: 1.0 / factor)
            pack(weight)
    assert capture.races == []


def test_no_source_is_kept() -> None:
    weight = nn.Parameter(torch.ones(4))
    pack(weight)
    memory = ref(weight.untyped_storage())
    assert memory() in graph_branch._known
    del weight
    gc.collect()
    assert memory() is None


def test_a_branch_keeps_what_it_reads_until_it_is_joined(capture: Capture) -> None:
    """Others would take its memory: also that of a tensor whose method is queued, as a copy of a weight in another memory format is."""
    with capture:
        beside, copied = Branch(CPU), torch.ones(3)
        memory = ref(copied.untyped_storage())
        wide = beside.run(copied.to, torch.float64)
        del copied
        assert memory() is not None
        beside.join()
        assert memory() is None and torch.equal(wide * 1.0, torch.ones(3, dtype=torch.float64))
    assert capture.races == []
