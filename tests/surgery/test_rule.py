"""The choice of an architecture for one matrix."""

from __future__ import annotations

from typing import Any

import pytest

from flysurgery.errors import OptionError, PatternError
from flysurgery.patterns import gonon, low_rank, monarch
from flysurgery.surgery import Reason
from flysurgery.surgery.planning import Rule, read_architectures


def test_the_familys_options_decide() -> None:
    assert Rule("monarch", nblocks=2).choose(1536, 384) == monarch(1536, 384, 2)
    assert Rule("monarch").choose(384, 384) == monarch(384, 384, 4)
    assert Rule("lowrank", rank=7).choose(384, 384) == low_rank(384, 384, 7)
    assert Rule("gonon").choose(384, 1536) == gonon(384, 1536)


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
        ({"rank": 8}, "takes no rank"),
        ({"arch": "gonon", "nblocks": 8}, "takes no nblocks"),
        ({"architectures": (monarch(8, 8, 2),), "nblocks": 8}, "patterns name the architecture, so nblocks"),
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
