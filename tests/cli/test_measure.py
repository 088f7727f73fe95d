"""Converting by measured times as a user does, with a clock of our own: what is printed, what is written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flysurgery.checkpoint import load
from flysurgery.inference import clock
from flysurgery.layers import ButterflyLinear
from flysurgery.patterns import Architecture, monarch
from flysurgery.surgery import Plan, plan_of
from tests.cli.conftest import TINY, Refused, Run

AUTO = (*TINY, "--no-pretrained", "--arch", "auto", "--device", "cpu")
MEASURE = (*AUTO, "--measure")


def is_monarch_4(architecture: Architecture | None) -> bool:
    return architecture is not None and architecture == monarch(*architecture.shape, 4)


@pytest.fixture
def fast_monarchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which Monarch products of 4 blocks take half of dense's time, all others twice, and whole models what they like."""

    def ms(way: Any) -> float:
        owner: nn.Module = getattr(way, "__self__", way)
        first = next((each for each in owner.modules() if isinstance(each, ButterflyLinear)), None)
        if first is None:
            return 1.0
        if hasattr(owner, "blocks"):
            return 0.9
        return 0.5 if is_monarch_4(first.architecture) else 2.0

    monkeypatch.setattr(clock, "medians_ms", lambda ways, inputs, **_: tuple(ms(way) for way in ways))


def test_the_times_that_it_chose_by_are_printed_and_kept(run: Run, fast_monarchs: None, tmp_path: Path) -> None:
    outcome = run("convert", *MEASURE, "--batch", 3, "--dtype", "bfloat16")
    assert outcome.code == 0, outcome.err
    lines = [line.split() for line in outcome.out.splitlines()]
    head = next(index for index, line in enumerate(lines) if line[:3] == ["measured", "n", "choice"])
    assert lines[head + 1] == ["blocks.*.attn.qkv", "2", "dense", "1", "1.00"]
    assert ["monarch", "4", "0.5", "0.50", "2"] in lines[head:]
    assert "batch 3 in bfloat16 on cpu, the whole model: dense 1 ms, converted 0.9 ms" in outcome.out
    assert outcome.out.splitlines()[-1] == "saved in checkpoints/vit_tiny_patch16_224.auto"
    folder = tmp_path / "checkpoints" / "vit_tiny_patch16_224.auto"
    measurement = json.loads((folder / "report.json").read_text())["measurement"]
    assert measurement["batch"] == 3 and {group["chosen"] for group in measurement["groups"]} == {"monarch 4"}
    card = (folder / "README.md").read_text()
    assert "- Chosen by times of 3 samples in bfloat16 on cpu: one forward took 1 ms dense and 0.9 ms with these" in card
    made = plan_of(load(folder))
    assert made is not None and all(is_monarch_4(part.architecture) for each in made.replaced for part in each.parts)
    assert {parameter.dtype for parameter in load(folder).parameters()} == {torch.bfloat16}


def test_a_dry_run_measures_and_writes_nothing(run: Run, fast_monarchs: None, tmp_path: Path) -> None:
    outcome = run("convert", *MEASURE, "--optimize", "--dry-run", "--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert len(Plan.from_json(document["plan"]).replaced) == 6
    assert [len(group["layers"]) for group in document["measurement"]["groups"]] == [1, 2, 1, 2]
    assert document["measurement"]["dense_optimized_ms"] is not None and document["tradeoff"]["unit"] == "ms"
    assert list(tmp_path.iterdir()) == []


def test_a_budget_bounds_the_measured_milliseconds(run: Run, refused: Refused, fast_monarchs: None) -> None:
    outcome = run("convert", *MEASURE, "--budget", 0.8, "--dry-run", "--json")
    chosen = json.loads(outcome.out)["tradeoff"]["chosen"]
    assert 0.5 <= chosen["share"] <= 0.8
    refused("convert", *MEASURE, "--budget", 0.4, words=("smallest reachable share", "0.5000"), code=2)


def test_milliseconds_bound_the_whole_model_and_one_sentence_says_what_won(
    run: Run, refused: Refused, fast_monarchs: None, tmp_path: Path
) -> None:
    outcome = run("convert", *MEASURE, "--ms", 0.95, "--out", "o")
    assert outcome.code == 0, outcome.err
    assert "search by milliseconds of the whole model, to meet 0.95: 0.9 at 50.0%" in outcome.out
    assert "within 0.95 ms for the whole model: monarch for 1 layer, dense for 5; its predicted error is" in outcome.out
    rows = json.loads((tmp_path / "o" / "report.json").read_text())["rows"]
    assert [row["family"] for row in rows if row["status"] == "replace"] == ["monarch"]
    refused("convert", *MEASURE, "--ms", 0.5, words=("at most 0.5 ms", "the fastest tried takes 0.9 ms"), code=2)
    refused("convert", *MEASURE, "--ms", 1.5, words=("dense takes 1 ms, which is within 1.5 ms",))


def test_where_nothing_is_faster_nothing_is_written(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "medians_ms", lambda ways, inputs, **_: (1.0, 1.0, *[1.5] * (len(ways) - 2)))
    refused("convert", *MEASURE, words=("nothing would be replaced", "comes nearest", "1.5 ms beside 1 ms"))


def test_auto_may_choose_by_a_budget_of_weights(run: Run) -> None:
    outcome = run("convert", *AUTO, "--budget", 0.5, "--dry-run", "--json")
    assert json.loads(outcome.out)["tradeoff"]["unit"] == "weights"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((*TINY, "--no-pretrained", "--measure"), ("--measure", "--arch auto")),
        ((*TINY, "--no-pretrained", "--measure", "--arch", "gonon"), ("--arch gonon", "--arch auto")),
        (AUTO, ("--arch auto", "--measure, --budget, --max-error or --fidelity")),
        ((*AUTO, "--ms", 2), ("--ms", "--measure")),
        ((*MEASURE, "--ms", 0), ("positive number",)),
        ((*MEASURE, "--ms", 2, "--budget", 0.5), ("budget and ms", "give one of them")),
        ((*AUTO, "--batch", 2), ("--batch", "--measure")),
        ((*MEASURE, "--nblocks", 8), ("--nblocks", "--measure")),
        ((*MEASURE, "--latency", "t.csv"), ("latency", "measuring")),
        ((*MEASURE, "--budget", 0.4, "--max-error", 0.1), ("give one of them",)),
        ((*MEASURE, "--device", "cuda:99"), ("cuda:99", "cannot be used")),
        ((*MEASURE, "--batch", 0), ("--batch",)),
    ],
)
def test_bad_input(refused: Refused, options: tuple[object, ...], words: tuple[str, ...]) -> None:
    refused("convert", *options, words=words, code=2)
