"""A CUDA graph of updates does what they do; batches made beside the update before theirs are the same ones, each as it was made."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from flysurgery.fidelity import Captured, made_ahead
from flysurgery.fidelity.captured import WARM_UP


@pytest.mark.gpu
def test_a_replay_does_what_the_calls_do_and_counts_as_a_write() -> None:
    weights = [torch.ones(3, device="cuda") for _ in range(2)]

    def once(weight: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: weight.add_(x.mean()) * torch.rand(3, device="cuda")

    captured, ways = Captured([weights[0]]), [once(each) for each in weights]
    for number in range(WARM_UP + 3):
        x = torch.full((4 if number != WARM_UP + 1 else 2,), float(number), device="cuda")
        found, versions = [], weights[0]._version
        for call in (partial(captured, ways[0]), ways[1]):
            torch.manual_seed(number)
            found.append(call(x))
        assert torch.equal(*found) and torch.equal(*weights)
        assert weights[0]._version > versions, "a replay is a write"


@pytest.mark.gpu
def test_what_reads_from_the_device_runs_as_it_is_and_random_numbers_go_on() -> None:
    calls, other = [], Captured([])
    draws = [other(lambda: torch.rand(3, device="cuda")) for _ in range(WARM_UP + 1)]
    captured = Captured([])
    for _ in range(WARM_UP + 2):
        assert captured(lambda x: calls.append(float(x.sum())) or x * 2, torch.ones(2, device="cuda")).tolist() == [2, 2]
    assert len(calls) == WARM_UP + 2
    draws += [torch.rand(3, device="cuda"), other(lambda: torch.rand(3, device="cuda"))]
    assert len({tuple(each.tolist()) for each in draws}) == len(draws), "a graph of before, and what is no graph, still draw"


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_all_batches_come_in_order_and_whole(kind: str) -> None:
    device, made, size = torch.device(kind), list[int](), 512 if kind == "cuda" else 8

    def batches() -> Iterator[tuple[Tensor, ...]]:
        for number in range(20):
            made.append(number)
            x = torch.randn(size, size, generator=torch.Generator(device).manual_seed(number), device=device)
            for _ in range(20):
                x = torch.tanh(x @ x)  # takes longer than the use of the batch before
            yield x, torch.full((3,), number, device=device)

    expected, used = [x.clone() for x, _ in batches()], list[Tensor]()
    made.clear()
    for number, (x, label) in enumerate(made_ahead(batches(), device)):
        assert len(made) == number + 1 + (kind == "cuda" and number < 19)
        used.append(x + label[0])
        del x, label  # whose memory others may take as soon as nothing uses it
    assert len(used) == 20
    assert all(torch.equal(mine, theirs + number) for number, (mine, theirs) in enumerate(zip(used, expected, strict=True)))
    assert next(made_ahead(iter(()), device), None) is None
