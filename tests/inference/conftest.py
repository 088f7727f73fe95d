"""Kernels that take everything, made of PyTorch's operators, so that fused modules can be tested on any machine."""

from collections.abc import Iterator

import pytest
from torch import Tensor

from flysurgery import ops
from flysurgery.inference import clock, replacement
from flysurgery.ops import FeedForward, Operation, Stage, Way

FFN_LAUNCHES = ("half of the block", "the other half")


def way(x: Tensor, operation: Operation) -> Way:
    """The way of an operation by its definition."""
    launches = FFN_LAUNCHES if isinstance(operation, FeedForward) else ()
    return Way((Stage(launches, lambda y, x, given: given.plainly(x)),), x, operation)


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which everything fused is faster."""
    monkeypatch.setattr(clock, "medians_ms", lambda ways, inputs, **_: (2.0, 1.0))


@pytest.fixture
def all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that compute all of their tokens, so that not a bit of a result differs, as products of other rows may do."""
    monkeypatch.setattr(replacement, "last_reading", lambda found, trains: None)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, faster: None) -> Iterator[list[str]]:
    """Kernels that are always there and faster; the names of those that were called, in order."""
    names: list[str] = []

    def counted(x: Tensor, operation: Operation) -> Way:
        def run(y: Tensor, x: Tensor, given: Operation) -> Tensor:
            names.append(str(given.form[0]))
            return y

        found = way(x, operation)
        return found._replace(stages=(Stage((), run), *found.stages))

    monkeypatch.setattr(ops, "way", counted)
    yield names
