"""A conversion that fails, wherever it does, leaves the model as it was: same modules, same numbers, same attributes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import timm
import torch
from torch import Tensor, nn

from flysurgery.errors import PlanError, ProjectionError, SurgeryError
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.surgery import ExampleInput, Plan, apply, plan
from flysurgery.walker import Switch


def attributes(module: nn.Module) -> dict[str, object]:
    registries = ("_parameters", "_buffers", "_modules")
    return {name: value for name, value in vars(module).items() if name not in registries}


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Everything a model holds, by identity and bit for bit, before and after."""
    modules = list(model.named_modules(remove_duplicate=False))
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    values = [tensor.detach().clone() for _, tensor in tensors]
    held = [copy.copy(attributes(module)) for _, module in modules]
    random = torch.get_rng_state()
    yield
    after = list(model.named_modules(remove_duplicate=False))
    assert [name for name, _ in after] == [name for name, _ in modules]
    assert all(old is new for (_, old), (_, new) in zip(modules, after, strict=True))
    tensors_after = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    assert [name for name, _ in tensors_after] == [name for name, _ in tensors]
    assert all(old is new for (_, old), (_, new) in zip(tensors, tensors_after, strict=True))
    assert all(same_bits(value, now) for value, (_, now) in zip(values, tensors_after, strict=True))
    assert [attributes(module) for _, module in modules] == held
    assert torch.equal(torch.get_rng_state(), random)


def same_bits(value: Tensor, now: Tensor) -> bool:
    return torch.equal(value.reshape(-1).view(torch.uint8), now.detach().reshape(-1).view(torch.uint8))


def with_nan(model: nn.Module, name: str, value: float) -> None:
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = value


@pytest.mark.parametrize(("name", "value"), [("blocks.1.mlp.fc2.weight", float("nan")), ("blocks.0.mlp.fc1.bias", float("inf"))])
def test_weights_that_are_not_finite_name_the_layer(vit: nn.Module, vit_plan: Plan, name: str, value: float) -> None:
    with_nan(vit, name, value)
    layer, _, tensor = name.rpartition(".")
    with unchanged(vit), pytest.raises(ProjectionError, match=rf"layer {layer}: its {tensor} has NaN or infinite entries"):
        apply(vit_plan, vit)


def test_nan_in_a_layer_that_stays_is_nobodys_business(vit: nn.Module, vit_plan: Plan) -> None:
    with_nan(vit, "head.weight", float("nan"))
    assert apply(vit_plan, vit).verified


def parametrized(model: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(model.get_submodule("blocks.0.mlp.fc1"))


def hooked(model: nn.Module) -> None:
    model.get_submodule("blocks.0.mlp.fc1").register_forward_hook(lambda *_: None)


def tied(model: nn.Module) -> None:
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight


def shared(model: nn.Module) -> None:
    model.blocks[1].mlp.fc1 = model.blocks[0].mlp.fc1


def convolution(model: nn.Module) -> None:
    model.blocks[0].mlp.fc1 = nn.Conv2d(64, 256, 1)


def other_size(model: nn.Module) -> None:
    model.blocks[0].mlp.fc1 = nn.Linear(64, 128)


def no_bias(model: nn.Module) -> None:
    model.blocks[0].mlp.fc1.bias = None


def gone(model: nn.Module) -> None:
    del model.blocks[0].mlp.fc1


def integers(model: nn.Module) -> None:
    fc1 = model.get_submodule("blocks.0.mlp.fc1")
    fc1.weight = nn.Parameter(torch.zeros(256, 64, dtype=torch.int8), requires_grad=False)


MODELS_THAT_DO_NOT_FIT: list[tuple[Callable[[nn.Module], None], str]] = [
    (parametrized, "parametrized"),
    (hooked, "hooks"),
    (tied, "shares a parameter with blocks.1.mlp.fc1"),
    (shared, "goes by the names"),
    (convolution, "expected an nn.Linear, the model has a Conv2d"),
    (other_size, "the plan says 256x64, the model has 128x64"),
    (no_bias, "no bias"),
    (gone, "the model has no module of that name"),
    (integers, "expected a weight in float16"),
]


@pytest.mark.parametrize(("spoil", "message"), MODELS_THAT_DO_NOT_FIT, ids=[spoil.__name__ for spoil, _ in MODELS_THAT_DO_NOT_FIT])
def test_a_model_that_does_not_fit_the_plan(vit: nn.Module, vit_plan: Plan, spoil: Callable[[nn.Module], None], message: str) -> None:
    spoil(vit)
    with unchanged(vit), pytest.raises(PlanError, match=message) as caught:
        apply(vit_plan, vit)
    assert "blocks.0.mlp.fc1" in str(caught.value)


@pytest.mark.parametrize(
    ("switch", "message"),
    [
        (Switch("blocks.9", "qkv_bias_separate", True), "no such attribute"),
        (Switch("blocks.0.attn", "nonsense", True), "no such attribute"),
        (Switch("blocks.0.attn", "num_heads", True), "no switch but 2"),
    ],
)
def test_switches_that_do_not_fit(vit: nn.Module, vit_plan: Plan, switch: Switch, message: str) -> None:
    made = dataclasses.replace(vit_plan, switches=(switch,))
    with unchanged(vit), pytest.raises(PlanError, match=message):
        apply(made, vit)


def test_weights_on_meta_are_refused(vit: nn.Module, vit_plan: Plan) -> None:
    vit.to("meta")
    with pytest.raises(SurgeryError, match="on the meta device"):
        apply(vit_plan, vit)
    assert isinstance(vit.get_submodule("blocks.0.mlp.fc1"), nn.Linear)


def test_a_converted_model_is_refused_and_stays(vit: nn.Module, vit_plan: Plan) -> None:
    apply(vit_plan, vit)
    with unchanged(vit), pytest.raises(SurgeryError, match="densify it first"):
        apply(vit_plan, vit)


def test_a_plan_that_replaces_nothing_is_refused(vit: nn.Module) -> None:
    with unchanged(vit), pytest.raises(PlanError, match="replaces nothing"):
        apply(Plan(()), vit)


@pytest.mark.parametrize("stop_at", [1, 4, 6])
def test_an_interruption_while_projecting(vit: nn.Module, vit_plan: Plan, stop_at: int) -> None:
    def interrupt(done: int, total: int, fqn: str) -> None:
        if done == stop_at:
            raise KeyboardInterrupt

    with unchanged(vit), pytest.raises(KeyboardInterrupt):
        apply(vit_plan, vit, progress=interrupt)


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
    assert isinstance(module._modules, Fragile)
    assert not module._modules.refusals  # the failure did happen


class Stubborn(nn.Module):
    """A parent whose second switch breaks when it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.linear = False, nn.Linear(32, 32)

    @property
    def second(self) -> bool:
        return False

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_a_failure_while_switching() -> None:
    model = Stubborn()
    made = plan(model, roles="head", example=torch.zeros(2, 3, 32))
    made = dataclasses.replace(made, switches=(Switch("", "first", True), Switch("", "second", True)))
    with unchanged(model), pytest.raises(AttributeError):
        apply(made, model)
    assert not model.first


class Bypass(nn.Module):
    """Calls its linear layer only when nothing else is there; or reads what a converted one lacks."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.breaks = nn.Linear(32, 32), nn.BatchNorm1d(3), breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) + torch.rand(())
        if isinstance(self.linear, nn.Linear):
            return self.linear(x)
        return x @ self.linear.get_parameter("weight") if self.breaks else x  # in a way that the walk cannot see


@pytest.mark.parametrize(
    ("breaks", "message"), [(True, "failed in its first forward.*weight"), (False, "not called in a forward.*: linear")]
)
def test_a_failure_in_the_verifying_forward(breaks: bool, message: str) -> None:
    model = Bypass(breaks=breaks)
    made = plan(model, roles="head", example=torch.zeros(2, 3, 32))
    with unchanged(model), pytest.raises(SurgeryError, match=message):
        apply(made, model)


def test_an_interruption_in_the_verifying_forward(vit: nn.Module, vit_plan: Plan) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    vit.get_submodule("norm").register_forward_hook(interrupt)
    with unchanged(vit), pytest.raises(KeyboardInterrupt):
        apply(vit_plan, vit)


def test_a_plan_without_a_usable_example_is_not_verified(vit: nn.Module, vit_plan: Plan) -> None:
    for example, message in ((None, "pass verify=False"), ((ExampleInput((2, 3, 32, 32), "softmax"),), "unknown dtype 'softmax'")):
        with unchanged(vit), pytest.raises(SurgeryError, match=message):
            apply(dataclasses.replace(vit_plan, example=example), vit)


def test_switches_are_set_back_after_a_failure() -> None:
    model = timm.create_model("beit_base_patch16_224", img_size=32, depth=2, embed_dim=64, num_heads=2)
    made = plan(model)
    wrong = dataclasses.replace(made, example=(ExampleInput((2, 5, 32, 32), "float32"),))
    with unchanged(model), pytest.raises(SurgeryError, match="failed in its first forward"):
        apply(wrong, model)
    assert not model.blocks[0].attn.qkv_bias_separate


def test_the_wrong_layer_is_named(vit: nn.Module, vit_plan: Plan) -> None:
    layers = tuple(dataclasses.replace(layer, fqn=layer.fqn.replace("1.mlp", "7.mlp")) for layer in vit_plan.layers)
    with unchanged(vit), pytest.raises(PlanError, match=r"'blocks.7.mlp.fc1', and the model has no module of that name"):
        apply(dataclasses.replace(vit_plan, layers=layers), vit)
