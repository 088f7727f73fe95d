"""Packed weights after writes that PyTorch does not count: those that are noticed, and those that are missed until ``forget_derived``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torch.optim.adamw import adamw

from flysurgery.gpu.autograd import EagerLinear
from flysurgery.gpu.weight_cache import forget_derived
from tests.gpu.emulation import EmulatedProduct
from tests.gpu.packed_layer import LAYER, Layer, check
from tests.support.problems import make_input
from tests.support.tolerance import FP64, assert_equal

Write = Callable[[Layer, Tensor], object]


@pytest.fixture
def x(emulated: type[EmulatedProduct]) -> Tensor:
    return make_input(4, LAYER.in_features, FP64)


@pytest.fixture
def layer(x: Tensor) -> Layer:
    """One with packed weights and gradients."""
    layer = Layer()
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    check(layer, x)
    return layer


class Hidden(torch.optim.Optimizer):
    """Writes through ``data``, as kernels of other libraries do."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer.parameters(), {})

    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        by_data(*(parameter for group in self.param_groups for parameter in group["params"]))


def by_data(*parameters: Tensor) -> None:
    for parameter in parameters:
        parameter.data.sub_(1)


def functional_adamw(layer: Layer, x: Tensor) -> None:
    own = [*layer.parameters()]
    states = [[torch.zeros_like(each) for each in own] for _ in range(2)]
    steps = [torch.tensor(1.0) for _ in own]
    settings = {"amsgrad": False, "beta1": 0.9, "beta2": 0.99, "lr": 0.1, "weight_decay": 0.0, "eps": 1e-8, "maximize": False}
    adamw(own, [torch.ones_like(each) for each in own], *states, [], steps, fused=True, **settings)  # pyright: ignore[reportCallIssue]


@torch.no_grad()
def fused_sgd(layer: Layer, x: Tensor) -> None:
    own = [*layer.parameters()]
    settings = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}
    torch._fused_sgd_(own, [torch.ones_like(each) for each in own], [], is_first_step=True, **settings)  # pyright: ignore


def uncounted(layer: Layer) -> None:
    """As FSDP2 fills the memory of a whole parameter again."""
    for parameter in layer.parameters():
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(parameter):  # pyright: ignore
            parameter.mul_(2)


def flat_buffer(layer: Layer, x: Tensor) -> None:
    """As FSDP1, DeepSpeed and ZeroRedundancyOptimizer lay parameters."""
    own = [*layer.parameters()]
    flat = torch.cat([each.detach().flatten() for each in own])
    for each, part in zip(own, flat.split([each.numel() for each in own]), strict=True):
        each.data = part.view_as(each)
    check(layer, x)
    flat.mul_(2)


def own_hook(layer: Layer, x: Tensor, **settings: bool) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, fused=True)
    optimizer.register_step_post_hook(lambda *_: check(layer, x))
    optimizer.step()


def closure_and_own_hook(layer: Layer, x: Tensor) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, fused=True)
    optimizer.register_step_post_hook(lambda *_: check(layer, x))
    optimizer.step(lambda: float(layer(x).sum()))


def hidden_optimizer(layer: Layer, x: Tensor) -> None:
    Hidden(layer).step()


def pack_frozen(layer: Layer, x: Tensor) -> None:
    forget_derived()
    check(layer.requires_grad_(False), x)


def trained_between_frozen(layer: Layer, x: Tensor) -> None:
    pack_frozen(layer, x)
    torch.optim.SGD(layer.requires_grad_(True).parameters(), 0.1, fused=True).step()
    layer.requires_grad_(False)


def frozen_with_gradients(layer: Layer, x: Tensor) -> None:
    pack_frozen(layer, x)
    torch.optim.SGD(layer.parameters(), 0.1, fused=True).step()


def filled_after_a_step(layer: Layer, x: Tensor) -> None:
    """FSDP2: the optimizer has a part of each parameter, and what layers read is filled from all parts."""
    part = nn.Parameter(torch.ones(3, dtype=torch.float64))
    part.grad = torch.ones_like(part)
    torch.optim.SGD([part], 0.1).step()
    uncounted(layer)


def after_backward(write: Write) -> Write:
    """Trains without an optimizer; the gradients come through the kernels."""

    def trained(layer: Layer, x: Tensor) -> None:
        for _ in range(2):
            EagerLinear.apply(x.dtype, 1, "fp32", 2, x, *layer.factors, layer.bias).sum().backward()  # pyright: ignore
            write(layer, x)
            check(layer, x)

    return trained


NOTICED: dict[str, Write] = {
    "flat buffer": flat_buffer,
    "own hook of a fused optimizer": own_hook,
    "closure and own hook of a fused optimizer": closure_and_own_hook,
    "optimizer that writes through data": hidden_optimizer,
    "fused step between frozen calls": trained_between_frozen,
    "fused step on frozen parameters": frozen_with_gradients,
    "memory filled after a step": filled_after_a_step,
    "functional adamw after backward": after_backward(functional_adamw),
    "_fused_sgd_ after backward": after_backward(fused_sgd),
    "data after backward": after_backward(lambda layer, x: by_data(*layer.parameters())),
}


def by_storage(layer: Layer, x: Tensor) -> None:
    storage = layer.bias.untyped_storage()
    storage.copy_((-layer.bias).detach().untyped_storage())


def by_numpy(layer: Layer, x: Tensor) -> None:
    array = layer.bias.detach().numpy()
    array *= 2


MISSED: dict[str, Write] = {
    "data": lambda layer, x: by_data(*layer.parameters()),
    "untyped storage": by_storage,
    "numpy": by_numpy,
    "dlpack": lambda layer, x: torch.from_dlpack(layer.bias.detach()).mul_(2),
    "functional adamw": functional_adamw,
    "_fused_sgd_": fused_sgd,
    "memory filled again": lambda layer, x: uncounted(layer),
}


@pytest.mark.parametrize("write", NOTICED)
def test_noticed(layer: Layer, x: Tensor, write: str) -> None:
    before = layer(x).detach().clone()
    NOTICED[write](layer, x)
    check(layer, x)
    assert not torch.equal(layer(x), before)


@pytest.mark.parametrize("write", MISSED)
def test_missed_until_forgotten(layer: Layer, x: Tensor, write: str) -> None:
    """If one of these fails, take it off the list of ``forget_derived``."""
    before = layer(x)
    MISSED[write](layer, x)
    assert_equal(layer(x), before)
    forget_derived()
    check(layer, x)
    assert not torch.equal(layer(x), before)


def test_an_average_of_timm_is_followed_where_pytorch_counts_it(layer: Layer, x: Tensor) -> None:
    average = ModelEmaV3(layer, decay=0.5, foreach=True)
    check(average.module, x)
    version = average.module.bias._version
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(-3)
    average.update(layer)
    if average.module.bias._version == version:  # PyTorch 2.11
        forget_derived()
    check(average.module, x)


def test_what_no_optimizer_has_stays_packed(layer: Layer, x: Tensor, emulated: type[EmulatedProduct]) -> None:
    frozen = Layer().requires_grad_(False)
    check(frozen, x)
    packs = emulated.packs
    own_hook(layer, x)
    check(frozen, x)
    assert emulated.packs == packs + 1


def test_a_step_that_fails_leaves_parameters_in_doubt(layer: Layer, x: Tensor, emulated: type[EmulatedProduct]) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 // 0)
    packs = emulated.packs
    check(layer, x)
    check(layer, x)
    assert emulated.packs == packs + 2
    optimizer.step()
    check(layer, x)
    check(layer, x)
    assert emulated.packs == packs + 3
