"""Packed weights follow their parameters."""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections.abc import Callable
from operator import is_

import pytest
import torch
from torch import Tensor

from flysurgery.gpu import weight_cache as derivation
from flysurgery.gpu.run_product import run_product
from flysurgery.gpu.weight_cache import derived
from tests.gpu.emulation import EmulatedProduct
from tests.gpu.packed_layer import LAYER, Layer, check
from tests.support.problems import make_input
from tests.support.tolerance import FP64, assert_equal


@pytest.fixture
def x() -> Tensor:
    return make_input(4, LAYER.in_features, FP64)


def test_packed_once_while_nothing_changes(emulated: type[EmulatedProduct], x: Tensor) -> None:
    layer = Layer()
    for _ in range(3):
        check(layer, x)
    assert emulated.packs == 1


def test_an_address_that_is_given_out_again_is_not_mistaken(emulated: type[EmulatedProduct], x: Tensor) -> None:
    layer = Layer()
    for packs in range(1, 20):
        check(layer, x)
        assert emulated.packs == packs and len(derivation._entries) == 1
        for parameter in layer.parameters():
            values = -parameter.detach()
            parameter.data = torch.empty(0, dtype=values.dtype)
            parameter.data = values.clone()


def test_follows_optimizer_steps(emulated: type[EmulatedProduct], x: Tensor) -> None:
    layer = Layer()
    optimizers = (
        torch.optim.SGD(layer.parameters(), 0.1),
        torch.optim.AdamW(layer.parameters(), 0.1, foreach=True),
        torch.optim.AdamW(layer.parameters(), 0.1, fused=True),
    )
    for optimizer in optimizers:
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        check(layer, x)
        optimizer.step()
        check(layer, x)
    assert emulated.packs == 4


@pytest.mark.parametrize("fused", [False, True])
def test_follows_compiled_optimizer_steps(emulated: type[EmulatedProduct], x: Tensor, fused: bool) -> None:
    layer = Layer()
    optimizer = torch.optim.AdamW(layer.parameters(), 0.1, fused=fused)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(2):
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        check(layer, x)
        step()
        check(layer, x)


def test_follows_state_dicts(emulated: type[EmulatedProduct], x: Tensor) -> None:
    layer, other = Layer(), Layer()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-2)
    check(layer, x)
    layer.load_state_dict(other.state_dict())
    assert_equal(layer(x), other(x))
    layer.load_state_dict(Layer().state_dict(), assign=True)
    check(layer, x)
    assert set(layer.state_dict()) == {"factors.0", "factors.1", "bias"}


def test_follows_dtype_changes_and_copies(emulated: type[EmulatedProduct], x: Tensor) -> None:
    layer = Layer()
    check(layer, x)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.factors[0].mul_(3)
    check(twin, x)
    check(layer, x)
    layer.float()
    check(layer, x.float())


def test_nothing_is_pickled(emulated: type[EmulatedProduct], x: Tensor) -> None:
    layer, file = Layer(), io.BytesIO()
    before = len(file.getbuffer())
    torch.save(Layer(), file)
    clean = len(file.getbuffer()) - before
    check(layer, x)
    file = io.BytesIO()
    torch.save(layer, file)
    assert len(file.getbuffer()) == clean


def test_dies_with_its_parameters(emulated: type[EmulatedProduct], x: Tensor) -> None:
    layer = Layer()
    check(layer, x)
    assert len(derivation._entries) == 1
    del layer
    gc.collect()
    assert not derivation._entries


def test_what_was_left_behind_is_freed_without_another_call(emulated: type[EmulatedProduct], x: Tensor) -> None:
    layer, other = Layer(), Layer()
    for each in (layer, other):
        check(each, x)
    _, of_other = derivation._entries.values()
    layer.half()
    assert [*derivation._entries.values()] == [of_other]
    check(other, x)
    assert emulated.packs == 2, "what has not moved stays packed"
    check(layer.double(), x)
    assert emulated.packs == 3


def test_inference_tensors_are_packed_at_each_call(emulated: type[EmulatedProduct], x: Tensor) -> None:
    with torch.inference_mode():
        layer = Layer()
        check(layer, x)
        layer.factors[0].mul_(2)  # counts no version
        check(layer, x)
    assert emulated.packs == 2


def test_what_was_packed_in_inference_mode_serves_outside(emulated: type[EmulatedProduct], x: Tensor) -> None:
    layer = Layer()
    with torch.inference_mode():
        check(layer, x)
    check(layer, x)
    assert emulated.packs == 1


def test_another_tensor_on_the_same_memory_is_not_mistaken() -> None:
    """Its versions are its own."""
    source = torch.ones(3)
    made = [derived("double", (each,), lambda each=each: (each * 2,))[0] for each in (source, source.data.add_(4))]
    assert_equal(made[1], torch.full((3,), 10.0))


def tripled() -> Layer:
    layer = Layer()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(3)
    return layer


@pytest.mark.parametrize(
    "swap",
    [
        lambda layer: layer.half().double(),
        lambda layer: layer.load_state_dict(tripled().state_dict()),
        lambda layer: layer.load_state_dict(tripled().state_dict(), assign=True),
        lambda layer: [*map(torch.utils.swap_tensors, layer.parameters(), tripled().parameters())],
    ],
    ids=["retyped", "loaded", "assigned", "swapped"],
)
def test_tensors_may_be_swapped(
    emulated: type[EmulatedProduct], x: Tensor, swap: Callable[[Layer], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    layer = Layer()
    check(layer, x)
    before = [*layer.parameters()]
    swap(layer)
    assert all(map(is_, layer.parameters(), before))
    check(layer, x)
    assert len(derivation._entries) == 1 and emulated.packs == 2


def test_several_biases_are_joined_once(emulated: type[EmulatedProduct], x: Tensor) -> None:
    layers = [Layer(), Layer(), Layer()]
    with torch.no_grad():
        layers[1].bias.mul_(2)
    factors = [factor for layer in layers for factor in layer.factors]
    expected = torch.cat([layer(x) for layer in layers], dim=1)
    assert_equal(run_product(x, factors, [layer.bias for layer in layers], 3, "fp32"), expected)
    with torch.no_grad():
        layers[2].bias.add_(1)
    expected = torch.cat([layer(x) for layer in layers], dim=1)
    assert_equal(run_product(x, factors, [layer.bias for layer in layers], 3, "fp32"), expected)


def test_the_module_of_compiled_graphs_alone_costs_no_thread() -> None:
    import torch._inductor.cudagraph_trees  # as torch.compiler.reset() imports it

    makers: list[int] = []

    def make() -> tuple[Tensor, ...]:
        makers.append(threading.get_ident())
        return ()

    derivation._make_to_keep(make, torch.device("cuda", 0))
    assert makers == [threading.get_ident()]
