"""Damaged and forged folders by the hundreds: what is loaded is what the files say, or one sentence refuses it."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.conftest import need_recorded_arguments

RECIPES = Path(__file__).parents[2] / "recipes"

SLOW = 3.0
"""Seconds of computing that no case may take on a slow machine; the recipe allows one."""


@pytest.fixture(scope="module")
def cases() -> Iterator[ModuleType]:
    """The recipe's cases, with more time for each."""
    need_recorded_arguments()
    sys.path.insert(0, str(RECIPES))
    module = importlib.import_module("fuzz_loader")
    before, module.MAX_SECONDS = module.MAX_SECONDS, SLOW
    yield module
    module.MAX_SECONDS = before
    sys.path.remove(str(RECIPES))


@pytest.fixture(scope="module")
def valid(cases: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return cases.valid_folders(tmp_path_factory.mktemp("valid"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("case")


@settings(max_examples=2000, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(draw=st.randoms(use_true_random=False), by_timm=st.sampled_from((False, False, False, True)))
@pytest.mark.filterwarnings("ignore")
def test_damaged_folders(draw: random.Random, by_timm: bool, cases: ModuleType, valid: list[Any], place: Path) -> None:
    case = cases.damaged(draw.choice(valid), draw)
    outcome = cases.outcome_of(place, case, by_timm=by_timm)
    assert outcome.kind in ("equal", "refused"), (case.changes, outcome)


@pytest.mark.parametrize("by_timm", [False, True])
def test_undamaged_folders_are_equal(by_timm: bool, cases: ModuleType, valid: list[Any], place: Path) -> None:
    for each in valid:
        assert cases.outcome_of(place, cases.Case(each.files), by_timm=by_timm).kind == "equal", each.name


def test_a_difference_is_seen(cases: ModuleType, valid: list[Any], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge itself: another model than the files', an error of another type, and two lines are faults."""
    case, other = cases.Case(valid[0].files), cases.Case(valid[1].files)
    cases.outcome_of(place, other, by_timm=False)
    model = cases.flysurgery.load(place)
    outcomes = []
    for loaded in (
        lambda _: model,
        raising(ValueError("no")),
        raising(cases.CheckpointError("a\nb")),
        raising(cases.CheckpointError("a" * 401)),
    ):
        monkeypatch.setattr(cases.flysurgery, "load", loaded)
        outcomes.append(cases.outcome_of(place, case, by_timm=False).kind)
    assert outcomes == ["differs", "error", "no sentence", "no sentence"]


def raising(error: Exception) -> Any:
    def load(folder: Path) -> None:
        raise error

    return load
