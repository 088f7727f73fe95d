"""Inspect, doctor, densify, evaluate, bench and finetune; models of every library; and docs/imagenet.md as a user follows it."""

import csv
import json
import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image

from flysurgery import surgery
from flysurgery.checkpoint import load, load_dense, save_dense
from flysurgery.evaluation import compare, evaluate, load_data
from flysurgery.fidelity import VIEWS
from flysurgery.ops import BACKENDS
from flysurgery.surgery import plan_of
from tests.cli.conftest import RANDOM, TINY, TINY_ARGUMENTS, Document, Refused, Run
from tests.support.models import TRUNK, VIT, vit


def test_a_densified_folder_opens_by_timm_and_loses_nothing_in_a_second_conversion(
    run: Run, document: Document, refused: Refused, converted: Path, tmp_path: Path
) -> None:
    """Its layers are products of the architecture already, so projecting them again is exact up to rounding."""
    outcome = run("densify", converted, "--out", "dense")
    assert (outcome.code, outcome.out, outcome.err) == (0, "6 layers made dense, saved in dense\n", "")
    assert {path.name for path in (tmp_path / "dense").iterdir()} == {"model.safetensors", "config.json"}
    expected = load(converted)
    surgery.densify(expected)
    images = torch.randn(2, 3, 32, 32)
    opened = timm.create_model(f"local-dir:{tmp_path / 'dense'}", pretrained=True).eval()
    with torch.inference_mode():
        assert torch.equal(opened(images), expected(images))
    rows = document("convert", "dense", "--out", "again")["rows"]
    errors = [row["relative_error"] for row in rows if row["status"] == "replace"]
    assert len(errors) == 6 and max(errors) < 1e-6
    refused("densify", "dense", "--out", "other", words=("dense",))
    assert document("densify", converted, "--out", "dense", "--force") == {"folder": "dense", "layers": 6}


def test_inspect_gives_layers_that_are_alike_one_row(run: Run, document: Document, tmp_path: Path) -> None:
    outcome = run("inspect", *TINY)
    assert (outcome.code, outcome.err) == (0, "") and list(tmp_path.iterdir()) == []
    table = {line.split()[0]: line.split()[1:] for line in outcome.out.splitlines()[1:] if line}
    found = document("inspect", *TINY)
    rows = {row["fqn"]: row for row in found["targets"]}
    qkv = rows["blocks.0.attn.qkv"]
    assert (qkv["params"], qkv["flops"]) == (64 * 192 + 192, 2 * 64 * 192 * qkv["rows"] // 2)
    shares = [f"{2 * qkv[name] / found[of]:.1%}" for name, of in (("params", "params"), ("flops", "linear_flops"))]
    assert table["blocks.*.attn.qkv"] == ["2", "qkv", "192x64", "1", *shares]
    assert found["linear_flops"] == sum(row["flops"] for row in rows.values())
    assert found["blocks"] == ["blocks.0", "blocks.1"] and "blocks 0 to 1: blocks.0 to blocks.1" in outcome.out
    assert "head (advice): it is a classifier head" in outcome.out
    assert [(obstacle["code"], obstacle["blocking"]) for obstacle in rows["head"]["obstacles"]] == [("head", False)]


def test_doctor_tells_versions_every_backend_and_what_is_in_the_way(run: Run, document: Document, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLYSURGERY_CACHE", str(tmp_path / "file" / "cache"))
    found = document("doctor")
    facts = {fact["what"]: fact for fact in found["facts"]}
    assert facts["python"]["here"].startswith(platform.python_version())
    assert (facts["torch"]["here"], facts["timm"]["here"]) == (version("torch"), version("timm"))
    assert "not a folder" in facts["kernel cache"]["obstacle"]
    on_cpu = [row for row in found["backends"] if row["device"] == "cpu" and row["dtype"] == "float32"]
    assert {row["backend"] for row in on_cpu} == set(BACKENDS)
    assert [row["runs"] for row in on_cpu].count("chosen") == 1
    assert all(row["reason"] for row in found["backends"] if row["runs"] != "yes")
    assert "einsum" in run("doctor").out


DENSE = ("--against", *RANDOM)
"""The dense model of the folder ``converted``: its weights are those of seed 0."""


def test_evaluate_prints_what_the_library_measures(run: Run, document: Document, converted: Path, images: Path) -> None:
    model = load(converted)
    accuracy, found = evaluate(model, load_data("digits", model)), document("evaluate", converted, "--data", "digits")
    assert (found["top1"], found["top5"], found["samples"]) == (accuracy.top1, accuracy.top5, accuracy.samples)
    table = run("evaluate", converted, "--data", "digits", "--batch-size", "100").out.splitlines()
    assert table[1].split()[1:4] == [f"{accuracy.top1:.2%}", f"{accuracy.top5:.2%}", str(accuracy.samples)]
    expected, found = compare(model, vit(**TINY_ARGUMENTS), images), document("evaluate", converted, *DENSE, "--data", images)
    assert found["samples"] == 12 and found["output_cosine"] == pytest.approx(expected.output_cosine, abs=1e-6)
    assert dict(found["blocks"]) == pytest.approx(dict(expected.blocks), abs=1e-5)
    itself = document("evaluate", converted, "--against", converted, "--data", images, "--samples", 4, "--batch-size", 3)
    assert itself["samples"] == 4 and itself["relative_error"] == 0 and itself["agreement"] == 1
    (images / "00.png").write_text("broken")
    outcome = run("evaluate", converted, *DENSE, "--data", images)
    assert outcome.err == f"flysurgery: 1 images in {images} cannot be read and are left out: 00.png\n"
    lines = [line.split() for line in outcome.out.splitlines()]
    assert lines[1][:2] == ["output", "cosine"] and ["samples", "11"] in lines and len(lines[-1]) == 4 + len(expected.blocks)


def test_what_evaluate_refuses(refused: Refused, converted: Path, images: Path) -> None:
    command = ("evaluate", converted)
    refused(*command, "--data", images, "--samples", 4, words=("--samples goes with --against",), code=2)
    refused(*command, *DENSE, "--data", images, "--optimize", words=("--optimize", "--against"), code=2)
    refused(*command, "--against", "vit_tinny", "--data", images, words=("has no model 'vit_tinny'",))


MULTIPLY = ("bench", "multiply", "--quick", "--arch", "lowrank", "--width", 16, "--rows", 8, "--rounds", 2, "--device", "cpu")
TINY_VIT = ("vit_tiny_patch16_224", "--model-args", '{"embed_dim": 48, "depth": 1, "num_heads": 2, "img_size": 32, "patch_size": 8}')
MODEL = ("bench", "model", *TINY_VIT, "--rounds", 2, "--device", "cpu")


@pytest.fixture
def threads() -> Iterator[None]:
    """Their number is set back after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows_of(file: str) -> list[dict[str, str]]:
    with Path(file).open(newline="") as lines:
        return list(csv.DictReader(lines))


@pytest.mark.usefixtures("threads")
def test_multiply_prints_a_table_and_writes_the_rows(run: Run, refused: Refused) -> None:
    title, *lines = run(*MULTIPLY, "--threads", 1, "--out", "rows.csv").out.splitlines()
    assert "bound" not in title
    rows = rows_of("rows.csv")
    assert {row["threads"] for row in rows} == {"1"}
    for line, row in zip(lines, rows, strict=True):
        assert line.split()[:3] == [row["arch"], row["layer"], row["mode"]]
        assert row["candidate"] in line and line.endswith(row["status"])
    refused(*MODEL, "--out", "rows.csv", words=("a table of other measurements",), code=2)
    refused("bench", "multiply", "--arch", "gonon", "--width", 7, "--rows", 8, "--device", "cpu", words=("no layer of width 7 has",))
    refused(*MULTIPLY, "--rows", 10**13, "--out", "many.csv", words=("this does not fit into this machine's memory; take fewer",))
    refused(*MODEL, "--mode", "fp32,bf16", words=("bench model takes one mode at a time",), code=2)


@pytest.mark.usefixtures("threads")
def test_bench_model_measures_each_architecture_once(run: Run, document: Document) -> None:
    """A second run with the same file goes on where it stopped, and takes no row of another architecture for its own."""
    command = (*MODEL, "--quick", "--out", "rows.csv")
    assert run(*command, "--arch", "gonon").code == 0
    gonon = Path("rows.csv").read_text()
    assert run(*command, "--arch", "monarch").code == 0
    both, rows = Path("rows.csv").read_text(), rows_of("rows.csv")
    assert both.startswith(gonon)
    converted = [row["architecture"] for row in rows if row["candidate"] == "converted" and row["layer"] == "blocks.0.mlp.fc1"]
    assert converted == ["(1,96,24,2),(6,8,8,1)", "(1,48,12,4),(4,12,12,1)"]
    printed = run(*command, "--arch", "gonon")
    assert Path("rows.csv").read_text() == both
    assert printed.err == f"rows.csv: {len(rows)} rows are there already and stay; --fresh measures them again\n"
    found = document(*command, "--arch", "gonon")
    assert found["answer"] == printed.out.splitlines()[-1] and {row["model"] for row in found["rows"]} == {rows[0]["model"]}
    slow = [row["layer"] for row in found["rows"] if row["candidate"] == "converted" and row["ratio_to_dense"] >= 1]
    assert found["stay_dense"] == [name for name in slow if name != "(model)"]


SIZES = TRUNK | {"image_size": 32}
PROCESSOR = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25], "image_processor_type": "ViTImageProcessor"}


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder as ``save_pretrained`` of a model and of its image processor write it."""
    torch.manual_seed(0)
    folder = tmp_path / "dense"
    transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, num_labels=10)).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def test_a_folder_of_transformers_goes_through_every_verb(theirs: Path, document: Document, run: Run) -> None:
    options = ("--calibrate", "digits", "--samples", 40, "--evaluate", "digits", "--out", "c")
    report = document("convert", f"transformers:{theirs}", *options)
    assert report["fidelity"]["output_cosine"] > 0.9 and report["accuracy"]["after"]["samples"] == 599
    model, again, x = transformers.AutoModelForImageClassification.from_pretrained("c"), load("c"), torch.randn(2, 3, 32, 32)
    assert torch.equal(model(x).logits, again(x).logits)
    assert json.loads(Path("c/preprocessor_config.json").read_text()) == PROCESSOR
    assert again.pretrained_cfg == {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
    assert document("evaluate", "c", "--against", theirs, "--data", "digits", "--samples", 40)["samples"] == 40
    assert run("finetune", "c", "--data", "digits", "--teacher", theirs, "--epochs", 1, "--out", "trained").code == 0
    assert document("evaluate", "trained", "--data", "digits")["samples"] == 599
    assert run("densify", "c", "--out", "again").code == 0
    dense = transformers.ViTForImageClassification.from_pretrained("again")
    torch.testing.assert_close(dense(x).logits, again(x).logits, rtol=1e-4, atol=1e-5)
    assert document("inspect", "again")["blocks"] == ["vit.layers.0", "vit.layers.1"]


def test_a_class_with_its_configuration_has_random_weights(document: Document) -> None:
    sizes = ("--model-args", json.dumps(SIZES | {"num_labels": 3}))
    document("convert", "transformers:Dinov2ForImageClassification", *sizes, "--no-pretrained", "--out", "out")
    assert transformers.Dinov2ForImageClassification.from_pretrained("out").config.num_labels == 3


def test_what_is_refused_of_transformers(theirs: Path, refused: Refused, tmp_path: Path) -> None:
    refused("convert", "transformers:Nonsense", "--no-pretrained", words=("no model class 'Nonsense'",))
    refused("convert", "transformers:ViTModel", words=("no weights are published", "--no-pretrained"))
    refused("convert", f"transformers:{tmp_path / 'nowhere'}", words=("there is no folder",))
    refused("convert", theirs, "--model-args", "hidden_size=32", words=("has its own model or weights",), code=2)
    config = json.loads((theirs / "config.json").read_text())
    for architecture, words in (("os.system", "no model class 'os.system'"), ("ViTModel", "could not be loaded")):
        (theirs / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
        refused("convert", theirs, "--out", "out", words=(words,))
        (theirs / "model.safetensors").write_bytes(b"")


QUICK = ("--data", "digits", "--epochs", "1", "--batch-size", "256", "--cpu", "--workers", "0")
CLASSES, TRAIN, VAL = 10, 12, 4


@pytest.fixture
def stand_in(run: Run, tmp_path: Path) -> None:
    """The folders ``imagenet``, with a folder of images a class in ``train`` and ``val``, ``photos`` without classes, and ``dense``."""
    draw = np.random.default_rng(0)
    for part, count in (("train", TRAIN), ("val", VAL)):
        for number in range(CLASSES):
            folder = tmp_path / "imagenet" / part / f"n{number:08}"
            folder.mkdir(parents=True)
            for index in range(count):
                coarse = Image.fromarray(draw.integers(0, 255, (10, 12, 3), np.uint8))
                coarse.resize((60, 50), Image.Resampling.BICUBIC).save(folder / f"{part}_{index:04}.JPEG")
    (tmp_path / "photos").mkdir()
    for number, path in enumerate(sorted((tmp_path / "imagenet" / "train").glob("*/*0.JPEG"))):
        path.rename(tmp_path / "photos" / f"{number}.jpg")
    save_dense(vit(**TINY_ARGUMENTS), tmp_path / "dense", VIT, TINY_ARGUMENTS, force=False)


@pytest.mark.usefixtures("stand_in")
def test_from_weights_to_an_evaluated_folder(document: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flysurgery.fidelity.reconstruction.affordable", lambda *_: 3)
    fit = ("--calibrate", "imagenet/train", "--samples", 40, "--sequential", "--reconstruct", "--minutes", 1)
    converted = document("convert", "dense", "--arch", "monarch", *fit, "--evaluate", "imagenet/val", "--out", "fitted")
    accuracy, dense = converted["accuracy"], document("evaluate", "dense", "--data", "imagenet/val")
    assert accuracy["data"] == "imagenet/val" and accuracy["after"]["samples"] == CLASSES * VAL
    assert [accuracy["before"][name] for name in ("top1", "top5")] == [dense[name] for name in ("top1", "top5")]
    top1 = f"top-1 {accuracy['before']['top1']:.2%} before, {accuracy['after']['top1']:.2%} after"
    assert f"- Accuracy on imagenet/val: {top1}, of 40 samples" in Path("fitted/README.md").read_text()
    assert converted["calibration"]["sequential"] is True and converted["reconstruction"]["updates"] == 3

    train = ("--teacher", "dense", "--epochs", 1, "--batch-size", 20, "--workers", 0, "--cpu")
    tuned = document("finetune", "fitted", "--data", "imagenet", *train, "--lr", "1e-3", "--save-every", 2, "--out", "tuned")
    assert tuned["labelled"] is True and tuned["updates"] == CLASSES * (TRAIN - 1) // 20
    before, after = (load(folder) for folder in ("fitted", "tuned"))
    assert plan_of(after) == plan_of(before)
    assert not torch.equal(after.get_parameter("blocks.0.mlp.fc1.factors.0"), before.get_parameter("blocks.0.mlp.fc1.factors.0"))
    report, earlier = (json.loads(Path(folder, "report.json").read_text()) for folder in ("tuned", "fitted"))
    assert report["rows"] == earlier["rows"]
    assert [report["finetune"]["settings"][name] for name in ("learning_rate", "save_every")] == [1e-3, 2]
    assert f"top-1 {tuned['before']['top1']:.2%} before, {tuned['after']['top1']:.2%} after" in Path("tuned/README.md").read_text()
    assert tuned["before"]["top1"] == accuracy["after"]["top1"]
    assert tuned["after"]["samples"] == tuned["fidelity_after"]["samples"] == CLASSES * VAL
    again = document("evaluate", "tuned", "--data", "imagenet/val")
    assert [again[name] for name in ("top1", "top5")] == [tuned["after"][name] for name in ("top1", "top5")]
    fidelity = document("evaluate", "tuned", "--against", "dense", "--data", "imagenet/val")
    assert fidelity["relative_error"] == pytest.approx(tuned["fidelity_after"]["relative_error"], rel=1e-3)

    photos = ("--data", "photos", *train[:4], "--cpu", "--evaluate", "imagenet/val", "--out", "unlabelled")
    unlabelled = document("finetune", "fitted", *photos)
    assert unlabelled["labelled"] is False and unlabelled["after"]["samples"] == CLASSES * VAL
    assert unlabelled["images"] == len(list(Path("photos").iterdir())) // VIEWS["cpu"] * VIEWS["cpu"], "an epoch has whole batches"
    assert unlabelled["fidelity_after"]["relative_error"] <= unlabelled["fidelity_before"]["relative_error"]
    assert json.loads(Path("unlabelled/report.json").read_text())["finetune"]["settings"]["optimizer"] == "muon"


def test_sparse_to_dense_from_scratch_and_a_teacher_by_its_name(run: Run, converted: Path, images: Path) -> None:
    run("finetune", converted, *QUICK[:2], "--epochs", "2", *QUICK[4:], "--densify-after", "1", "--scratch", "--out", "d")
    dense, _, _ = load_dense("d")
    again = timm.create_model("local-dir:d", pretrained=True).eval()
    image = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(dense(image), again(image))
    assert run("finetune", *TINY, "--scratch", *QUICK, "--out", "n", "--teacher", "d", "--seed", "3").code == 0
    assert load_dense("n")[1] == VIT
    assert "saved in n, log in n.training" in run("finetune", *TINY, "--scratch", *QUICK, "--out", "n", "--force").out
    torch.save(vit(**TINY_ARGUMENTS).state_dict(), "dense.pt")
    options = ("--data", images, "--minutes", "0.01", "--cpu", "--out", "o", "--teacher", *TINY, "--checkpoint", "dense.pt")
    done = run("finetune", converted, *options)
    assert done.code == 0 and "output cosine, 2 held-out samples" in done.out, done


NO_REPORTS: list[Any] = ["{", "[]", "null", '{"rows": 3}', '{"fidelity": {"samples": 1}}', 2000 * "[", Path.mkdir]
if os.name != "nt":
    NO_REPORTS += [os.mkfifo, lambda file: file.symlink_to("/dev/zero")]


@pytest.mark.parametrize("content", NO_REPORTS)
def test_a_damaged_report_is_found_before_the_training(content: Any, refused: Refused, converted: Path) -> None:
    file = Path(shutil.copytree(converted, "damaged")) / "report.json"
    is_text = isinstance(content, str)
    file.unlink()
    file.write_text(content) if is_text else content(file)
    refused("finetune", "damaged", *QUICK, "--out", "o", words=("report.json", "" if is_text else "expected a regular file"))


def test_what_is_refused(refused: Refused, converted: Path, images: Path) -> None:
    finetune = ("finetune", converted, *QUICK, "--out")
    refused(*finetune, converted, words=("exists",))
    refused(*finetune, "o", "--blocks-weight", "1", words=("--teacher MODEL",), code=2)
    refused(*finetune, "o", "--resume", words=("o.training", "no state"))
    refused("finetune", converted, "--data", "nothing", "--out", "o", words=("nothing", "fractals"))
    refused("finetune", converted, "--data", images, "--cpu", "--out", "o", words=("no folder of images for each class", "--teacher MODEL"))
