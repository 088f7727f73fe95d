"""Problems side by side: each gets its own answer, alike ones go together, and what fails is raised."""

from __future__ import annotations

import pytest
import torch

from flysurgery.patterns import Architecture, gonon, low_rank, monarch, square_dyadic
from flysurgery.projection import FitProblem, Fitted, fit_side_by_side, side_by_side
from flysurgery.projection.block_cycling import cycle_together
from tests.projection.oracle import random_matrix
from tests.projection.test_block_cycling import random_gram

N = 16


def problems(*architectures: Architecture) -> list[FitProblem]:
    found = [
        FitProblem(random_matrix(each, seed).float(), each, random_gram(each.in_features, seed)) for seed, each in enumerate(architectures)
    ]
    first = found[0]
    return [*found, FitProblem(first.weight, low_rank(N, N, 2), first.gram), FitProblem(first.weight, low_rank(N, N, 5), first.gram)]


def keep(number: int, fitted: Fitted | None) -> tuple[int, Fitted | None]:
    return number, fitted


@pytest.mark.parametrize("together", [0, 1 << 20])
def test_every_problem_is_fitted_as_it_is_alone(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(side_by_side.TOGETHER_BYTES, "cpu", together)
    given = problems(monarch(N, N, 2), gonon(24, 24), monarch(N, N, 2), monarch(N, N, 4))
    found = dict(fit_side_by_side(given, keep))
    assert sorted(found) == list(range(len(given)))
    for number, problem in enumerate(given):
        (alone,) = cycle_together([problem.weight.double()], problem.architecture, [problem.gram])
        finished_as, fitted = found[number]
        assert finished_as == number and fitted is not None
        assert fitted.errors[-1] == pytest.approx(alone.errors[-1], rel=1e-9)
        assert torch.allclose(fitted.product, alone.product, atol=1e-7)
        assert fitted.seconds > 0


def test_other_than_two_factors_are_not_fitted() -> None:
    given = [FitProblem(torch.ones(N, N), square_dyadic(N), torch.eye(N).double())]
    assert list(fit_side_by_side(given, keep)) == [(0, (0, None))]


def test_what_fails_is_raised() -> None:
    def fail(number: int, _: Fitted | None) -> None:
        raise ValueError(f"problem {number}")

    with pytest.raises(ValueError, match="problem 0"):
        list(fit_side_by_side(problems(monarch(N, N, 2)), fail))
