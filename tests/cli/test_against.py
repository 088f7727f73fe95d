"""``evaluate --against`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from flysurgery.checkpoint import build_base, load
from flysurgery.evaluation import compare
from tests.cli.conftest import TINY, TINY_ARGUMENTS, TINY_BASE, Refused, Run

DENSE = ("--against", *TINY, "--no-pretrained")
"""The dense model of the folder ``converted``: its weights are those of seed 0."""


@pytest.fixture
def images(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    for index, colour in enumerate(("red", "green", "blue", "white", "black")):
        Image.linear_gradient("L").convert("RGB").resize((40, 40)).point(lambda value: value // 2).save(
            tmp_path / "images" / f"{colour}.png"
        )
        Image.new("RGB", (40, 40), colour).save(tmp_path / "images" / f"{index}.png")
    return tmp_path / "images"


def test_it_prints_what_the_library_measures(run: Run, converted: Path, images: Path) -> None:
    torch.manual_seed(0)
    expected = compare(load(converted), build_base(TINY_BASE, TINY_ARGUMENTS).eval(), images)
    outcome = run("evaluate", converted, *DENSE, "--data", images, "--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert (document["model"], document["against"], document["data"]) == (str(converted), TINY_BASE, str(images))
    assert document["samples"] == 10 and document["output_cosine"] == pytest.approx(expected.output_cosine, abs=1e-6)
    assert dict(document["blocks"]) == pytest.approx(dict(expected.blocks), abs=1e-5)
    lines = [line.split() for line in run("evaluate", converted, *DENSE, "--data", images).out.splitlines()]
    assert lines[:2] == [["fidelity", "value"], ["output", "cosine", f"{expected.output_cosine:.3f}"]]
    assert ["same", "top", "class", f"{expected.agreement:.2%}"] in lines and ["samples", "10"] in lines
    assert lines[-1] == ["error", "after", "each", "block:", *(f"{error:.3f}" for _, error in expected.blocks)]


def test_a_model_against_itself_and_fewer_samples(run: Run, converted: Path, images: Path) -> None:
    outcome = run("evaluate", converted, "--against", converted, "--data", images, "--samples", 4, "--batch-size", 3, "--json")
    document = json.loads(outcome.out)
    assert document["samples"] == 4 and document["relative_error"] == 0 and document["agreement"] == 1


def test_unreadable_images_are_named_on_stderr(run: Run, converted: Path, images: Path) -> None:
    (images / "0.png").write_text("broken")
    outcome = run("evaluate", converted, *DENSE, "--data", images, "--json")
    assert json.loads(outcome.out)["samples"] == 9
    assert outcome.err == f"flysurgery: 1 images in {images} cannot be read and are left out: 0.png\n"


def test_bad_input_is_one_sentence(refused: Refused, converted: Path, images: Path) -> None:
    evaluate = ("evaluate", converted)
    refused(*evaluate, "--data", images, "--samples", 4, words=("--samples goes with --against",), code=2)
    refused(*evaluate, *DENSE, "--data", images, "--optimize", words=("--optimize", "--against"), code=2)
    refused(*evaluate, *DENSE, "--data", images, "--samples", 1, words=("--samples",), code=2)
    refused(*evaluate, *DENSE, "--data", images, "--samples", 11, words=("11 were asked for and there are 10",))
    refused(*evaluate, *DENSE, "--data", "nowhere", words=("there is no data set 'nowhere'",))
    refused(*evaluate, "--against", "vit_tinny", "--data", images, words=("timm has no model 'vit_tinny'",))
    against = ("--against", TINY_BASE, "--no-pretrained", "--data", images, "--model-args")
    refused(*evaluate, *against, json.dumps({**TINY_ARGUMENTS, "img_size": 64}), words=("3x32x32", "3x64x64"))
    refused(*evaluate, *against, json.dumps({**TINY_ARGUMENTS, "num_classes": 3}), words=("10 classes", "3;"))
