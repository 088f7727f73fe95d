"""What a run is made of: settings, losses, groups of parameters, teachers, and the data that are read to train on."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from flysurgery.checkpoint import build_base
from flysurgery.errors import BackendError, DataError, InferenceError, OptionError, TrainingError
from flysurgery.evaluation import preparation
from flysurgery.finetune import Settings, held_out_data, training_data
from flysurgery.finetune.data import read_pictures, unlabelled_files
from flysurgery.finetune.judge import Teacher
from flysurgery.finetune.run import accelerator_for
from flysurgery.finetune.step import logits_loss, parameter_groups
from flysurgery.inference import fuse, is_optimized
from tests.finetune.conftest import built

Make = Callable[..., nn.Module]


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


def test_scores_are_held_against_softened_ones() -> None:
    mine, theirs = torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 0.0]])
    p, q = (1 / (1 + math.exp(-difference / 2)) for difference in (2.0, -2.0))  # first class, teacher and student
    expected = 4 * (p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)))
    assert float(logits_loss(mine, theirs, 2.0)) == pytest.approx(expected, rel=1e-5)
    assert float(logits_loss(theirs, theirs, 2.0)) == 0


def test_factors_learn_by_their_fan_in_and_vectors_do_not_decay(converted: Make) -> None:
    model = converted()
    groups = parameter_groups(model, Settings(weight_decay=0.1))
    found = {id(parameter): (group["lr_scale"], group["weight_decay"]) for group in groups for parameter in group["params"]}
    assert len(found) == len(list(model.parameters()))
    layer = model.get_submodule("blocks.0.mlp.fc2")  # 32x128 Monarch of 4 blocks: (1,8,8,4),(4,8,32,1)
    assert [found[id(factor)] for factor in layer.factors] == [(128 / 8, 0.1), (128 / 32, 0.1)]
    assert found[id(layer.bias)] == (1.0, 0.0) and found[id(model.get_parameter("pos_embed"))] == (1.0, 0.0)
    assert found[id(model.get_parameter("head.weight"))] == (1.0, 0.1)
    assert {group["lr_scale"] for group in parameter_groups(model, Settings(factor_rate="same"))} == {1.0}


def test_a_teacher_gives_its_outputs_and_draws_each_block_and_is_left_as_it_was(converted: Make, dense: nn.Module) -> None:
    dense.train()
    student, images = converted(), torch.randn(2, 1, 8, 8)
    with Teacher(dense, student, Settings()) as teacher:
        assert [(cut.fqn, cut.kind) for cut in teacher.cuts][1:] == [("blocks.0", "block"), ("blocks.1", "block"), ("norm", "tokens")]
        with teacher.pull(student) as pull:
            scores = teacher(images)
            (0 * student(images).sum()).backward()
            assert float(pull.error()) > 0
        assert not scores.requires_grad and torch.equal(scores, dense(images))
    assert student.get_parameter("blocks.0.mlp.fc1.factors.0").grad.norm() > 0
    assert student.get_parameter("pos_embed").grad.norm() == 0, "what comes before the first block is the teacher's own"
    assert dense.training and not dense.get_submodule("blocks.0")._forward_hooks and all(p.requires_grad for p in dense.parameters())
    nn.init.zeros_(student.get_parameter("pos_embed"))
    assert [cut.kind for cut in Teacher(dense, student, Settings()).cuts] == ["block", "block", "block", "tokens"], "now it learns"


@pytest.mark.parametrize(
    ("changes", "weight", "error", "words"),
    [
        ({"in_chans": 3}, None, DataError, "1x8x8 and the one it is held against of 3x8x8"),
        ({"embed_dim": 64}, None, TrainingError, r"\(batch, 5, 32\) in the model and \(batch, 5, 64\) in the teacher.*--blocks-weight 0"),
        ({"depth": 1}, 1.0, TrainingError, "not those of the model by their names; give --blocks-weight 0"),
        ({"depth": 1}, None, None, ""),
        ({"embed_dim": 64}, 0, None, ""),
    ],
)
def test_teachers_that_do_not_match_or_give_their_outputs_alone(converted: Make, changes: Any, weight: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words) if error else nullcontext():
        teacher = Teacher(built(**changes), converted(), Settings(blocks_weight=weight))
        assert teacher.cuts == () and teacher.pull(converted()) is None


@pytest.mark.gpu
def test_on_a_gpu_the_teacher_runs_fused_and_gives_the_same() -> None:
    dense = built(img_size=32, embed_dim=384, num_heads=6).cuda()
    student, images = copy.deepcopy(dense), torch.randn(64, 1, 32, 32, device="cuda")
    exact, fused = Teacher(dense, student, Settings()), Teacher(dense, student, Settings(), torch.bfloat16)
    assert fused._fast is not None and is_optimized(fused._fast) and not is_optimized(dense)
    with torch.autocast("cuda", torch.bfloat16):
        outputs = [teacher(images).float() for teacher in (exact, fused)]
    pairs = [(outputs[1], outputs[0]), *((fused._stream.values[number], each) for number, each in exact._stream.values.items())]
    for given, wanted in pairs:
        assert (given.float() - wanted.float()).norm() < 0.02 * wanted.float().norm()


@pytest.mark.parametrize(
    "error", [torch.cuda.OutOfMemoryError("CUDA out of memory"), InferenceError("optimized already"), BackendError("does not compile")]
)
def test_a_model_that_cannot_be_fused_trains_as_it_is(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **more: object) -> None:
        raise error

    monkeypatch.setitem(fuse.__globals__, "optimize", fail)
    assert fuse(nn.Linear(2, 2), training="captured") == []


@pytest.mark.parametrize(
    ("changes", "completion", "words"),
    [
        ({"epochs": 0}, {}, "epochs must be a whole number of at least 1"),
        *(({"learning_rate": rate}, {}, "learning_rate must be a positive number") for rate in ("fast", float("nan"))),
        ({"seed": -1}, {}, "seed must be a whole number from 0"),
        ({"warm_up": 1.5}, {}, "warm_up must be between 0 and 1"),
        ({"mixup": 0.2, "batch_size": 7}, {}, "batch_size must be even"),
        *(({"epochs": n, "densify_after": n}, {}, words) for n, words in ((3, "must be from 1 to 2"), (1, "be left out where"))),
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


def test_settings_that_are_left_open_and_runs_long_enough_for_fused_modules() -> None:
    taught = Settings().completed(teacher=True, labelled=False)
    assert (taught.optimizer, taught.minutes, taught.epochs, taught.learning_rate) == ("muon", 10, None, None)
    shared = Settings().completed(teacher=True, sharded=True)
    assert (shared.optimizer, shared.minutes, shared.epochs, shared.learning_rate) == ("adamw", None, 10, 3e-4)
    assert Settings(densify_after=1).completed(teacher=True, labelled=False).optimizer == "adamw"
    pays = [Settings(**given).pays_fusing(10_000) for given in ({"minutes": 1.9}, {"minutes": 2}, {}, {"epochs": 25})]
    assert pays == [False, True, False, True]


def place(process: int = 0, processes: int = 1) -> SimpleNamespace:
    """What data are told of one of the processes that train together."""
    return SimpleNamespace(device=torch.device("cpu"), process_index=process, num_processes=processes)


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
    batches = data.open(place())
    assert (data.samples, data.num_classes, batches.count) == (24, 2, 3)
    for images, classes in batches.epoch(0, 0):
        assert images.shape == (8, 1, 8, 8)
        assert torch.equal(images.mean((1, 2, 3)) > 0, classes == 1), "in the order of the names '10' comes before '9'"
    held_out = held_out_data(name, two, root=root)
    assert held_out.samples == 4
    assert all((image.mean() > 0) == (target == 1) for image, target in (held_out.dataset[i] for i in range(4)))


def test_an_epoch_begun_in_its_middle_has_the_same_batches_and_another_others(pictures: Path, photographs: Path, two: nn.Module) -> None:
    settings = Settings(batch_size=4, workers=0, images_per_epoch=20)
    labelled = [training_data(name, two, settings) for name in (str(pictures), "fractals")]
    data = training_data(photographs, built(num_classes=0), Settings(batch_size=8), teacher=True)
    assert not data.labelled and data.samples == 36
    for batches in (each.open(place()) for each in (*labelled, data)):
        whole, rest = list(batches.epoch(1, 0)), list(batches.epoch(1, 2))
        assert len(rest) == len(whole) - 2 == batches.count - 2
        assert all(torch.equal(a, b) and torch.equal(c, d) for (a, c), (b, d) in zip(whole[2:], rest, strict=True))
        assert not torch.equal(whole[0][0], next(iter(batches.epoch(2, 0)))[0])
    shares = [data.open(place(process, 2)) for process in (0, 1)]
    assert [share.count for share in shares] == [2, 2]
    assert not torch.equal(*(next(share.epoch(0, 0))[0] for share in shares)), "processes have views of their own"
    batches = training_data(photographs, built(num_classes=0), Settings(erase=0.5, workers=0), teacher=True).open(place())
    assert batches.size == 36, "timm's loader erases, whose default batch is lowered"
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
    batches = training_data(str(pictures), two, Settings(batch_size=4, workers=0)).open(place())
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
