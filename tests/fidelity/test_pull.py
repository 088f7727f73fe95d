"""Gradients that enter between the blocks."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import Tensor, nn

from flysurgery.errors import SurgeryError
from flysurgery.fidelity import Pull, Stream, relative_error
from flysurgery.walker import Cut, find_cuts, survey


def test_the_gradient_of_the_error_is_autograds() -> None:
    given = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    wanted = torch.randn(3, 5, 4)
    error, difference, scale = relative_error(given, wanted)
    spread = (wanted - wanted.mean((0, 1))).square().sum()
    expected = (given - wanted).square().sum() / spread
    assert torch.allclose(error.double(), expected, rtol=1e-5)
    assert torch.allclose((difference * scale).double(), torch.autograd.grad(expected, given)[0], rtol=1e-5)


class Chain(nn.Module):
    """Two blocks that add a linear of the stream, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.one(x)
        x = x + self.two(x)
        return self.head(x)


CUTS = (Cut("stem", "output", (2, 4), "start"), Cut("two", "input", (2, 4), "block"), Cut("head", "input", (2, 4), "block"))


def gradients(reach: float) -> tuple[Chain, dict[str, Tensor], list[Tensor]]:
    torch.manual_seed(0)
    student, teacher, x = Chain(), Chain(), torch.randn(6, 4)
    with Stream(teacher, CUTS) as theirs, torch.no_grad():
        teacher(x)
        wanted = dict(theirs.values)
    with Pull(student, wanted, CUTS, reach) as pull:
        student(x).square().sum().backward()
        assert pull.error() > 0
    found = {name: parameter.grad for name, parameter in student.named_parameters() if parameter.grad is not None}
    plain = copy.deepcopy(student)
    plain.zero_grad()
    first = plain.stem(x)
    middle = first + plain.one(first)
    last = middle + plain.two(middle)
    errors = [relative_error(each, wanted[number])[0] for number, each in ((1, middle), (2, last))]
    return plain, found, [*errors, plain.head(last).square().sum()]


def test_without_reach_each_block_has_the_gradient_of_its_own_error_alone() -> None:
    plain, found, (first, second, loss) = gradients(0.0)
    for name, error in (("one.weight", first), ("two.weight", second), ("head.weight", loss)):
        expected = torch.autograd.grad(error, plain.get_parameter(name), retain_graph=True)[0]
        assert torch.allclose(found[name], expected, rtol=1e-4, atol=1e-6), name


def test_with_all_reach_every_block_has_the_gradient_of_the_sum_of_all_errors() -> None:
    plain, found, errors = gradients(1.0)
    for name in ("one.weight", "two.bias", "head.weight"):
        expected = torch.autograd.grad(sum(errors, torch.zeros(())), plain.get_parameter(name), retain_graph=True)[0]
        assert torch.allclose(found[name], expected, rtol=1e-4, atol=1e-6), name


def test_what_comes_before_the_start_has_no_gradient() -> None:
    _, found, _ = gradients(1.0)
    assert not found["stem.weight"].any()


def test_hooks_are_gone_afterwards_and_forwards_without_gradients_are_not_held_against_anything() -> None:
    student = Chain()
    with Pull(student, {}, CUTS, 0.5), torch.no_grad():
        student(torch.randn(2, 4))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in student.modules())


def test_a_stream_sees_what_the_modules_of_a_real_model_give_at_another_batch_size() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32).eval()
    cuts = [cut for cut in find_cuts(survey(model)) if cut.kind != "other"]
    x = torch.randn(5, 3, 32, 32)
    with Stream(model, cuts) as stream, torch.no_grad():
        tokens = model.forward_features(x)
        assert torch.equal(stream.values[len(cuts) - 1], tokens)
        first = model.blocks[0](stream.values[0])
        assert torch.equal(stream.values[1], first)


def test_a_tensor_of_another_width_is_one_sentence() -> None:
    model = Chain()
    with pytest.raises(SurgeryError, match="one was traced with an output of"), Stream(model, [Cut("one", "output", (2, 9), "block")]):
        model(torch.randn(2, 4))
