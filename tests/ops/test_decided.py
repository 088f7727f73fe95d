"""Decisions are made once for operands that look the same, and again when anything changes that they depend on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from flysurgery.ops import BACKENDS, Backend, Problem, ks_linear, ways


class Asked(Backend):
    """Remembers what it was asked, and answers with what it was told to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.problems: list[Problem] = []

    def can_run(self, problem: Problem) -> str | None:
        self.problems.append(problem)
        return None

    def linear(self, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return x.new_zeros(x.shape[0], 6)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """The only backend."""
    before, backend = dict(BACKENDS), Asked("asked")
    BACKENDS.clear()
    BACKENDS["asked"] = backend
    monkeypatch.setattr(ways, "_decided", {})
    yield backend
    BACKENDS.clear()
    BACKENDS.update(before)


X, FACTORS = torch.ones(4, 2, 6), (torch.ones(1, 3, 2, 2), torch.ones(2, 2, 3, 1))


def test_the_same_call_is_decided_once_and_what_matters_anew(asked: Asked) -> None:
    for _ in range(3):
        assert ks_linear(X + 1, FACTORS).shape == (4, 2, 6)
    ks_linear(X[0], FACTORS)
    ks_linear(X.double(), [factor.double() for factor in FACTORS])
    ks_linear(X, FACTORS, torch.ones(6))
    ks_linear(X, FACTORS, backend="asked")
    with torch.autocast("cpu", torch.bfloat16):
        ks_linear(X, FACTORS)
    for factor in (FACTORS[0].clone().requires_grad_(), torch.nn.Parameter(FACTORS[0])):
        ks_linear(X, (factor, FACTORS[1]))
        with torch.no_grad():
            ks_linear(X, (factor, FACTORS[1]))
    for _ in range(2):  # transforms are not remembered
        torch.func.vmap(lambda row: ks_linear(row, FACTORS))(X)
    assert [problem.tracing for problem in asked.problems[-3:]] == [False, True, True]
    del asked.problems[-2:]
    seen = [(problem.rows, problem.dtype, problem.bias, problem.requires_grad) for problem in asked.problems]
    plain = (8, torch.float32, False, False)
    assert seen == [
        plain,
        (2, torch.float32, False, False),
        (8, torch.float64, False, False),
        (8, torch.float32, True, False),
        plain,
        (8, torch.bfloat16, False, False),
        (8, torch.float32, False, True),
    ]


def test_a_new_backend_is_noticed(asked: Asked) -> None:
    ks_linear(X, FACTORS)
    first = Asked("first")
    BACKENDS.clear()
    BACKENDS.update({"first": first, "asked": asked})
    ks_linear(X, FACTORS)
    assert len(first.problems) == 1
