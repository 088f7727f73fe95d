"""Packed weights follow their parameters."""

from __future__ import annotations

import copy
import gc
import io
import threading

import pytest
import torch
from torch import Tensor, nn

from flysurgery.gpu import weight_cache as derivation
from flysurgery.gpu.run_product import run_product
from flysurgery.gpu.weight_cache import derived, forget_derived, forget_moved
from flysurgery.patterns import Architecture
from tests.gpu.emulation import EmulatedProduct
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


@pytest.fixture
def x() -> Tensor:
    return make_input(4, LAYER.in_features, FP64)


def check(layer: Layer, x: Tensor) -> None:
    assert_bounded(layer(x), x, tuple(layer.factors), layer.bias, OF_DTYPE[x.dtype])


def test_packed_once_while_nothing_changes(emulated: type[EmulatedProduct], x: Tensor) -> None:
    layer = Layer()
    for _ in range(3):
        check(layer, x)
    assert emulated.packs == 1


def test_keeps_the_memory_that_a_parameter_leaves(emulated: type[EmulatedProduct], x: Tensor) -> None:
    """Given out again, the old address with the old version would pass new values for old ones."""
    layer = Layer()
    check(layer, x)
    left = layer.factors[0].data_ptr()
    layer.half().double()
    later = [torch.empty_like(layer.factors[0]) for _ in range(100)]
    assert left not in {tensor.data_ptr() for tensor in (*later, *layer.factors)}
    check(layer, x)


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


def test_other_layers_stay_packed_after_a_fused_step(emulated: type[EmulatedProduct], x: Tensor) -> None:
    layer, other = Layer(), Layer()
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    check(layer, x)
    check(other, x)
    torch.optim.SGD(layer.parameters(), 0.1, fused=True).step()
    check(layer, x)
    check(other, x)
    assert emulated.packs == 3


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
    layer, other, captured = Layer(), Layer(), Layer()
    for each in (layer, other, captured):
        check(each, x)
    *others, of_captured = derivation._entries.values()
    of_captured.captured = True  # a graph may read it
    layer.half()
    captured.half()
    assert len(derivation._entries) == 3
    forget_moved()
    assert [*derivation._entries.values()] == [others[1], of_captured]
    check(other, x)
    assert emulated.packs == 3, "what has not moved stays packed"
    check(layer.double(), x)
    check(captured.double(), x)
    assert emulated.packs == 5


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


def test_writes_through_data_need_forgetting(emulated: type[EmulatedProduct], x: Tensor) -> None:
    layer = Layer()
    check(layer, x)
    layer.factors[0].data.mul_(2)
    forget_derived()
    check(layer, x)


def test_a_new_tensor_at_an_old_identity_is_not_mistaken() -> None:
    source = torch.ones(3)
    derived("double", (source,), lambda: (source * 2,))
    (key,) = derivation._entries
    other = torch.full((3,), 5.0)
    derivation._entries[(id(other), *key[1:])] = derivation._entries.pop(key)
    assert_equal(derived("double", (other,), lambda: (other * 2,))[0], torch.full((3,), 10.0))
    forget_derived()


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
