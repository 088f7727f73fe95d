"""Packed weights follow their parameters: which changes are noticed, and which writes are missed until ``forget_derived``."""

from __future__ import annotations

import copy
import gc
import io
from functools import partial
from operator import is_

import pytest
import torch
from torch import Tensor, nn

from flysurgery.factors import ks_einsum
from flysurgery.gpu import weight_cache as derivation
from flysurgery.gpu.factor_product import run_product
from flysurgery.gpu.gradients import EagerLinear
from flysurgery.gpu.weight_cache import derived, taking
from flysurgery.patterns import Architecture
from tests.gpu.conftest import EmulatedProduct
from tests.gpu.writes import WRITES, stepped
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


COMPILED = {"compiled fused AdamW": partial(stepped, torch.optim.AdamW, compiled=True, fused=True)}


@pytest.mark.parametrize("write", [*WRITES, *COMPILED])
def test_writes_are_noticed(write: str) -> None:
    """By packed weights, and by graphs that took them."""
    weight, other = (nn.Parameter(torch.full((4, 4), 3.0)) for _ in range(2))
    weight.grad = torch.ones_like(weight)

    def use() -> None:
        (packed,) = derived("double", (weight,), lambda: (weight.detach() * 2.0,))
        assert_equal(packed, weight.detach() * 2.0)

    use()
    with taking() as taken:
        taken.add([other.detach() * 2.0], [other])
        taken.add([other.detach() * weight.detach()], [other, weight])
    assert taken.right()
    (WRITES | COMPILED)[write](weight, use)
    use()
    assert not taken.right()


def test_what_a_backward_pass_packs_is_in_doubt_behind_it(layer: Layer) -> None:
    """Linears side by side pack the same for their gradient as for their result, here of as many rows as there are inputs."""
    factors, x = (*layer.factors, *Layer().times(3).factors), make_input(LAYER.in_features, LAYER.in_features, FP64).requires_grad_()
    for _ in range(2):
        y = EagerLinear.apply(x.dtype, 2, "fp32", 4, x, *factors)
        assert_equal(y, torch.cat([ks_einsum(ks_einsum(x, right), left) for left, right in (factors[:2], factors[2:])], dim=-1))
        y.sum().backward()  # pyright: ignore[reportOptionalMemberAccess]
        for factor in factors:
            factor.data.sub_(1)


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
    torch.optim.SGD(layer.parameters(), 0.1, fused=True).step()
    check(frozen, x)
    assert emulated.packs == packs


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
    layer.load_state_dict(Layer().times(-2).state_dict(), assign=True)
    check(layer, x)
    layer.float()
    check(layer, x.float())


def test_tensors_may_be_swapped(emulated: type[EmulatedProduct], x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """As modules do when they are retyped."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    layer = Layer()
    check(layer, x)
    before = [*layer.parameters()]
    layer.half().double()
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


def test_frozen_ones_that_graphs_take_outlast_the_steps_of_others() -> None:
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    with taking() as taken:
        taken.add([frozen * 2], [frozen])
    trained = nn.Parameter(torch.ones(3))
    trained.grad = torch.ones(3)
    stepped(torch.optim.SGD, trained, list, fused=True)
    assert taken.right()
