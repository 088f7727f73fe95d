"""A conversion that fails, wherever it does, leaves the model as it was: same modules, same numbers, same attributes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flysurgery
from flysurgery.errors import FlysurgeryError, PlanError, ProjectionError, SurgeryError
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.surgery import ExampleInput, Plan, apply, plan
from flysurgery.walker import Switch
from tests.support.composed import Composed
from tests.surgery.conftest import beit, unchanged


def fc1_of(model: nn.Module) -> nn.Module:
    return model.get_submodule("blocks.0.mlp.fc1")


def replaced_by(new: Callable[[], nn.Module]) -> Callable[[nn.Module], object]:
    return lambda model: setattr(model.get_submodule("blocks.0.mlp"), "fc1", new())


INTEGERS = nn.Parameter(torch.zeros(256, 64, dtype=torch.int8), requires_grad=False)
SPOILED: list[tuple[Callable[[Any], object], type[FlysurgeryError], str]] = [
    (lambda model: nn.utils.parametrizations.weight_norm(fc1_of(model)), PlanError, "its weight is parametrized .*change that first"),
    (lambda model: fc1_of(model).register_forward_hook(print), PlanError, "hooks, which a replacement would lose; change that first"),
    (lambda model: setattr(model.blocks[1].mlp.fc1, "weight", fc1_of(model).weight), PlanError, "shares a parameter with blocks.1.mlp.fc1"),
    (lambda model: setattr(model.blocks[1].mlp, "fc1", fc1_of(model)), PlanError, "goes by the names"),
    (replaced_by(lambda: nn.Conv2d(64, 256, 1)), PlanError, "expected an nn.Linear, the model has a Conv2d"),
    (replaced_by(lambda: nn.Linear(64, 128)), PlanError, "the plan says 256x64, the model has 128x64"),
    (lambda model: setattr(fc1_of(model), "bias", None), PlanError, "the model has no bias there, the plan says one"),
    (lambda model: delattr(model.blocks[0].mlp, "fc1"), PlanError, "the model has no module of that name"),
    (lambda model: setattr(fc1_of(model), "weight", INTEGERS), PlanError, "not a floating-point tensor"),
    (lambda model: fc1_of(model).bias.data.fill_(torch.inf), ProjectionError, "fc1: its bias has NaN or infinite entries"),
    (lambda model: flysurgery.convert(model, include="blocks.0.mlp.fc1"), SurgeryError, "densify it first"),
]
PLANS: list[tuple[dict[str, Any], type[FlysurgeryError], str]] = [
    ({"layers": ()}, PlanError, "replaces nothing"),
    ({"switches": (Switch("blocks.9", "qkv_bias_separate", True),)}, PlanError, "no such attribute"),
    ({"switches": (Switch("blocks.0.attn", "nonsense", True),)}, PlanError, "no such attribute"),
    ({"switches": (Switch("blocks.0.attn", "num_heads", True),)}, PlanError, "no switch but 2"),
    ({"example": None}, SurgeryError, "pass verify=False"),
    ({"example": (ExampleInput((2, 3, 32, 32), "softmax"),)}, FlysurgeryError, "unknown dtype 'softmax'"),
]


@pytest.mark.parametrize(("spoil", "kind", "message"), [*SPOILED, *PLANS])
def test_a_model_and_a_plan_that_do_not_fit(vit: nn.Module, vit_plan: Plan, spoil: Any, kind: type[Exception], message: str) -> None:
    if callable(spoil):
        spoil(vit)
    made = vit_plan if callable(spoil) else dataclasses.replace(vit_plan, **spoil)
    with unchanged(vit), pytest.raises(kind, match=message) as caught:
        apply(made, vit)
    assert "blocks.0.mlp.fc1" in str(caught.value) or not callable(spoil)


INTERRUPTED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "the first projection": ("", 1, {}),
    "the last projection": ("", 6, {}),
    "in a new order": ("blocks.1.mlp.fc2", 0, {"sequential": True, "permute": True}),
    "reconstruction": ("reconstruction", 0, {"reconstruct": 60.0}),
    "the verifying forward": ("", 0, {}),
}


@pytest.mark.parametrize("when", INTERRUPTED)
def test_an_interruption(vit: nn.Module, vit_plan: Plan, many: Tensor, when: str) -> None:
    name, count, options = INTERRUPTED[when]

    def stop(done: int, total: int, said: str) -> None:
        if done == count or (name and said.startswith(name)):
            raise KeyboardInterrupt

    if when == "the verifying forward":
        vit.get_submodule("norm").register_forward_hook(lambda *_: stop(0, 0, ""))
    with unchanged(vit), pytest.raises(KeyboardInterrupt):
        apply(vit_plan, vit, progress=stop, **({"calibrate": many[:20]} | options if options else {}))


class Fragile(dict):
    """The children of a module; refuses to hold a converted one for the first time."""

    refusals = 1

    def __setitem__(self, name: str, module: nn.Module) -> None:
        if isinstance(module, ButterflyLinear | SplitLinear) and self.refusals:
            self.refusals -= 1
            raise MemoryError("no room for another module")
        super().__setitem__(name, module)


@pytest.mark.parametrize("parent", ["blocks.0.attn", "blocks.1.mlp"])
def test_a_failure_while_swapping(vit: nn.Module, vit_plan: Plan, parent: str) -> None:
    module = vit.get_submodule(parent)
    module._modules = Fragile(module._modules)
    with unchanged(vit), pytest.raises(MemoryError):
        apply(vit_plan, vit)
    assert isinstance(module._modules, Fragile) and not module._modules.refusals  # the failure did happen


class Stubborn(Composed):
    """A parent whose second switch breaks when it is set."""

    second = property(lambda self: False)


def test_a_failure_while_switching() -> None:
    model = Stubborn(lambda self, x: self.linear(x), first=False, linear=nn.Linear(32, 32))
    made = plan(model, roles="head", example=torch.zeros(2, 3, 32))
    made = dataclasses.replace(made, switches=(Switch("", "first", True), Switch("", "second", True)))
    with unchanged(model), pytest.raises(AttributeError):
        apply(made, model)
    assert not model.first


def bypassing(self: Any, x: Tensor) -> Tensor:
    """Calls its linear layer only when nothing else is there; or reads what a converted one lacks."""
    x = self.norm(x) + torch.rand(())
    if isinstance(self.linear, nn.Linear):
        return self.linear(x)
    return x @ self.linear.get_parameter("weight") if self.breaks else x  # in a way that the walk cannot see


@pytest.mark.parametrize(
    ("breaks", "message"), [(True, "failed in its first forward.*weight"), (False, "not called in a forward.*: linear")]
)
def test_a_failure_in_the_verifying_forward(breaks: bool, message: str) -> None:
    model = Composed(bypassing, linear=nn.Linear(32, 32), norm=nn.BatchNorm1d(3), breaks=breaks)
    made = plan(model, roles="head", example=torch.zeros(2, 3, 32))
    with unchanged(model), pytest.raises(SurgeryError, match=message):
        apply(made, model)
    model = beit()
    wrong = dataclasses.replace(plan(model), example=(ExampleInput((2, 5, 32, 32), "float32"),))
    with unchanged(model), pytest.raises(SurgeryError, match="failed in its first forward"):  # which sets switches back as well
        apply(wrong, model)
