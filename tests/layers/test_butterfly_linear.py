"""ButterflyLinear as a module: what it computes, how it starts, and that it can be handled like any other."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from flysurgery.errors import BackendError, PatternError
from flysurgery.layers import ButterflyLinear
from flysurgery.patterns import Architecture, named
from tests.support.problems import ARCHITECTURES, make_input
from tests.support.tolerance import BF16, FP16, FP32, FP64, Arithmetic, assert_bounded, assert_equal

SQUARE = ARCHITECTURES[0]
SMALL = Architecture.of((1, 8, 6, 2), (2, 6, 4, 1))


def check(layer: ButterflyLinear, mode: Arithmetic = FP32, rows: int = 9) -> None:
    x = make_input(rows, layer.in_features, mode)
    factors = [factor.detach() for factor in layer.factors]
    bias = None if layer.bias is None else layer.bias.detach()
    with torch.no_grad():
        assert_bounded(layer(x), x, factors, bias, mode, bias_apart=True)
    assert_bounded(layer(x).detach(), x, factors, bias, mode, bias_apart=True)


MODES = {"float64": FP64, "float32": FP32, "float16": FP16, "bfloat16": BF16}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_computes_the_product_and_follows_changes_of_dtype(architecture: Architecture, mode: str) -> None:
    arithmetic = MODES[mode]
    for bias, dtype in ((True, arithmetic.dtype), (False, torch.float32)):
        layer = ButterflyLinear(architecture, bias, dtype=dtype)
        layer(torch.zeros(3, architecture.in_features, dtype=dtype))
        check(layer.to(arithmetic.dtype), arithmetic)


def test_meta_device_and_back_with_a_start_that_the_seed_decides() -> None:
    layer = ButterflyLinear(SMALL, device="meta", dtype=torch.float64)
    assert layer(torch.empty(3, 8, device="meta", dtype=torch.float64)).shape == (3, 16)
    layer.to_empty(device="cpu")
    starts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        layer.reset_parameters()
        starts.append(layer.factors[0].detach().clone())
    check(layer, FP64)
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])


def test_it_says_what_it_is_and_names_parameters_as_checkpoints_hold_them() -> None:
    layer = ButterflyLinear(SQUARE)
    assert (layer.in_features, layer.out_features, layer.architecture) == (384, 384, SQUARE)
    assert "architecture=(1,192,48,2),(2,48,192,1), density=0.250, bias=True" in repr(layer)
    shapes = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    assert shapes == {"factors.0": (1, 192, 48, 2), "factors.1": (2, 48, 192, 1), "bias": (384,)}
    bare = ButterflyLinear(SQUARE, bias=False)
    assert "bias=False" in repr(bare) and "bias" not in bare.state_dict()
    assert not any(hasattr(layer, name) for name in ("fuse", "reparameterize", "switch_to_deploy")), "a parent would use them in its place"


def halve(layer: ButterflyLinear) -> None:
    layer.half().double()


def write_flat_buffer(layer: ButterflyLinear) -> None:
    own = [*layer.parameters()]
    flat = torch.cat([each.detach().flatten() for each in own])
    for each, part in zip(own, flat.split([each.numel() for each in own]), strict=True):
        each.data = part.view_as(each)
    layer(torch.ones(600, 384, dtype=torch.float64))
    flat.mul_(2)


def write_by_numpy(layer: ButterflyLinear) -> None:
    for parameter in layer.parameters():
        array = parameter.detach().numpy()
        array *= 2


@pytest.mark.parametrize("write", [halve, write_flat_buffer, write_by_numpy])
def test_on_the_cpu_no_write_is_missed(write: Callable[[ButterflyLinear], None]) -> None:
    layer = ButterflyLinear(SQUARE, dtype=torch.float64).requires_grad_(False)
    x = torch.ones(600, 384, dtype=torch.float64)  # as many rows as take chunks
    before = layer(x)
    write(layer)
    check(layer, FP64, 600)
    assert not torch.equal(layer(x), before)


@pytest.mark.parametrize("trains", [True, False])
def test_tensors_may_be_swapped_after_a_forward(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    layer = ButterflyLinear(SQUARE).requires_grad_(trains)
    layer(torch.ones(600, 384))
    before = layer.bias
    layer.double()
    check(layer, FP64, 600)
    layer.load_state_dict(ButterflyLinear(SQUARE).double().state_dict())
    check(layer, FP64, 600)
    assert layer.bias is before


@pytest.mark.parametrize("arch", ["gonon", "monarch", "lowrank"])
@pytest.mark.parametrize(("out_features", "in_features"), [(384, 384), (1536, 384), (384, 1536)])
def test_starts_with_the_variance_of_a_dense_layer(arch: str, out_features: int, in_features: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2000, in_features)
    layer, dense = ButterflyLinear(named(arch, out_features, in_features)), nn.Linear(in_features, out_features)
    with torch.no_grad():
        ratio = layer(x).std() / dense(x).std()
    assert 0.9 < ratio < 1.1  # the spread of an estimate over 2000 rows is below 0.05
    assert layer.bias is not None
    bound = 1 / math.sqrt(in_features)
    assert 0.9 * bound < layer.bias.abs().max() <= bound


def test_copies_pickles_and_states_are_independent() -> None:
    layer, other, file = ButterflyLinear(SMALL), ButterflyLinear(SMALL), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    x = make_input(600, 8, FP32)
    with torch.no_grad():
        other(x)
        other.load_state_dict(layer.state_dict())
        twins = [copy.deepcopy(layer), torch.load(file, weights_only=False), other]
        before = layer(x)
        for parameter in layer.parameters():
            parameter.zero_()
        for twin in twins:
            assert_equal(twin(x), before)


def test_what_cannot_be_multiplied_is_one_sentence() -> None:
    with pytest.raises(RuntimeError, match="same dtype"):
        nn.Linear(8, 16)(torch.ones(3, 8).half())
    with pytest.raises(RuntimeError, match=r"same dtype and device, but got torch\.float16 on cpu and torch\.float32 on cpu"):
        ButterflyLinear(SMALL)(torch.ones(3, 8).half())
    with pytest.raises(PatternError, match="take rows of 8 features"):
        ButterflyLinear(SMALL)(torch.ones(3, 9))
    with pytest.raises(BackendError, match="there is no backend 'fast'"):
        ButterflyLinear(SMALL, backend="fast")(torch.ones(3, 8))
    with pytest.raises(BackendError, match="'chunked' cannot run this: it gives no gradients"):
        ButterflyLinear(SMALL, backend="chunked")(torch.ones(3, 8))


def test_factors_that_are_parametrized_are_used() -> None:
    layer, x = ButterflyLinear(SMALL, bias=False), make_input(9, 8, FP32)
    with torch.no_grad():
        before = layer(x)

    class Doubled(nn.Module):
        def forward(self, factor: torch.Tensor) -> torch.Tensor:
            return 2 * factor

    nn.utils.parametrize.register_parametrization(layer.factors, "0", Doubled())
    with torch.no_grad():
        assert_equal(layer(x), 2 * before)
