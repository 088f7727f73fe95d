"""What is read to train on: labelled folders and sets, folders without labels, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from flysurgery.checkpoint import build_base
from flysurgery.errors import DataError
from flysurgery.evaluation import preparation
from flysurgery.finetune import Settings, held_out_data, training_data
from flysurgery.finetune.batches import Batches, Process
from flysurgery.finetune.data import read_pictures, unlabelled_files
from tests.finetune.conftest import built

HERE = Process(torch.device("cpu"), 0, 1)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of 12 pictures each, black and white, with 2 of each held out."""
    folder = tmp_path_factory.mktemp("pictures")
    for part, count in (("train", 12), ("val", 2)):
        for name, grey in (("10", 0), ("9", 255)):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                Image.new("L", (20, 16), grey).save(folder / part / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def two() -> nn.Module:
    return built(num_classes=2)


@pytest.mark.parametrize("named", [False, True])
def test_folders_and_named_sets_number_classes_as_the_evaluation_does(pictures: Path, two: nn.Module, named: bool) -> None:
    name, root = ("torch/image_folder", pictures) if named else (str(pictures), None)
    data = training_data(name, two, Settings(batch_size=8, workers=0), root=root)
    batches = data.open(HERE)
    assert (data.samples, data.num_classes, batches.count) == (24, 2, 3)
    for images, classes in batches.epoch(0, 0):
        assert images.shape == (8, 1, 8, 8)
        assert torch.equal(images.mean((1, 2, 3)) > 0, classes == 1), "in the order of the names '10' comes before '9'"
    held_out = held_out_data(name, two, root=root)
    assert held_out.samples == 4
    assert all((image.mean() > 0) == (target == 1) for image, target in (held_out.dataset[i] for i in range(4)))


def check_resumable(batches: Batches) -> None:
    """An epoch begun in its middle has the same batches, and another epoch has others."""
    whole, rest = list(batches.epoch(1, 0)), list(batches.epoch(1, 2))
    assert len(rest) == len(whole) - 2 == batches.count - 2
    assert all(torch.equal(a, b) and torch.equal(c, d) for (a, c), (b, d) in zip(whole[2:], rest, strict=True))
    assert not torch.equal(whole[0][0], next(iter(batches.epoch(2, 0)))[0])


def test_an_epoch_begun_in_its_middle_has_the_same_batches(pictures: Path, photographs: Path, two: nn.Module) -> None:
    for name in (str(pictures), "fractals"):
        check_resumable(training_data(name, two, Settings(batch_size=4, workers=0, images_per_epoch=20)).open(HERE))
    data = training_data(photographs, built(num_classes=0), Settings(batch_size=8), teacher=True)
    batches = data.open(HERE)
    assert not data.labelled and data.samples == 36 and batches.count == 4 and "viewed" in batches.epoch.__qualname__
    check_resumable(batches)
    shares = [data.open(Process(HERE.device, process, 2)) for process in (0, 1)]
    assert [share.count for share in shares] == [2, 2]
    assert not torch.equal(*(next(share.epoch(0, 0))[0] for share in shares)), "processes have views of their own"
    batches = training_data(photographs, built(num_classes=0), Settings(erase=0.5, workers=0), teacher=True).open(HERE)
    assert "loaded" in batches.epoch.__qualname__ and batches.size == 36, "views cannot erase, and the default batch is lowered"
    assert next(batches.epoch(0, 0))[0].shape == (36, 1, 8, 8)


def test_a_tenth_is_held_out_where_the_folder_holds_none_out(photographs: Path, tmp_path: Path) -> None:
    every = sorted(photographs.rglob("*.png"))
    assert unlabelled_files(photographs) == ([path for path in every if path not in every[::10]], every[::10])
    assert unlabelled_files(photographs, aside=False)[0] == every
    for name in ("train/a.png", "val/b.png", "c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("L", (8, 8)).save(tmp_path / name)
    assert unlabelled_files(tmp_path) == ([tmp_path / "train/a.png"], [tmp_path / "val/b.png"])
    with pytest.raises(DataError, match="has one image"):
        unlabelled_files(tmp_path / "train")


def test_pictures_are_read_once_and_unreadable_ones_left_out(photographs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted, paths = preparation(built()), sorted(photographs.rglob("*.png"))
    Image.new("L", (400, 100), 7).save(tmp_path / "long.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    found = read_pictures([*paths, tmp_path / "long.png", tmp_path / "broken.png"], wanted)
    assert found.canvas.shape[:2] == (41, 1) and "broken.png" in caplog.text
    assert found.sizes[-1].tolist() == [16, 24], "twice the model's input, and at most half as long again"
    assert (found.canvas[-1, :, :16, :24] == 7).all()
    assert read_pictures(paths, wanted, most=40 * 16 * 16) is None
    for name, words in (("long.png", "all 1 images are of one colour"), ("broken.png", "none of the 1 images can be read")):
        with pytest.raises(DataError, match=words):
            read_pictures([tmp_path / name], wanted)


def test_a_folder_is_labelled_where_it_has_a_folder_for_each_class(
    photographs: Path, dense: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = {"image_size": 16, "patch_size": 8, "dim": 32, "depth": 1, "heads": 2, "mlp_dim": 64}  # says not how many classes it has
    for classes in (1, 2):
        model = build_base("vit_pytorch:ViT", arguments | {"num_classes": classes})
        assert training_data(photographs, model, Settings(), teacher=True).labelled is (classes == 1)
    caplog.clear()
    for number in range(10):
        (tmp_path / "train" / str(number)).mkdir(parents=True)
        Image.linear_gradient("L").resize((9, 8 + number)).save(tmp_path / "train" / str(number) / "a.png")
    assert training_data(tmp_path, dense, Settings(), teacher=True).labelled and not caplog.text
    (tmp_path / "train" / "10").mkdir()
    assert not training_data(tmp_path, dense, Settings(), teacher=True).labelled
    assert f"{tmp_path} has not one folder of images for each class of the model, so it is used without labels" in caplog.text


def test_the_next_image_is_taken_for_one_that_cannot_be_read(pictures: Path, two: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    broken, *others = sorted(pictures.rglob("*.png"))
    broken.write_bytes(b"no picture")
    batches = training_data(str(pictures), two, Settings(batch_size=4, workers=0)).open(HERE)
    assert sum(len(images) for images, _ in batches.epoch(0, 0)) == 24
    (message,) = caplog.messages
    assert f"{broken.name} cannot be read as an image" in message and message.endswith("; the next image is taken for it")
    for path in others:
        path.write_bytes(b"no picture")
    with pytest.raises(DataError, match="10 images in a row cannot be read"):
        list(batches.epoch(0, 0))


@pytest.mark.parametrize(
    ("name", "classes", "options", "words"),
    [
        ("nowhere", 10, {}, "no data set 'nowhere'"),
        ("torch/cifar10", 10, {}, "--data-root DIR"),
        ("pictures", 10, {}, "2 classes and the model tells 10"),
        ("pictures", 2, {"batch_size": 64}, "24 images for training, fewer than one batch of 64"),
        ("photographs", 0, {}, r"has no head.*--teacher MODEL"),
        ("photographs/deep/er", 10, {}, r"holds no folder of images for each class.*--teacher MODEL"),
        ("photographs", 0, {"batch_size": 50, "teacher": True}, "36 images for training, fewer than one batch of 50"),
        ("empty", 0, {"teacher": True}, "there are no images in"),
    ],
)
def test_data_that_are_not_there_or_do_not_fit(
    pictures: Path, photographs: Path, tmp_path: Path, name: str, classes: int, options: dict, words: str
) -> None:
    folders = {"pictures": pictures, "photographs": photographs, "photographs/deep/er": photographs / "deep" / "er", "empty": tmp_path}
    settings = Settings(batch_size=options.get("batch_size"))
    with pytest.raises(DataError, match=words):
        training_data(folders.get(name, name), built(num_classes=classes), settings, teacher=options.get("teacher", False))
