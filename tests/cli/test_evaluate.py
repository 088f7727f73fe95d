"""Accuracy and fidelity on the command line: of a folder, of a model before and after its conversion, and of one model to another."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from PIL import Image

from flysurgery.checkpoint import load
from flysurgery.evaluation import compare, evaluate, load_data
from tests.cli.conftest import RANDOM, TINY_BASE, Document, Refused, Run, tiny_model

KEYS = ("top1", "top5", "samples")
DENSE = ("--against", *RANDOM)
"""The dense model of the folder ``converted``: its weights are those of seed 0."""


def test_evaluate_prints_what_the_library_measures(run: Run, document: Document, converted: Path) -> None:
    model = load(converted)
    expected = asdict(evaluate(model, load_data("digits", model)))
    found = document("evaluate", converted, "--data", "digits")
    assert {key: found[key] for key in KEYS} == {key: expected[key] for key in KEYS}
    table = run("evaluate", converted, "--data", "digits", "--batch-size", "100").out.splitlines()
    assert table[0].split() == ["model", "top-1", "top-5", "samples", "seconds"]
    assert table[1].split()[1:4] == [f"{expected['top1']:.2%}", f"{expected['top5']:.2%}", str(expected["samples"])]


def test_data_with_other_classes_than_the_model_are_refused_before_the_conversion(refused: Refused, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "animals" / name).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / "animals" / name / "1.png")
    words = ("animals", "2 classes", "10")
    refused("convert", *RANDOM, "--evaluate", "animals", "--out", "o", words=words)
    refused("evaluate", *RANDOM, "--data", "animals", words=words)


def test_against_prints_what_the_library_measures(run: Run, document: Document, converted: Path, images: Path) -> None:
    expected = compare(load(converted), tiny_model(), images)
    found = document("evaluate", converted, *DENSE, "--data", images)
    assert (found["model"], found["against"], found["data"]) == (str(converted), TINY_BASE, str(images))
    assert found["samples"] == 12 and found["output_cosine"] == pytest.approx(expected.output_cosine, abs=1e-6)
    assert dict(found["blocks"]) == pytest.approx(dict(expected.blocks), abs=1e-5)
    itself = document("evaluate", converted, "--against", converted, "--data", images, "--samples", 4, "--batch-size", 3)
    assert itself["samples"] == 4 and itself["relative_error"] == 0 and itself["agreement"] == 1
    (images / "00.png").write_text("broken")
    outcome = run("evaluate", converted, *DENSE, "--data", images)
    assert outcome.err == f"flysurgery: 1 images in {images} cannot be read and are left out: 00.png\n"
    lines = [line.split() for line in outcome.out.splitlines()]
    assert lines[0] == ["fidelity", "value"] and lines[1][:2] == ["output", "cosine"] and ["samples", "11"] in lines
    assert lines[-1][:4] == ["error", "after", "each", "block:"] and len(lines[-1]) == 4 + len(expected.blocks)


def test_bad_input_is_one_sentence(refused: Refused, converted: Path, images: Path) -> None:
    evaluate = ("evaluate", converted)
    refused(*evaluate, "--data", images, "--samples", 4, words=("--samples goes with --against",), code=2)
    refused(*evaluate, *DENSE, "--data", images, "--optimize", words=("--optimize", "--against"), code=2)
    refused(*evaluate, *DENSE, "--data", images, "--samples", 13, words=("13 were asked for and there are 12",))
    refused(*evaluate, "--against", "vit_tinny", "--data", images, words=("has no model 'vit_tinny'",))
