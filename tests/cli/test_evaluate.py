"""Accuracy on the command line: of a folder, and of a model before and after its conversion."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from PIL import Image

from flysurgery.checkpoint import build_base, load
from flysurgery.evaluation import evaluate, load_data
from tests.cli.conftest import TINY, TINY_ARGUMENTS, TINY_BASE, Refused, Run

KEYS = ("top1", "top5", "samples")


def test_evaluate_prints_what_the_library_measures(run: Run, converted: Path) -> None:
    model = load(converted)
    expected = asdict(evaluate(model, load_data("digits", model)))
    document = json.loads(run("evaluate", converted, "--data", "digits", "--json").out)
    assert {key: document[key] for key in KEYS} == {key: expected[key] for key in KEYS}
    table = run("evaluate", converted, "--data", "digits", "--batch-size", "100").out.splitlines()
    assert table[0].split() == ["model", "top-1", "top-5", "samples", "seconds"]
    assert table[1].split()[1:4] == [f"{expected['top1']:.2%}", f"{expected['top5']:.2%}", str(expected["samples"])]


def test_convert_measures_before_and_after(run: Run) -> None:
    torch.manual_seed(5)
    dense = build_base(TINY_BASE, TINY_ARGUMENTS).eval()
    before = evaluate(dense, load_data("digits", dense))
    command = ("convert", *TINY, "--no-pretrained", "--seed", "5", "--evaluate", "digits")
    document = json.loads(run(*command, "--out", "a", "--json").out)
    after = load("a")
    expected = {"before": before, "after": evaluate(after, load_data("digits", after))}
    for when, accuracy in expected.items():
        assert {key: document["accuracy"][when][key] for key in KEYS} == {key: getattr(accuracy, key) for key in KEYS}
    assert json.loads(Path("a/report.json").read_text())["accuracy"] == document["accuracy"]
    top1 = f"top-1 {before.top1:.2%} before, {expected['after'].top1:.2%} after"
    assert f"- Accuracy on digits, 599 samples: {top1}; top-5" in Path("a/README.md").read_text()
    lines = run(*command, "--out", "b").out.splitlines()
    row = next(line for line in lines if line.startswith("top-1 accuracy, 599 samples"))
    change = 100 * (expected["after"].top1 - before.top1)
    assert row.split()[4:] == [f"{before.top1:.2%}", f"{expected['after'].top1:.2%}", f"{change:+.2f}", "points"]


def test_data_with_other_classes_than_the_model_are_refused_before_the_conversion(refused: Refused, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "animals" / name).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / "animals" / name / "1.png")
    words = ("animals", "2 classes", "10")
    refused("convert", *TINY, "--no-pretrained", "--evaluate", "animals", "--out", "o", words=words)
    refused("evaluate", *TINY, "--no-pretrained", "--data", "animals", words=words)
