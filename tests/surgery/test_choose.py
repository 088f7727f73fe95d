"""The choice of an architecture for one matrix, held against brute force where there is a budget."""

from __future__ import annotations

from typing import Any

import pytest

from flysurgery.errors import OptionError, PatternError
from flysurgery.patterns import Architecture, gonon, low_rank, monarch
from flysurgery.surgery import Reason
from flysurgery.surgery.choose import Rule, read_architectures

SIZES = [(384, 384), (1536, 384), (384, 1536), (192, 192), (1152, 384), (100, 75), (6, 4)]
BUDGETS = [0.01, 0.1, 0.25, 0.3125, 0.5, 0.9, 1.0]


def test_without_budget_the_familys_options_decide() -> None:
    assert Rule("monarch", nblocks=2).choose(1536, 384) == monarch(1536, 384, 2)
    assert Rule("monarch").choose(384, 384) == monarch(384, 384, 4)
    assert Rule("lowrank", rank=7).choose(384, 384) == low_rank(384, 384, 7)
    assert Rule("gonon").choose(384, 1536) == gonon(384, 1536)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
def test_budget_takes_the_densest_monarch_that_fits(out_features: int, in_features: int, budget: float) -> None:
    candidates = [monarch(out_features, in_features, n) for n in range(1, 1537) if out_features % n == 0 == in_features % n]
    densities = [each.density for each in candidates if each.density <= budget and each.density < 1]
    choice = Rule("monarch", budget=budget).choose(out_features, in_features)
    if densities:
        assert isinstance(choice, Architecture)
        assert choice in candidates
        assert choice.density == max(densities)
    else:
        assert isinstance(choice, Reason)
        assert choice.code == "over-budget"


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
def test_budget_takes_the_largest_rank_that_fits(out_features: int, in_features: int, budget: float) -> None:
    weights = out_features * in_features
    ranks = [r for r in range(1, min(out_features, in_features) + 1) if r * (out_features + in_features) <= budget * weights]
    choice = Rule("lowrank", budget=budget).choose(out_features, in_features)
    if not ranks:
        assert isinstance(choice, Reason)
        assert choice.code == "over-budget"
    elif max(ranks) * (out_features + in_features) == weights:
        assert isinstance(choice, Reason)
        assert choice.code == "no-gain"
    else:
        assert choice == low_rank(out_features, in_features, max(ranks))


def test_budget_takes_gonon_or_leaves_it() -> None:
    assert Rule("gonon", budget=0.25).choose(384, 384) == gonon(384, 384)
    over = Rule("gonon", budget=0.25).choose(1536, 384)
    assert isinstance(over, Reason)
    assert (over.code, "1536x384" in over.text) == ("over-budget", True)


def test_sizes_that_do_not_divide_give_a_reason_with_both() -> None:
    reason = Rule("monarch").choose(10, 64)
    assert isinstance(reason, Reason)
    assert reason.code == "no-pattern"
    assert "10" in reason.text
    assert "64" in reason.text


def test_more_weights_than_dense_give_a_reason_with_both_counts() -> None:
    reason = Rule("monarch", nblocks=1).choose(64, 64)
    assert isinstance(reason, Reason)
    assert reason.code == "no-gain"
    assert "8192" in reason.text
    assert "4096" in reason.text


def test_explicit_architectures_are_matched_by_size() -> None:
    square, up = monarch(64, 64, 8), monarch(256, 64, 8)
    rule = Rule(architectures=(square, up))
    assert rule.choose(64, 64) == square
    assert rule.choose(256, 64) == up
    reason = rule.choose(64, 256)
    assert isinstance(reason, Reason)
    assert reason.code == "no-pattern"
    assert "64x256" in reason.text
    assert "is 256x64" in reason.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "butterfly"}, "monarch, gonon, lowrank"),
        ({"nblocks": 0}, "nblocks must be a positive integer, got 0"),
        ({"nblocks": 2.0}, "nblocks must be a positive integer"),
        ({"arch": "lowrank", "rank": -3}, "rank must be a positive integer, got -3"),
        ({"budget": 0.0}, "above 0 and at most 1; got 0.0"),
        ({"budget": 1.5}, "above 0 and at most 1; got 1.5"),
        ({"budget": float("nan")}, "above 0 and at most 1"),
        ({"budget": "half"}, "above 0 and at most 1; got 'half'"),
        ({"budget": 0.5, "nblocks": 8}, "a budget chooses"),
        ({"arch": "lowrank", "budget": 0.5, "rank": 8}, "a budget chooses"),
        ({"rank": 8}, "takes no rank"),
        ({"arch": "gonon", "nblocks": 8}, "takes no nblocks"),
        ({"architectures": (monarch(8, 8, 2),), "budget": 0.5}, "patterns name the architecture, so budget"),
    ],
)
def test_options_out_of_range_or_in_contradiction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Rule(**options)


def test_reads_every_form_of_patterns() -> None:
    square, up = monarch(8, 8, 2), monarch(16, 8, 2)
    assert read_architectures(None) == ()
    assert read_architectures(square) == (square,)
    assert read_architectures(str(square)) == (square,)
    assert read_architectures([str(square), up]) == (square, up)
    assert read_architectures(square.to_json()) == (square,)
    for wrong in ("(1,2,3)", [], [[1, 2, 3]], [1, 2]):
        with pytest.raises(PatternError):
            read_architectures(wrong)
