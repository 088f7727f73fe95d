"""The choice between backends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops import BACKENDS, Backend, Problem, explain
from flysurgery.patterns import Architecture

SQUARE = Architecture.of((1, 192, 48, 2), (2, 48, 192, 1))


def problem(**fields: object) -> Problem:
    return Problem(**({"architecture": SQUARE, "rows": 64, "dtype": torch.float32, "device_type": "cpu"} | fields))  # pyright: ignore[reportArgumentType]


class Fake(Backend):
    """A backend with fixed answers, which gives zeros."""

    def __init__(self, name: str, obstacle: str | None = None, advice: str | None = None) -> None:
        self.name, self.obstacle, self.advice = name, obstacle, advice

    def can_run(self, problem: Problem) -> str | None:
        return self.obstacle

    def advise_against(self, problem: Problem) -> str | None:
        return self.advice

    def linear(self, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return x.new_zeros(x.shape[0], SQUARE.out_features)


@pytest.fixture
def registry() -> Iterator[dict[str, Backend]]:
    """``BACKENDS``, emptied for this test."""
    before = dict(BACKENDS)
    BACKENDS.clear()
    yield BACKENDS
    BACKENDS.clear()
    BACKENDS.update(before)


def register(registry: dict[str, Backend], *backends: Backend) -> None:
    registry.update({backend.name: backend for backend in backends})


def test_the_first_that_can_and_knows_none_faster_runs(registry: dict[str, Backend]) -> None:
    register(registry, Fake("broken", obstacle="it is broken"), Fake("slow", advice="good is faster"), Fake("good"), Fake("other"))
    explanation = explain(problem())
    assert explanation.choice == "good"
    assert str(explanation) == (
        "broken: no, it is broken\nslow: yes, but good is faster\ngood: yes\nother: yes\n-> good: the fastest known here that can run it"
    )


def test_advice_yields_where_nothing_else_can(registry: dict[str, Backend]) -> None:
    register(registry, Fake("slow", advice="good is faster"), Fake("slower", advice="anything is"), Fake("good", obstacle="it is away"))
    explanation = explain(problem())
    assert explanation.choice == "slow"
    assert explanation.why == "the first that can run it, although good is faster"


def test_every_reason_is_given_where_none_can(registry: dict[str, Backend]) -> None:
    register(registry, Fake("one", obstacle="it is tired"), Fake("two", obstacle="it is away"))
    with pytest.raises(BackendError, match=r"torch\.float32 on cpu.*one: no, it is tired; two: no, it is away"):
        explain(problem())


@given(
    rows=st.none() | st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]),
    device_type=st.sampled_from(["cpu", "meta", "mps", "xpu"]),
    bias=st.booleans(),
    requires_grad=st.booleans(),
    tracing=st.booleans(),
)
def test_something_can_always_run(**fields: object) -> None:
    explanation = explain(problem(**fields))
    chosen = BACKENDS[explanation.choice]
    assert chosen.can_run(problem(**fields)) is None
    assert [verdict.backend for verdict in explanation.verdicts] == list(BACKENDS)
    if fields["tracing"]:
        assert explanation.choice in ("einsum", "bmm")
