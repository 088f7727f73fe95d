"""The pieces of a run: settings, losses, groups, teachers, data."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import nn

from flysurgery.checkpoint import build_base
from flysurgery.errors import DataError, OptionError, TrainingError
from flysurgery.finetune import Settings, held_out_data, training_data
from flysurgery.finetune.batches import Process
from flysurgery.finetune.devices import accelerator_for
from flysurgery.finetune.step import features_loss, logits_loss, parameter_groups
from flysurgery.finetune.teacher import Teacher
from tests.finetune.conftest import ARGUMENTS, BASE

Make = Callable[[], nn.Module]
HERE = Process(torch.device("cpu"), 0, 1)


def test_weights_are_not_sent_to_processes_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = SimpleNamespace(cpu_ram_efficient_loading=True)
    monkeypatch.setattr("accelerate.Accelerator", lambda **_: SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)))
    accelerator_for(Settings(cpu=True), None)
    assert plugin.cpu_ram_efficient_loading is False


def test_bfloat16_is_taken_on_cuda_where_nobody_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr("accelerate.Accelerator", lambda **given: taken.append(given["mixed_precision"]) or SimpleNamespace(state=None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    for settings, quick in ((Settings(), True), (Settings(), False), (Settings(precision="no"), True), (Settings(cpu=True), True)):
        accelerator_for(settings, None, quick=quick)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    accelerator_for(Settings(), None, quick=True)
    assert taken == ["bf16", None, "no", None, None]


def test_logits_loss_is_the_divergence_of_softened_scores() -> None:
    mine, theirs = torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 0.0]])
    p, q = (1 / (1 + math.exp(-difference / 2)) for difference in (2.0, -2.0))  # first class, teacher and student
    expected = 4 * (p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)))
    assert float(logits_loss(mine, theirs, 2.0)) == pytest.approx(expected, rel=1e-5)
    assert float(logits_loss(theirs, theirs, 2.0)) == 0


def test_features_loss_is_relative_to_how_the_teacher_s_differ() -> None:
    wanted = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])  # around a mean of zero, with a squared distance of 2
    assert float(features_loss(wanted + torch.tensor([0.0, 1.0]), wanted)) == pytest.approx(2 / 2)


def test_factors_learn_by_their_fan_in_and_vectors_do_not_decay(converted: Make) -> None:
    model = converted()
    groups = parameter_groups(model, Settings(weight_decay=0.1))
    found = {id(parameter): (group["lr_scale"], group["weight_decay"]) for group in groups for parameter in group["params"]}
    assert len(found) == len(list(model.parameters()))
    layer = model.get_submodule("blocks.0.mlp.fc2")  # 32x128 Monarch of 4 blocks: (1,8,8,4),(4,8,32,1)
    assert [found[id(factor)] for factor in layer.factors] == [(128 / 8, 0.1), (128 / 32, 0.1)]  # pyright: ignore
    assert found[id(layer.bias)] == (1.0, 0.0) and found[id(model.get_parameter("pos_embed"))] == (1.0, 0.0)
    assert found[id(model.get_parameter("head.weight"))] == (1.0, 0.1)
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    CosineLRScheduler(optimizer, t_initial=10, t_in_epochs=False).step_update(0)
    assert {group["lr"] / group["lr_scale"] for group in optimizer.param_groups} == {1e-3}
    assert {group["lr_scale"] for group in parameter_groups(model, Settings(factor_rate="same"))} == {1.0}


def test_a_teacher_gives_its_outputs_and_draws_each_block_and_is_left_as_it_was(converted: Make, dense: nn.Module) -> None:
    dense.train()
    student = converted()
    teacher = Teacher(dense, student, Settings())
    assert [(cut.fqn, cut.kind) for cut in teacher.cuts][1:] == [("blocks.0", "block"), ("blocks.1", "block"), ("norm", "tokens")]
    images = torch.randn(2, 1, 8, 8)
    pull = teacher.pull(student)
    assert pull is not None
    with pull:
        scores = teacher(images)
        (0 * student(images).sum()).backward()
        assert float(pull.error()) > 0
    assert not scores.requires_grad and torch.equal(scores, dense(images))
    parameters = dict(student.named_parameters())
    assert float(parameters["blocks.0.mlp.fc1.factors.0"].grad.norm()) > 0  # pyright: ignore
    assert float(parameters["pos_embed"].grad.norm()) == 0, "what comes before the first block is the teacher's own"  # pyright: ignore
    teacher.close()
    assert dense.training and not dense.get_submodule("blocks.0")._forward_hooks and all(p.requires_grad for p in dense.parameters())


def test_what_comes_before_the_blocks_learns_where_it_is_another(converted: Make, dense: nn.Module) -> None:
    student = converted()
    with torch.no_grad():
        student.get_parameter("pos_embed").add_(1)
    assert [cut.kind for cut in Teacher(dense, student, Settings()).cuts] == ["block", "block", "block", "tokens"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_classes": 7}, "7 classes apart and the model 10"),
        ({"img_size": 16}, "1x16x16 and the model of 1x8x8"),
        ({"in_chans": 3}, "3x8x8 and the model of 1x8x8"),
        ({"embed_dim": 64}, r"\(batch, 5, 32\) in the model and \(batch, 5, 64\) in the teacher.*--blocks-weight 0"),
    ],
)
def test_a_teacher_that_does_not_match(converted: Make, changes: dict, words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        Teacher(build_base(BASE, ARGUMENTS | changes), converted(), Settings())


def test_a_teacher_without_the_blocks_gives_its_outputs_alone(converted: Make) -> None:
    shallow = build_base(BASE, ARGUMENTS | {"depth": 1})
    teacher = Teacher(shallow, converted(), Settings())
    assert teacher.cuts == () and teacher.pull(converted()) is None
    with pytest.raises(TrainingError, match="not those of the model by their names; give --blocks-weight 0"):
        Teacher(shallow, converted(), Settings(blocks_weight=1.0))
    wide = build_base(BASE, ARGUMENTS | {"embed_dim": 64})
    assert Teacher(wide, converted(), Settings(blocks_weight=0)).cuts == ()
    features, student = (build_base(BASE, ARGUMENTS | {"num_classes": 0, "embed_dim": width}) for width in (64, 32))
    with pytest.raises(TrainingError, match=r"the teacher returns \(batch, 64\) and the model \(batch, 32\)"):
        Teacher(features, student, Settings(blocks_weight=0))


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


@pytest.mark.parametrize("named", [False, True])
def test_folders_and_named_sets_number_classes_as_the_evaluation_does(pictures: Path, named: bool) -> None:
    model = build_base(BASE, ARGUMENTS | {"num_classes": 2})
    name, root = ("torch/image_folder", pictures) if named else (str(pictures), None)
    settings = Settings(batch_size=8, workers=0)
    data = training_data(name, model, settings, root=root)
    assert (data.samples, data.num_classes) == (24, 2)
    batches = data.open(HERE)
    assert len(batches) == 3
    for images, classes in batches.epoch(0, 0):
        assert images.shape == (8, 1, 8, 8)
        assert torch.equal(images.mean((1, 2, 3)) > 0, classes == 1), "in the order of the names '10' comes before '9'"
    held_out = held_out_data(name, model, root=root)
    assert held_out is not None and held_out.samples == 4
    assert all((image.mean() > 0) == (target == 1) for image, target in (held_out.dataset[i] for i in range(4)))


def test_an_epoch_begun_in_its_middle_has_the_same_batches(pictures: Path) -> None:
    model = build_base(BASE, ARGUMENTS | {"num_classes": 2})
    for name in (str(pictures), "fractals"):
        batches = training_data(name, model, Settings(batch_size=4, workers=0, images_per_epoch=20)).open(HERE)
        whole, rest = list(batches.epoch(1, 0)), list(batches.epoch(1, 2))
        assert len(rest) == len(whole) - 2
        assert all(torch.equal(a, b) and torch.equal(c, d) for (a, c), (b, d) in zip(whole[2:], rest, strict=True))
        assert not torch.equal(whole[0][0], next(iter(batches.epoch(2, 0)))[0]), "another epoch is another order"


def test_data_that_are_not_there_or_do_not_fit(pictures: Path, dense: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data set 'nowhere'"):
        training_data("nowhere", dense, Settings())
    with pytest.raises(DataError, match="--data-root DIR"):
        training_data("torch/cifar10", dense, Settings())
    with pytest.raises(DataError, match="2 classes and the model tells 10"):
        training_data(str(pictures), dense, Settings())
    two = build_base(BASE, ARGUMENTS | {"num_classes": 2})
    with pytest.raises(DataError, match="24 images for training, fewer than one batch of 64"):
        training_data(str(pictures), two, Settings(batch_size=64))
    assert training_data(str(pictures), two, Settings()).open(HERE).size == 24, "a batch that was not asked for is lowered"


def test_the_next_image_is_taken_for_one_that_cannot_be_read(pictures: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, settings = build_base(BASE, ARGUMENTS | {"num_classes": 2}), Settings(batch_size=4, workers=0)
    broken, *others = sorted(pictures.rglob("*.png"))
    broken.write_bytes(b"no picture")
    batches = training_data(str(pictures), model, settings).open(HERE)
    assert sum(len(images) for images, _ in batches.epoch(0, 0)) == 24
    (message,) = caplog.messages
    assert f"{broken.name} cannot be read as an image" in message and message.endswith("; the next image is taken for it")
    for path in others:
        path.write_bytes(b"no picture")
    with pytest.raises(DataError, match="10 images in a row cannot be read"):
        list(batches.epoch(0, 0))


def test_classes_that_are_not_the_models_are_named_at_the_start(dense: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(10):
        (tmp_path / "train" / str(number)).mkdir(parents=True)
        Image.linear_gradient("L").resize((9, 8 + number)).save(tmp_path / "train" / str(number) / "a.png")
    assert training_data(tmp_path, dense, Settings(), teacher=True).labelled and not caplog.text
    (tmp_path / "train" / "10").mkdir()
    assert not training_data(tmp_path, dense, Settings(), teacher=True).labelled
    assert f"{tmp_path} has not one folder of images for each class of the model, so it is used without labels" in caplog.text


@pytest.mark.parametrize(
    ("changes", "completion", "words"),
    [
        ({"epochs": 0}, {}, "epochs must be at least 1"),
        ({"learning_rate": float("nan")}, {}, "learning_rate must be a positive number"),
        ({"minutes": 0}, {}, "minutes must be a positive number, got 0"),
        ({"warm_up": 1.5}, {}, "warm_up must be between 0 and 1"),
        ({"mixup": 0.2, "batch_size": 7}, {}, "batch_size must be even"),
        ({"epochs": 3, "densify_after": 3}, {}, "densify_after must be from 1 to 2"),
        ({"epochs": 1, "densify_after": 1}, {}, "densify_after must be left out where there is one epoch, got 1"),
        ({"minutes": 1, "epochs": 1}, {}, "epochs and minutes"),
        ({"minutes": 1, "densify_after": 1}, {}, "densify_after counts epochs"),
        ({"optimizer": "muon"}, {}, "there is none; give a teacher or a learning rate"),
        ({"weight_decay": 0.1}, {"teacher": True}, "muon has no weight_decay"),
        ({"optimizer": "muon"}, {"teacher": True, "sharded": True}, "muon cannot be used with weights shared out"),
        ({"output_weight": 1.5}, {"teacher": True}, "at most 1, got 1.5"),
    ],
)
def test_settings_that_are_out_of_range_or_do_not_go_together(changes: dict, completion: dict, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Settings(**changes).completed(**completion)


def test_settings_that_are_left_open() -> None:
    taught = Settings().completed(teacher=True, labelled=False)
    assert (taught.optimizer, taught.minutes, taught.epochs, taught.learning_rate) == ("muon", 10, None, None)
    shared = Settings().completed(teacher=True, sharded=True)
    assert (shared.optimizer, shared.minutes, shared.epochs, shared.learning_rate) == ("adamw", None, 10, 3e-4)
    assert Settings(densify_after=1).completed(teacher=True, labelled=False).optimizer == "adamw"
