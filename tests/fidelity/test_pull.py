"""Gradients that enter between the blocks."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

from flysurgery.errors import SurgeryError
from flysurgery.fidelity import Pull, Stream, relative_error
from flysurgery.walker import Cut, find_cuts, survey


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


def test_the_gradient_of_the_error_is_autograds() -> None:
    given, wanted = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True), torch.randn(3, 5, 4)
    error, difference, scale = relative_error(given, wanted)
    expected = (given - wanted).square().sum() / (wanted - wanted.mean((0, 1))).square().sum()
    assert torch.allclose(error.double(), expected, rtol=1e-5)
    assert torch.allclose((difference * scale).double(), torch.autograd.grad(expected, given)[0], rtol=1e-5)


@pytest.mark.parametrize("reach", [0.0, 1.0])
def test_a_block_has_the_gradient_of_its_own_error_and_by_reach_of_all_later_ones(reach: float) -> None:
    torch.manual_seed(0)
    student, teacher, x = Chain(), Chain(), torch.randn(6, 4)
    with Stream(teacher, CUTS) as theirs, torch.no_grad():
        teacher(x)
        wanted = dict(theirs.values)
    with Pull(student, wanted, CUTS, reach) as pull:
        student(x).square().sum().backward()
        assert pull.error() > 0
    first = student.stem(x)
    middle = first + student.one(first)
    last = middle + student.two(middle)
    errors = [relative_error(each, wanted[number])[0] for number, each in ((1, middle), (2, last))]
    losses = [*errors, student.head(last).square().sum()]
    for name, own in (("one.weight", 0), ("two.weight", 1), ("two.bias", 1), ("head.weight", 2)):
        parameter, loss = student.get_parameter(name), sum(losses[own:], torch.zeros(())) if reach else losses[own]
        expected = torch.autograd.grad(loss, parameter, retain_graph=True)[0]
        assert parameter.grad is not None and torch.allclose(parameter.grad, expected, rtol=1e-4, atol=1e-6), name
    assert student.stem.weight.grad is not None and not student.stem.weight.grad.any(), "what comes before the start does not learn"


def test_hooks_are_gone_afterwards_and_forwards_without_gradients_are_not_held_against_anything() -> None:
    student = Chain()
    with Pull(student, {}, CUTS, 0.5), torch.no_grad():
        student(torch.randn(2, 4))
    wide = [Cut("one", "output", (2, 9), "block")]
    with pytest.raises(SurgeryError, match="one was traced with an output of"), Stream(student, wide):
        student(torch.randn(2, 4))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in student.modules())


def test_a_stream_sees_what_the_modules_of_a_real_model_give_at_another_batch_size() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32).eval()
    cuts = [cut for cut in find_cuts(survey(model)) if cut.kind != "other"]
    with Stream(model, cuts) as stream, torch.no_grad():
        assert torch.equal(model.forward_features(torch.randn(5, 3, 32, 32)), stream.values[len(cuts) - 1])
        first = model.blocks[0](stream.values[0])
        assert torch.equal(stream.values[1], first)
