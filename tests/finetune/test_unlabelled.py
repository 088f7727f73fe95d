"""Folders of images without labels, and models without a head: what is read, what a run learns from it, and what is refused."""

from __future__ import annotations

import copy
import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from flysurgery.checkpoint import build_base
from flysurgery.errors import DataError, TrainingError
from flysurgery.evaluation import preparation
from flysurgery.fidelity import Copied
from flysurgery.finetune import Settings, held_out_data, judging_data, train, training_data
from flysurgery.finetune.batches import LoadedBatches, Process, ViewedBatches
from flysurgery.finetune.pictures import read_pictures, unlabelled_files
from flysurgery.inference import convert
from tests.finetune.conftest import ARGUMENTS, BASE
from tests.finetune.test_run import StoppedError, rows, states, stop_at

Make = Callable[[], nn.Module]
HERE = Process(torch.device("cpu"), 0, 1)
HEADLESS = ARGUMENTS | {"num_classes": 0}
QUICK = Settings(epochs=8, batch_size=16, log_every=1, cpu=True, workers=0)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 pictures of different sizes, some of them a folder deeper."""
    folder = tmp_path_factory.mktemp("photographs")
    (folder / "deep" / "er").mkdir(parents=True)
    drawn = np.random.default_rng(0)
    for number in range(40):
        pixels = Image.fromarray(drawn.integers(0, 255, (3, 4), dtype=np.uint8))
        pixels.resize((20 + number % 7, 18), Image.Resampling.BICUBIC).save(folder / ("deep/er" if number % 3 else "") / f"{number:02}.png")
    return folder


@pytest.fixture(scope="module")
def features() -> tuple[nn.Module, nn.Module]:
    """A model without a head, dense and converted; to be copied."""
    torch.manual_seed(0)
    dense = build_base(BASE, HEADLESS).eval()
    converted = copy.deepcopy(dense)
    convert(converted, base=BASE, base_args=HEADLESS)
    return dense, converted


def test_a_tenth_is_held_out_where_the_folder_holds_none_out(photographs: Path, tmp_path: Path) -> None:
    paths, held_out = unlabelled_files(photographs)
    assert len(paths) == 36 and len(held_out) == 4 and not {*paths} & {*held_out}
    assert held_out[0] == sorted(photographs.rglob("*.png"))[0]
    assert unlabelled_files(photographs, aside=False)[0] == sorted(photographs.rglob("*.png"))
    for name in ("train/a.png", "val/b.png", "c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("L", (8, 8)).save(tmp_path / name)
    assert unlabelled_files(tmp_path) == ([tmp_path / "train/a.png"], [tmp_path / "val/b.png"])
    with pytest.raises(DataError, match="has one image"):
        unlabelled_files(tmp_path / "train")


def test_pictures_are_read_once_and_what_cannot_be_read_is_left_out(
    photographs: Path, features: tuple[nn.Module, nn.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = preparation(features[0])
    paths = sorted(photographs.rglob("*.png"))
    Image.new("L", (400, 100), 7).save(tmp_path / "long.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    found = read_pictures([*paths, tmp_path / "long.png", tmp_path / "broken.png"], wanted)
    assert found is not None and found.canvas.shape[:2] == (41, 1) and "broken.png" in caplog.text
    assert found.sizes[-1].tolist() == [16, 24], "twice the model's input, and at most half as long again"
    assert (found.canvas[-1, :, :16, :24] == 7).all()
    assert read_pictures(paths, wanted, most=40 * 16 * 16) is None
    with pytest.raises(DataError, match="all 1 images are of one colour"):
        read_pictures([tmp_path / "long.png"], wanted)
    with pytest.raises(DataError, match="none of the 1 images can be read"):
        read_pictures([tmp_path / "broken.png"], wanted)


def test_views_are_the_same_when_an_epoch_is_begun_in_its_middle_and_others_in_another_process(
    photographs: Path, features: tuple[nn.Module, nn.Module]
) -> None:
    data = training_data(photographs, features[0], Settings(batch_size=8), teacher=True)
    assert not data.labelled and data.samples == 36
    batches = data.open(HERE)
    assert isinstance(batches, ViewedBatches) and len(batches) == 4
    whole, rest = list(batches.epoch(1, 0)), list(batches.epoch(1, 2))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(whole[2:], rest, strict=True)) and len(rest) == 2
    assert whole[0][0].shape == (8, 1, 8, 8) and not torch.equal(whole[0][0], next(batches.epoch(2, 0))[0])
    shares = [data.open(Process(HERE.device, process, 2)) for process in (0, 1)]
    assert [len(share) for share in shares] == [2, 2]
    assert not torch.equal(*(next(share.epoch(0, 0))[0] for share in shares))


def test_a_folder_is_labelled_where_it_has_a_folder_for_each_class(photographs: Path) -> None:
    arguments = {"image_size": 16, "patch_size": 8, "dim": 32, "depth": 1, "heads": 2, "mlp_dim": 64}  # says not how many classes it has
    for classes in (1, 2):
        model = build_base("vit_pytorch:ViT", arguments | {"num_classes": classes})
        data = training_data(photographs, model, Settings(), teacher=True)
        assert data.labelled is (classes == 1), "the pictures lie in one folder and beside it"


def test_what_views_cannot_do_the_loader_does(photographs: Path, features: tuple[nn.Module, nn.Module]) -> None:
    batches = training_data(photographs, features[0], Settings(erase=0.5, workers=0), teacher=True).open(HERE)
    assert isinstance(batches, LoadedBatches) and batches.size == 36
    assert next(batches.epoch(0, 0))[0].shape == (36, 1, 8, 8)


@pytest.mark.parametrize("classes", [0, 10])
def test_it_comes_closer_to_the_teacher_without_labels(photographs: Path, classes: int, converted: Make, dense: nn.Module) -> None:
    teacher, model = dense, converted()
    if not classes:
        teacher = build_base(BASE, HEADLESS).eval()
        model = copy.deepcopy(teacher)
        convert(model, base=BASE, base_args=HEADLESS)
    data = training_data(photographs, model, QUICK, teacher=True)
    outcome = train(model, data, QUICK, teacher=teacher, held_out=held_out_data(photographs, model, teacher=True))
    assert outcome.fidelity_before is not None and outcome.fidelity_after is not None and outcome.before is None
    assert outcome.fidelity_after.relative_error < 0.9 * outcome.fidelity_before.relative_error
    assert outcome.settings.optimizer == "muon" and outcome.kept > 0
    written = json.loads(json.dumps(outcome.to_json(), allow_nan=False))
    assert written["fidelity_after"]["samples"] == 4 and written["labelled"] is False


def test_a_run_that_only_gets_worse_gives_the_start_back(photographs: Path, features: tuple[nn.Module, nn.Module]) -> None:
    model = copy.deepcopy(features[1])
    settings = replace(QUICK, epochs=2, learning_rate=3.0)
    data, held_out = training_data(photographs, model, settings, teacher=True), held_out_data(photographs, model, teacher=True)
    outcome = train(model, data, settings, teacher=features[0], held_out=held_out)
    assert outcome.kept == 0 and outcome.fidelity_after == outcome.fidelity_before
    for one, other in zip(model.parameters(), features[1].parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("optimizer", [None, "adamw"])
def test_a_stopped_run_with_a_budget_goes_on_as_it_would_have(
    photographs: Path, features: tuple[nn.Module, nn.Module], tmp_path: Path, optimizer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(QUICK, epochs=None, minutes=0.5, optimizer=optimizer, save_every=3)
    data = training_data(photographs, features[1], settings, teacher=True)
    held_out = held_out_data(photographs, features[1], teacher=True)

    def go(folder: str, **more: object) -> nn.Module:
        model = copy.deepcopy(features[1])
        return train(model, data, settings, teacher=features[0], held_out=held_out, folder=tmp_path / folder, **more).model  # pyright: ignore

    monkeypatch.setattr("flysurgery.finetune.loop.affordable", lambda *_: 11)
    whole = go("whole")
    with pytest.raises(StoppedError):
        go("parts", progress=stop_at(8))
    assert states(tmp_path / "parts") == ["state-00000006"]
    monkeypatch.setattr("flysurgery.finetune.loop.affordable", lambda *_: 99)
    parts = go("parts", resume=True)
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole") and rows(tmp_path / "whole")[-1]["update"] == "11"
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_budget_sets_the_number_of_updates(photographs: Path, features: tuple[nn.Module, nn.Module]) -> None:
    model = copy.deepcopy(features[1])
    settings = replace(QUICK, epochs=None, minutes=0.1)
    outcome = train(model, training_data(photographs, model, settings, teacher=True), settings, teacher=features[0])
    assert outcome.updates > 1 and outcome.seconds < 20


def test_a_full_disk_ends_the_run_and_leaves_the_last_state(
    photographs: Path, features: tuple[nn.Module, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, settings = copy.deepcopy(features[1]), replace(QUICK, save_every=2)
    save, calls = Copied.save, []

    def full(self: Copied, file: Path) -> None:
        calls.append(file)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, file)

    monkeypatch.setattr(Copied, "save", full)
    data, held_out = training_data(photographs, model, settings, teacher=True), held_out_data(photographs, model, teacher=True)
    with pytest.raises(TrainingError, match=r"of update 4 cannot be written.*No space left.*the last complete state, of update 2, is kept"):
        train(model, data, settings, teacher=features[0], held_out=held_out, folder=tmp_path)
    assert states(tmp_path) == ["state-00000002"]


def test_what_is_refused(photographs: Path, features: tuple[nn.Module, nn.Module], dense: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no head.*--teacher MODEL"):
        training_data(photographs, features[0], QUICK)
    with pytest.raises(DataError, match=r"holds no folder of images for each class.*--teacher MODEL"):
        training_data(photographs / "deep" / "er", dense, QUICK)
    with pytest.raises(DataError, match="36 images for training, fewer than one batch of 50"):
        training_data(photographs, features[0], Settings(batch_size=50), teacher=True)
    with pytest.raises(DataError, match="there are no images in"):
        training_data(tmp_path, features[0], QUICK, teacher=True)
    data = training_data(photographs, features[0], QUICK, teacher=True)
    with pytest.raises(TrainingError, match=r"without labels.*give a teacher"):
        train(features[0], data, QUICK)
    spoilt = copy.deepcopy(features[0])
    with torch.no_grad():
        spoilt.get_parameter("norm.weight").fill_(float("nan"))
    with pytest.raises(DataError, match="no finite numbers before the first update"):
        train(copy.deepcopy(features[1]), data, QUICK, teacher=spoilt, held_out=judging_data(photographs, features[0], teacher=True))
