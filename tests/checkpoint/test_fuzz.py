"""Damaged and forged folders by the hundreds: what is loaded is what the files say, or one sentence refuses it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint import damage
from tests.checkpoint.conftest import need_recorded_arguments
from tests.checkpoint.damage import Valid

CASES = 1000


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> list[Valid]:
    need_recorded_arguments()
    return damage.valid_folders(tmp_path_factory.mktemp("valid"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("case")


@settings(max_examples=CASES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(draw=st.randoms(use_true_random=False), by_timm=st.sampled_from((False, False, False, True)))
@pytest.mark.filterwarnings("ignore")
def test_damaged_folders(draw: random.Random, by_timm: bool, valid: list[Valid], place: Path) -> None:
    case = damage.damaged(draw.choice(valid), draw)
    outcome = damage.outcome_of(place, case, by_timm=by_timm)
    assert outcome.kind in damage.OUTCOMES, (case.changes, outcome)


@pytest.mark.parametrize("by_timm", [False, True])
def test_undamaged_folders_are_equal(by_timm: bool, valid: list[Valid], place: Path) -> None:
    for each in valid:
        assert damage.outcome_of(place, damage.Case(each.files), by_timm=by_timm).kind == "equal", each.name


def test_a_difference_is_seen(valid: list[Valid], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge itself: another model than the files', an error of another type, and two lines are faults."""
    case, other = damage.Case(valid[0].files), damage.Case(valid[1].files)
    damage.outcome_of(place, other, by_timm=False)
    model = damage.flysurgery.load(place)
    outcomes = []
    for loaded in (
        lambda _: model,
        raising(ValueError("no")),
        raising(damage.CheckpointError("a\nb")),
        raising(damage.CheckpointError("a" * 401)),
    ):
        monkeypatch.setattr(damage.flysurgery, "load", loaded)
        outcomes.append(damage.outcome_of(place, case, by_timm=False).kind)
    assert outcomes == ["differs", "error", "no sentence", "no sentence"]


def raising(error: Exception) -> Any:
    def load(folder: Path) -> None:
        raise error

    return load
