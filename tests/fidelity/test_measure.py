"""Fidelity with known answers: what is compared, what is left out, and errors block by block against those computed by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn
from vit_pytorch import ViT

from flysurgery.errors import DataError
from flysurgery.fidelity import Fidelity, measure_fidelity
from flysurgery.walker import Cut, find_cuts, survey

TURN = torch.tensor([[math.cos(math.pi / 3), -math.sin(math.pi / 3)], [math.sin(math.pi / 3), math.cos(math.pi / 3)]])
TOKENS = (Cut("tokens", "output", (2, 3, 4), "tokens"),)


class Toy(nn.Module):
    """Multiplies by a matrix, then adds an offset to each token."""

    def __init__(self, matrix: Tensor, offset: Tensor | float = 0.0, num_classes: int = 0, num_prefix_tokens: int = 0) -> None:
        super().__init__()
        self.matrix, self.num_classes, self.num_prefix_tokens = nn.Parameter(matrix), num_classes, num_prefix_tokens
        self.tokens = nn.Module()
        self.tokens.forward = lambda x: x + offset  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens(x @ self.matrix)


def timm_vit(**changes: object) -> nn.Module:
    torch.manual_seed(0)
    arguments = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 7, **changes}
    return timm.create_model("vit_tiny_patch16_224", **arguments).eval()


def pytorch_vit() -> nn.Module:
    torch.manual_seed(0)
    return ViT(image_size=16, patch_size=8, num_classes=7, dim=32, depth=2, heads=2, mlp_dim=64, dim_head=16).eval()


def timm_stream(model: nn.Module, x: Tensor) -> list[Tensor]:
    first = model.blocks[0](model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x)))))
    return [first, model.blocks[1](first)]


def pytorch_stream(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = model.to_patch_embedding(x)
    x = torch.cat([model.cls_token.expand(len(x), 1, -1), x], dim=1) + model.pos_embedding
    found = []
    for attention, feed_forward in model.transformer.layers:
        x = attention(x) + x
        x = feed_forward(x) + x
        found.append(x)
    return found


def images(samples: int = 6) -> Tensor:
    return torch.randn(samples, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def measured(student: nn.Module, teacher: nn.Module, inputs: Tensor, batch: int = 4) -> Fidelity:
    return measure_fidelity(student, teacher, inputs.split(batch), find_cuts(survey(teacher)))


@pytest.mark.parametrize(
    ("build", "stream", "changed", "names"),
    [
        (timm_vit, timm_stream, "blocks.0.mlp.fc1.weight", ["blocks.0", "blocks.1"]),
        (pytorch_vit, pytorch_stream, "transformer.layers.0.1.net.1.weight", ["transformer.layers.1.0", "transformer.norm"]),
    ],
)
def test_block_errors_are_those_of_the_stream_and_none_of_a_copy(
    build: Callable[[], nn.Module], stream: Callable[[nn.Module, Tensor], list[Tensor]], changed: str, names: list[str]
) -> None:
    teacher, inputs = build(), images()
    student = copy.deepcopy(teacher)
    found = measured(student, teacher, inputs)
    assert found.samples == 6 and found.relative_error == 0 and found.blocks == tuple((name, 0) for name in names)
    assert (found.output_cosine, found.token_cosine) == pytest.approx((1, 1), abs=1e-6) and found.is_enough
    with torch.no_grad():
        student.get_parameter(changed).mul_(0.3)
        expected = []
        for mine, theirs in zip(stream(student, inputs), stream(teacher, inputs), strict=True):
            spread = (theirs - theirs.mean((0, 1))).square().sum()
            expected.append(float(((mine - theirs).square().sum() / spread).sqrt()))
    found = measured(student, teacher, inputs)
    assert [name for name, _ in found.blocks] == names
    assert [error for _, error in found.blocks] == pytest.approx(expected, rel=1e-4) and min(expected) > 0.001


def test_a_turn_by_sixty_degrees_has_a_cosine_of_a_half_and_an_error_of_one() -> None:
    found = measure_fidelity(Toy(TURN), Toy(torch.eye(2)), images()[:, 0, 0, :2].split(4), ())
    assert (found.output_cosine, found.relative_error) == pytest.approx((0.5, 1), abs=1e-6)
    assert found.token_cosine is None and found.agreement is None and found.blocks == () and not found.is_enough


@pytest.mark.parametrize(("scale", "cosine", "error"), [(1.5, 1, 0.5), (-1.0, -1, 2.0)])
def test_the_last_tokens_are_those_after_the_norm(scale: float, cosine: float, error: float) -> None:
    teacher = timm_vit(num_classes=0)
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        student.norm.weight.mul_(scale)
        student.norm.bias.mul_(scale)
    found = measured(student, teacher, images())
    assert (found.output_cosine, found.token_cosine, found.relative_error) == pytest.approx((cosine, cosine, error), abs=1e-5)
    assert found.agreement is None and [each for _, each in found.blocks] == [0, 0]


def test_agreement_is_the_share_of_equal_top_classes_of_a_classifier() -> None:
    scores = torch.tensor([[3.0, 1, 0], [0, 2, 1], [0, 1, 4], [5, 2, 0]])
    for classes, expected in ((3, 0.25), (0, None)):
        teacher, student = Toy(torch.eye(3), num_classes=classes), Toy(torch.eye(3), torch.tensor([0.0, 0, 10]))
        assert measure_fidelity(student, teacher, scores.split(3), ()).agreement == expected


def test_prefix_tokens_count_in_the_error_and_not_in_the_token_cosine() -> None:
    inputs, offset = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(2)), torch.zeros(3, 4)
    offset[0] = 7
    teacher, student = (Toy(torch.eye(4), by, num_prefix_tokens=1) for by in (0.0, offset))
    found = measure_fidelity(student, teacher, inputs.split(2), TOKENS)
    assert found.token_cosine == pytest.approx(1, abs=1e-6)
    assert found.relative_error == pytest.approx(float((5 * offset.square().sum() / inputs.square().sum()).sqrt()), rel=1e-5)
    student.num_prefix_tokens = 0
    assert (measure_fidelity(student, teacher, inputs.split(2), TOKENS).token_cosine or 1) < 0.9


def test_batches_do_not_change_the_numbers_and_the_models_stay_as_they_are() -> None:
    teacher = timm_vit().train()
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        student.blocks[1].attn.proj.weight.zero_()
    values = copy.deepcopy(student.state_dict())
    one, many = measured(student, teacher, images(), batch=6), measured(student, teacher, images(), batch=1)
    assert dict(one.blocks) == pytest.approx(dict(many.blocks), rel=1e-5) and one.blocks[1][1] > 0
    assert (one.output_cosine, one.relative_error) == pytest.approx((many.output_cosine, many.relative_error), rel=1e-5)
    assert all(module.training for module in (*student.modules(), *teacher.modules()))
    assert all(torch.equal(value, student.state_dict()[name]) for name, value in values.items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in (*student.modules(), *teacher.modules()))


def test_images_of_one_colour_give_finite_numbers_and_outputs_that_are_no_numbers_are_not_enough() -> None:
    teacher = timm_vit()
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        student.blocks[0].mlp.fc1.weight.mul_(0.3)
    found = measured(student, teacher, torch.zeros(4, 3, 16, 16))
    assert all(math.isfinite(each or 0) for each in (found.output_cosine, found.token_cosine, found.relative_error))
    assert all(0 < error < 1 for _, error in found.blocks)
    with torch.no_grad():
        student.norm.weight.fill_(float("nan"))
    found = measured(student, teacher, images())
    assert math.isnan(found.relative_error) and not found.is_enough


def test_what_cannot_be_compared_is_refused() -> None:
    for student, batches, words in (
        (timm_vit(), [], "hold no samples"),
        (timm_vit(num_classes=5), [images()], r"shapes \(6, 5\) and \(6, 7\)"),
        (timm_vit(), [torch.zeros(4, 3)], r"fails on inputs of shape \(4, 3\)"),
    ):
        with pytest.raises(DataError, match=words):
            measure_fidelity(student, timm_vit(), batches, ())
