"""Fidelity with known answers: what is compared, what is left out, and errors block by block against those computed by hand."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flysurgery.errors import DataError
from flysurgery.fidelity import Fidelity, measure_fidelity
from flysurgery.walker import Cut, find_cuts, survey
from tests.support.models import images, vit


class Toy(nn.Module):
    """Multiplies by a matrix, then adds an offset to each token."""

    def __init__(self, matrix: Tensor, offset: Tensor | float = 0.0, num_classes: int = 0, num_prefix_tokens: int = 0) -> None:
        super().__init__()
        self.matrix, self.num_classes, self.num_prefix_tokens = nn.Parameter(matrix), num_classes, num_prefix_tokens
        self.tokens = nn.Module()
        self.tokens.forward = lambda x: x + offset  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens(x @ self.matrix)


def measured(student: nn.Module, teacher: nn.Module, inputs: Tensor) -> Fidelity:
    return measure_fidelity(student, teacher, inputs.split(4), find_cuts(survey(teacher)))


def stream(model: Any, x: Tensor) -> list[Tensor]:
    """What the two blocks give."""
    first = model.blocks[0](model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x)))))
    return [first, model.blocks[1](first)]


def test_block_errors_are_those_of_the_stream_and_none_of_a_copy() -> None:
    teacher, inputs, names = vit().train(), images(), ["blocks.0", "blocks.1"]
    student = copy.deepcopy(teacher)
    found = measured(student, teacher, inputs)
    assert found.samples == 6 and found.relative_error == 0 and found.blocks == tuple((name, 0) for name in names)
    assert (found.output_cosine, found.token_cosine) == pytest.approx((1, 1), abs=1e-6) and found.is_enough
    with torch.no_grad():
        student.get_parameter("blocks.0.mlp.fc1.weight").mul_(0.3)
        expected = []
        for mine, theirs in zip(stream(student, inputs), stream(teacher, inputs), strict=True):
            spread = (theirs - theirs.mean((0, 1))).square().sum()
            expected.append(float(((mine - theirs).square().sum() / spread).sqrt()))
    found = measured(student, teacher, inputs)
    assert [name for name, _ in found.blocks] == names
    assert [error for _, error in found.blocks] == pytest.approx(expected, rel=1e-4) and min(expected) > 0.001
    for module in (*student.modules(), *teacher.modules()):
        assert module.training and not module._forward_hooks and not module._forward_pre_hooks, "models stay as they are"


def test_outputs_turned_round_and_doubled_and_the_share_of_equal_top_classes() -> None:
    found = measure_fidelity(Toy(-2 * torch.eye(2)), Toy(torch.eye(2)), images()[:, 0, 0, :2].split(4), ())
    assert (found.output_cosine, found.relative_error) == pytest.approx((-1, 3), abs=1e-6)
    assert found.token_cosine is None and found.agreement is None and found.blocks == () and not found.is_enough
    scores = torch.tensor([[3.0, 1, 0], [0, 2, 1], [0, 1, 4], [5, 2, 0]])
    for classes, expected in ((3, 0.25), (0, None)):
        teacher, student = Toy(torch.eye(3), num_classes=classes), Toy(torch.eye(3), torch.tensor([0.0, 0, 10]))
        assert measure_fidelity(student, teacher, scores.split(3), ()).agreement == expected


def test_prefix_tokens_count_in_the_error_and_not_in_the_token_cosine() -> None:
    inputs, offset = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(2)), torch.zeros(3, 4)
    offset[0] = 7
    teacher, student = (Toy(torch.eye(4), by, num_prefix_tokens=1) for by in (0.0, offset))
    cuts = (Cut("tokens", "output", (2, 3, 4), "tokens"),)
    found = measure_fidelity(student, teacher, inputs.split(2), cuts)
    assert found.token_cosine == pytest.approx(1, abs=1e-6)
    assert found.relative_error == pytest.approx(float((5 * offset.square().sum() / inputs.square().sum()).sqrt()), rel=1e-5)
    student.num_prefix_tokens = 0
    assert (measure_fidelity(student, teacher, inputs.split(2), cuts).token_cosine or 1) < 0.9


def test_images_of_one_colour_give_finite_numbers_and_outputs_that_are_no_numbers_are_not_enough() -> None:
    teacher = vit()
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
        (vit(), [], "hold no samples"),
        (vit(num_classes=5), [images()], r"shapes \(6, 5\) and \(6, 7\)"),
        (vit(), [torch.zeros(4, 3)], r"fails on inputs of shape \(4, 3\)"),
    ):
        with pytest.raises(DataError, match=words):
            measure_fidelity(student, vit(), batches, ())
