"""The pieces of a run: settings, losses, groups of parameters, teachers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flysurgery.errors import DataError, OptionError, TrainingError
from flysurgery.finetune import Settings
from flysurgery.finetune.devices import accelerator_for
from flysurgery.finetune.step import features_loss, logits_loss, parameter_groups
from flysurgery.finetune.teacher import Teacher
from flysurgery.surgery import is_optimized
from tests.finetune.conftest import built

Make = Callable[..., nn.Module]


def test_what_accelerate_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 on CUDA where nobody says otherwise; and weights are not sent to processes that have them."""
    taken, plugin = [], SimpleNamespace(cpu_ram_efficient_loading=True)
    fake = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    monkeypatch.setattr("accelerate.Accelerator", lambda **given: taken.append(given["mixed_precision"]) or fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    for settings, quick in ((Settings(), True), (Settings(), False), (Settings(precision="no"), True), (Settings(cpu=True), True)):
        accelerator_for(settings, None, quick=quick)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    accelerator_for(Settings(), None, quick=True)
    assert taken == ["bf16", None, "no", None, None] and plugin.cpu_ram_efficient_loading is False


def test_losses() -> None:
    mine, theirs = torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 0.0]])
    p, q = (1 / (1 + math.exp(-difference / 2)) for difference in (2.0, -2.0))  # first class, teacher and student
    expected = 4 * (p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)))
    assert float(logits_loss(mine, theirs, 2.0)) == pytest.approx(expected, rel=1e-5)
    assert float(logits_loss(theirs, theirs, 2.0)) == 0
    wanted = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])  # around a mean of zero, with a squared distance of 2
    assert float(features_loss(wanted + torch.tensor([0.0, 1.0]), wanted)) == pytest.approx(2 / 2)


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
    teacher = Teacher(dense, student, Settings())
    assert [(cut.fqn, cut.kind) for cut in teacher.cuts][1:] == [("blocks.0", "block"), ("blocks.1", "block"), ("norm", "tokens")]
    with teacher.pull(student) as pull:
        scores = teacher(images)
        (0 * student(images).sum()).backward()
        assert float(pull.error()) > 0
    assert not scores.requires_grad and torch.equal(scores, dense(images))
    gradients = {name: parameter.grad for name, parameter in student.named_parameters()}
    assert gradients["blocks.0.mlp.fc1.factors.0"].norm() > 0
    assert gradients["pos_embed"].norm() == 0, "what comes before the first block is the teacher's own"
    teacher.close()
    assert dense.training and not dense.get_submodule("blocks.0")._forward_hooks and all(p.requires_grad for p in dense.parameters())
    with torch.no_grad():
        student.get_parameter("pos_embed").add_(1)
    assert [cut.kind for cut in Teacher(dense, student, Settings()).cuts] == ["block", "block", "block", "tokens"], "now it learns"


def test_a_teacher_that_does_not_match_or_gives_its_outputs_alone(converted: Make) -> None:
    for changes, weight, error, words in (
        ({"in_chans": 3}, None, DataError, "1x8x8 and the one it is held against of 3x8x8"),
        ({"embed_dim": 64}, None, TrainingError, r"\(batch, 5, 32\) in the model and \(batch, 5, 64\) in the teacher.*--blocks-weight 0"),
        ({"depth": 1}, 1.0, TrainingError, "not those of the model by their names; give --blocks-weight 0"),
    ):
        with pytest.raises(error, match=words):
            Teacher(built(**changes), converted(), Settings(blocks_weight=weight))
    teacher = Teacher(built(depth=1), converted(), Settings())
    assert teacher.cuts == () and teacher.pull(converted()) is None
    assert Teacher(built(embed_dim=64), converted(), Settings(blocks_weight=0)).cuts == ()


@pytest.mark.parametrize(
    ("changes", "completion", "words"),
    [
        ({"epochs": 0}, {}, "epochs must be at least 1"),
        ({"learning_rate": float("nan")}, {}, "learning_rate must be a positive number"),
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


def test_settings_that_are_left_open_and_runs_long_enough_for_fused_modules() -> None:
    taught = Settings().completed(teacher=True, labelled=False)
    assert (taught.optimizer, taught.minutes, taught.epochs, taught.learning_rate) == ("muon", 10, None, None)
    shared = Settings().completed(teacher=True, sharded=True)
    assert (shared.optimizer, shared.minutes, shared.epochs, shared.learning_rate) == ("adamw", None, 10, 3e-4)
    assert Settings(densify_after=1).completed(teacher=True, labelled=False).optimizer == "adamw"
    pays = [Settings(**given).pays_fusing(10_000) for given in ({"minutes": 9.9}, {"minutes": 10}, {}, {"epochs": 200})]
    assert pays == [False, True, False, True]


@pytest.mark.gpu
def test_on_a_gpu_the_teacher_runs_fused_and_gives_the_same() -> None:
    changes = {"img_size": 32, "embed_dim": 384, "num_heads": 6}
    dense = built(**changes).cuda()
    student, images = copy.deepcopy(dense), torch.randn(64, 1, 32, 32, device="cuda")
    exact, fused = Teacher(dense, student, Settings()), Teacher(dense, student, Settings(), torch.bfloat16)
    assert fused._fast is not None and is_optimized(fused._fast) and not is_optimized(dense)
    with torch.autocast("cuda", torch.bfloat16):
        outputs = [teacher(images).float() for teacher in (exact, fused)]
    pairs = [(outputs[1], outputs[0]), *((fused._stream.values[number], each) for number, each in exact._stream.values.items())]
    for given, wanted in pairs:
        assert (given.float() - wanted.float()).norm() < 0.02 * wanted.float().norm()
