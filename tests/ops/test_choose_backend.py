"""The choice between backends, made once for operands that look the same."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops import BACKENDS, Backend, Problem, choose_launches, explain, ks_linear
from flysurgery.patterns import Architecture

SQUARE = Architecture.of((1, 192, 48, 2), (2, 48, 192, 1))


def problem(**fields: object) -> Problem:
    return Problem(**({"architecture": SQUARE, "rows": 64, "dtype": torch.float32, "device_type": "cpu"} | fields))  # pyright: ignore[reportArgumentType]


class Fake(Backend):
    """A backend with fixed answers, which remembers what it was asked and gives zeros."""

    def __init__(self, name: str, obstacle: str | None = None, advice: str | None = None) -> None:
        self.name, self.obstacle, self.advice = name, obstacle, advice
        self.problems: list[Problem] = []

    def can_run(self, problem: Problem) -> str | None:
        self.problems.append(problem)
        return self.obstacle

    def advise_against(self, problem: Problem) -> str | None:
        return self.advice

    def linear(self, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return x.new_zeros(x.shape[0], 6)


Register = Callable[..., None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Register]:
    """Makes these the only backends, for this test."""
    before = dict(BACKENDS)
    monkeypatch.setattr(choose_launches, "_decided", {})

    def put(*backends: Backend) -> None:
        BACKENDS.clear()
        BACKENDS.update({backend.name: backend for backend in backends})

    yield put
    put(*before.values())


def test_the_first_that_can_and_knows_none_faster_runs_and_every_reason_is_given(register: Register) -> None:
    broken, slow, good, other = Fake("broken", "it is broken"), Fake("slow", advice="good is faster"), Fake("good"), Fake("other")
    register(broken, slow, good, other)
    said = str(explain(problem()))
    assert said.startswith("broken: no, it is broken\nslow: yes, but good is faster\ngood: yes\nother: yes\n-> good")
    register(broken, slow, Fake("slower", advice="anything is"))
    assert explain(problem()).choice == "slow"
    register(broken, Fake("away", "it is away"))
    with pytest.raises(BackendError, match=r"torch\.float32 on cpu.*broken: no, it is broken; away: no, it is away"):
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


X, FACTORS = torch.ones(4, 2, 6), (torch.ones(1, 3, 2, 2), torch.ones(2, 2, 3, 1))


def test_the_same_call_is_decided_once_and_what_matters_anew(register: Register) -> None:
    asked = Fake("asked")
    register(asked)
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
    plain, single = (8, torch.float32, False, False), torch.float32
    others = [(2, single, False, False), (8, torch.float64, False, False), (8, single, True, False)]
    assert seen == [plain, *others, plain, (8, torch.bfloat16, False, False), (8, single, False, True)]
