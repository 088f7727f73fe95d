"""What is packed in a captured graph runs ahead of what is queued, and behind every write to what it is packed from."""

import gc
from collections.abc import Callable
from contextlib import suppress
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from flysurgery.gpu import branch
from flysurgery.gpu.branch import Branch, ahead, begin_ahead
from flysurgery.gpu.uncounted_writes import doubt_trained
from flysurgery.gpu.weight_cache import forget_derived
from tests.support.captured import Capture, Stream

CPU = torch.device("cpu")


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
        return [ahead((weight,), lambda: weight * 2.0) for _ in range(branch._BRANCHES)]


def unseen(weight: nn.Parameter) -> None:
    weight.data.mul_(2.0)


class Hidden(torch.optim.Optimizer):
    """Writes through ``data``, as kernels of other libraries do, and calls what packs the weight before the step has ended."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__([weight], {})

    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for _ in range(2):
            pack(self.param_groups[0]["params"][0])
            unseen(self.param_groups[0]["params"][0])
        pack(self.param_groups[0]["params"][0])


def by_data_behind_a_backward_pass(weight: nn.Parameter) -> None:
    doubt_trained([weight])
    unseen(weight)


def given_other_memory(weight: nn.Parameter) -> None:
    weight.data = weight.data * 2.0


def filled_again(weight: nn.Parameter) -> None:
    """As FSDP2 fills a parameter whose memory it has taken."""
    size = weight.untyped_storage().nbytes()
    weight.untyped_storage().resize_(0)
    begin_ahead(CPU)
    weight.untyped_storage().resize_(size)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):  # pyright: ignore[reportPrivateImportUsage]
        weight.fill_(1.0)


def part_of_larger_memory(weight: nn.Parameter) -> None:
    """As DeepSpeed lays parameters; the version of a part is its own."""
    flat = torch.ones(32)
    weight.data = flat[:16].view(4, 4)
    branch.know((weight,))
    begin_ahead(CPU)
    flat.mul_(2.0)


def forgotten(weight: nn.Parameter) -> None:
    unseen(weight)
    forget_derived()


def before_the_model_begins_again(weight: nn.Parameter) -> None:
    unseen(weight)
    begin_ahead(CPU)


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda weight: weight.detach().mul_(2.0),
    "to a view": lambda weight: weight.detach()[:2].mul_(2.0),
    "SGD": lambda weight: torch.optim.SGD([weight], 0.1).step(),
    "optimizer that writes through data": lambda weight: Hidden(weight).step(),
    "through data behind a backward pass": by_data_behind_a_backward_pass,
    "through data, then forgotten": forgotten,
    "through data, before the model begins again": before_the_model_begins_again,
    "swapped": lambda weight: torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 2.0)),
    "other memory": given_other_memory,
    "the same memory, filled again": filled_again,
    "part of a larger memory": part_of_larger_memory,
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_are_waited_for(capture: Capture, weight: nn.Parameter, write: str) -> None:
    weight.grad = torch.ones_like(weight)
    with capture:
        begin_ahead(CPU)
        for _ in range(2):
            pack(weight)
            WRITES[write](weight)
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
        assert len(sides) == branch._BRANCHES and all(side.behind <= main.behind for side in sides), "they are joined"
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
    assert memory() in branch._known
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
