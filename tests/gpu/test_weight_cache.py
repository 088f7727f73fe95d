"""Packed weights follow their parameters: which changes are noticed, and which writes are missed until ``forget_derived``."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from operator import is_

import pytest
import torch
from torch import Tensor, nn

from flysurgery.factors import ks_einsum
from flysurgery.gpu import weight_cache as derivation
from flysurgery.gpu.gradients import EagerLinear
from flysurgery.gpu.product import run_product
from flysurgery.gpu.weight_cache import derived, forget_derived, taking
from flysurgery.patterns import Architecture
from tests.gpu.conftest import EmulatedProduct
from tests.support.problems import make_factors, make_input, make_vector
from tests.support.tolerance import FP64, OF_DTYPE, assert_bounded, assert_equal

LAYER = Architecture.of((2, 3, 4, 3), (1, 8, 5, 3))


class Layer(nn.Module):
    """Factors and a bias, as ButterflyLinear holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList([nn.Parameter(factor) for factor in make_factors(LAYER, FP64)])
        self.bias = nn.Parameter(make_vector(LAYER.out_features, FP64))

    def forward(self, x: Tensor) -> Tensor:
        return run_product(x, tuple(self.factors), (self.bias,), 1, "fp32")

    @torch.no_grad()
    def times(self, factor: float) -> Layer:
        for parameter in self.parameters():
            parameter.mul_(factor)
        return self


def check(layer: Layer, x: Tensor) -> None:
    assert_bounded(layer(x), x, tuple(layer.factors), layer.bias, OF_DTYPE[x.dtype])


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


Write = Callable[[Layer, Tensor], object]


def stepped(make: Callable[..., torch.optim.Optimizer], compiled: bool = False, **settings: bool) -> Write:
    def write(layer: Layer, x: Tensor) -> None:
        optimizer = make(layer.parameters(), 0.1, **settings)
        (torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step)()

    return write


class Hidden(torch.optim.Optimizer):
    """Writes through ``data``, as kernels of other libraries do."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer.parameters(), {})

    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        by_data(*(parameter for group in self.param_groups for parameter in group["params"]))


def by_data(*parameters: Tensor) -> None:
    for parameter in parameters:
        parameter.data.sub_(1)


@torch.no_grad()
def fused_sgd(layer: Layer, x: Tensor) -> None:
    own = [*layer.parameters()]
    settings = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}
    torch._fused_sgd_(own, [torch.ones_like(each) for each in own], [], is_first_step=True, **settings)  # pyright: ignore


def uncounted(layer: Layer, x: Tensor) -> None:
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


def own_hook(layer: Layer, x: Tensor, closure: bool = False) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, fused=True)
    optimizer.register_step_post_hook(lambda *_: check(layer, x))
    optimizer.step((lambda: float(layer(x).sum())) if closure else None)


def trained_between_frozen(layer: Layer, x: Tensor, thawed: bool) -> None:
    forget_derived()
    check(layer.requires_grad_(False), x)
    torch.optim.SGD(layer.requires_grad_(thawed).parameters(), 0.1, fused=True).step()
    layer.requires_grad_(False)


def filled_after_a_step(layer: Layer, x: Tensor) -> None:
    """FSDP2: the optimizer has a part of each parameter, and what layers read is filled from all parts."""
    part = nn.Parameter(torch.ones(3, dtype=torch.float64))
    part.grad = torch.ones_like(part)
    torch.optim.SGD([part], 0.1).step()
    uncounted(layer, x)


def after_backward(write: Write) -> Write:
    """Trains without an optimizer; the gradients come through the kernels."""

    def trained(layer: Layer, x: Tensor) -> None:
        for _ in range(2):
            EagerLinear.apply(x.dtype, 1, "fp32", 2, x, *layer.factors, layer.bias).sum().backward()  # pyright: ignore
            write(layer, x)
            check(layer, x)

    return trained


NOTICED: dict[str, Write] = {
    "SGD": stepped(torch.optim.SGD),
    "foreach AdamW": stepped(torch.optim.AdamW, foreach=True),
    "fused AdamW": stepped(torch.optim.AdamW, fused=True),
    "compiled fused AdamW": stepped(torch.optim.AdamW, compiled=True, fused=True),
    "loaded": lambda layer, x: layer.load_state_dict(Layer().times(-2).state_dict()),
    "assigned": lambda layer, x: layer.load_state_dict(Layer().times(-2).state_dict(), assign=True),
    "flat buffer": flat_buffer,
    "own hook of a fused optimizer": own_hook,
    "closure and own hook of a fused optimizer": lambda layer, x: own_hook(layer, x, closure=True),
    "optimizer that writes through data": lambda layer, x: Hidden(layer).step(),
    "fused step between frozen calls": lambda layer, x: trained_between_frozen(layer, x, thawed=True),
    "fused step on frozen parameters": lambda layer, x: trained_between_frozen(layer, x, thawed=False),
    "memory filled after a step": filled_after_a_step,
    "_fused_sgd_ after backward": after_backward(fused_sgd),
    "data after backward": after_backward(lambda layer, x: by_data(*layer.parameters())),
}


@pytest.mark.parametrize("write", NOTICED)
def test_noticed(layer: Layer, x: Tensor, write: str) -> None:
    before = layer(x).detach().clone()
    NOTICED[write](layer, x)
    check(layer, x)
    assert not torch.equal(layer(x), before)


def test_what_a_backward_pass_packs_is_in_doubt_behind_it(layer: Layer) -> None:
    """Linears side by side pack the same for their gradient as for their result, here of as many rows as there are inputs."""
    factors, x = (*layer.factors, *Layer().times(3).factors), make_input(LAYER.in_features, LAYER.in_features, FP64).requires_grad_()
    for _ in range(2):
        y = EagerLinear.apply(x.dtype, 2, "fp32", 4, x, *factors)
        assert_equal(y, torch.cat([ks_einsum(ks_einsum(x, right), left) for left, right in (factors[:2], factors[2:])], dim=-1))
        y.sum().backward()  # pyright: ignore[reportOptionalMemberAccess]
        by_data(*factors)


@pytest.mark.parametrize("write", [lambda layer, x: by_data(*layer.parameters()), fused_sgd, uncounted])
def test_writes_that_are_missed_count_once_forgotten(layer: Layer, x: Tensor, write: Write) -> None:
    write(layer, x)
    forget_derived()
    check(layer, x)


@pytest.mark.parametrize("inference", [False, True])
def test_packed_once_while_nothing_changes(emulated: type[EmulatedProduct], x: Tensor, inference: bool) -> None:
    layer = Layer()
    with torch.inference_mode(inference):
        check(layer, x)
    for _ in range(2):
        check(layer, x)
    assert emulated.packs == 1


def test_inference_tensors_are_packed_at_each_call(emulated: type[EmulatedProduct], x: Tensor) -> None:
    with torch.inference_mode():
        layer = Layer()
        check(layer, x)
        check(layer.times(2), x)  # counts no version
    assert emulated.packs == 2


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
    for packs in (2, 1):
        before = emulated.packs
        check(layer, x)
        check(layer, x)
        assert emulated.packs == before + packs
        optimizer.step()


def test_an_address_that_is_given_out_again_is_not_mistaken(emulated: type[EmulatedProduct], x: Tensor) -> None:
    layer = Layer()
    for packs in range(1, 20):
        check(layer, x)
        assert emulated.packs == packs and len(derivation._entries) == 1
        for parameter in layer.parameters():
            values = -parameter.detach()
            parameter.data = torch.empty(0, dtype=values.dtype)
            parameter.data = values.clone()


def test_another_tensor_on_the_same_memory_is_not_mistaken() -> None:
    """Its versions are its own."""
    source = torch.ones(3)
    made = [derived("double", (each,), lambda each=each: (each * 2,))[0] for each in (source, source.data.add_(4))]
    assert_equal(made[1], torch.full((3,), 10.0))


def test_copies_and_changes_of_dtype_are_followed(layer: Layer, x: Tensor) -> None:
    twin = copy.deepcopy(layer)
    check(twin.times(3), x)
    check(layer, x)
    layer.float()
    check(layer, x.float())


SWAPS: dict[str, Callable[[Layer], object]] = {
    "retyped": lambda layer: layer.half().double(),
    "swapped": lambda layer: [*map(torch.utils.swap_tensors, layer.parameters(), Layer().times(3).parameters())],
}


@pytest.mark.parametrize("swap", SWAPS)
def test_tensors_may_be_swapped(emulated: type[EmulatedProduct], x: Tensor, swap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    layer = Layer()
    check(layer, x)
    before = [*layer.parameters()]
    SWAPS[swap](layer)
    assert all(map(is_, layer.parameters(), before))
    check(layer, x)
    assert len(derivation._entries) == 1 and emulated.packs == 2


def test_what_is_packed_is_neither_saved_nor_kept(emulated: type[EmulatedProduct], x: Tensor) -> None:
    layer, sizes = Layer(), []
    for _ in range(2):
        file = io.BytesIO()
        torch.save(layer, file)
        sizes.append(len(file.getbuffer()))
        check(layer, x)
    assert sizes[0] == sizes[1] and set(layer.state_dict()) == {"factors.0", "factors.1", "bias"}


def test_what_was_left_behind_is_freed_without_another_call(emulated: type[EmulatedProduct], x: Tensor) -> None:
    layer, other = Layer(), Layer()
    check(layer, x)
    check(other, x)
    layer.half()
    assert len(derivation._entries) == 1
    check(other, x)
    assert emulated.packs == 2, "what has not moved stays packed"
    check(layer.double(), x)
    assert emulated.packs == 3
    del layer, other
    gc.collect()
    assert not derivation._entries


def move(weight: Tensor) -> None:
    weight.data = weight.data.clone()


def fused_step(weight: Tensor) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], 0.5, fused=True).step()


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "written": lambda weight: weight.mul_(2),
    "moved": move,
    "forgotten": lambda weight: forget_derived(),
    "fused step": fused_step,
}


@pytest.mark.parametrize("change", CHANGES)
def test_graphs_that_take_packed_weights_are_told_of_changes(change: str) -> None:
    sources = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    with taking() as taken:
        assert derivation._thread.taken is taken
        for source in sources:
            taken.add([source * 2], [source])
            taken.add([source * 3], [*sources])
    assert derivation._thread.taken is None
    assert taken.right()
    with torch.no_grad():
        CHANGES[change](sources[1])
    assert not taken.right()


def test_frozen_ones_that_graphs_take_outlast_the_steps_of_others() -> None:
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    with taking() as taken:
        taken.add([frozen * 2], [frozen])
    fused_step(nn.Parameter(torch.ones(3)))
    assert taken.right()
