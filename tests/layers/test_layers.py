"""The layers as modules: what they compute, how they start, and that they can be handled and compiled like any others."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from flysurgery.errors import BackendError, PatternError
from flysurgery.factors import factors_to_dense
from flysurgery.layers import ButterflyConv, ButterflyLinear, SplitLinear
from flysurgery.patterns import Architecture, monarch, named
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


def test_on_the_cpu_no_write_is_missed() -> None:
    """Not even one by NumPy, of which nothing tells PyTorch."""
    layer = ButterflyLinear(SQUARE, dtype=torch.float64).requires_grad_(False)
    x = torch.ones(600, 384, dtype=torch.float64)  # as many rows as take chunks
    before = layer(x)
    for parameter in layer.parameters():
        array = parameter.detach().numpy()
        array *= 2
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


def test_backends_that_cannot_multiply_are_refused() -> None:
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


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_against_a_dense_convolution(axes: int) -> None:
    torch.manual_seed(0)
    layer = ButterflyConv(monarch(16, 8, nblocks=2), axes=axes)
    dense = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1](8, 16, 1)
    with torch.no_grad():  # small integers, whose products and sums are exact in any order
        for parameter in layer.parameters():
            parameter.copy_(torch.randint(-3, 4, parameter.shape))
        dense.weight.copy_(factors_to_dense(list(layer.factors))[(..., *(None,) * axes)])
        assert dense.bias is not None and layer.bias is not None
        dense.bias.copy_(layer.bias)
        x = torch.randint(-3, 4, (2, 8, *(3, 4, 5)[:axes])).float()
        for image in (x, x[0], x.transpose(0, 1).contiguous().transpose(0, 1)):
            assert_equal(layer(image), dense(image))
        if axes == 2:
            assert layer(x).is_contiguous()
            assert layer(x.to(memory_format=torch.channels_last)).is_contiguous(memory_format=torch.channels_last)


def parts() -> dict[str, ButterflyLinear | nn.Linear]:
    return {"q": ButterflyLinear(SMALL), "k": nn.Linear(8, 3), "v": ButterflyLinear(SMALL, bias=False)}


@pytest.mark.parametrize("shape", [(5,), (2, 3), (0,), ()])
def test_joins_the_outputs_in_order(shape: tuple[int, ...]) -> None:
    children = parts()
    split = SplitLinear(children)
    x = make_input(torch.Size(shape).numel(), 8, FP32).view(*shape, 8)
    out = split(x)
    assert out.shape == (*shape, 35)
    start = 0
    for child in children.values():
        assert_equal(out[..., start : start + child.out_features].detach(), child(x).detach())
        start += child.out_features
    assert (split.in_features, split.out_features) == (8, 35) and "in_features=8, out_features=35" in repr(split)
    names = ["q.bias", "q.factors.0", "q.factors.1", "k.weight", "k.bias", "v.factors.0", "v.factors.1"]
    assert sorted(split.state_dict()) == sorted(names)


@pytest.mark.parametrize("split", [SplitLinear(parts()), SplitLinear({name: ButterflyLinear(SMALL) for name in "qkv"})])
def test_hooks_of_the_parts_run(split: SplitLinear) -> None:
    called = []
    for name, child in split.named_children():
        child.register_forward_hook(lambda module, inputs, output, name=name: called.append(name))
    split(torch.ones(2, 8))
    assert called == ["q", "k", "v"]


def test_parts_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(PatternError, match="at least one part"):
        SplitLinear({})
    with pytest.raises(PatternError, match="'q' takes 8, 'k' takes 9"):
        SplitLinear({"q": ButterflyLinear(SMALL), "k": nn.Linear(9, 3)})


NARROW = Architecture.of((1, 4, 6, 2), (2, 6, 8, 1))


def small_model() -> nn.Module:
    split = SplitLinear({name: ButterflyLinear(Architecture.of((1, 4, 2, 2), (2, 2, 4, 1))) for name in "qkv"})
    return nn.Sequential(ButterflyLinear(SMALL), nn.GELU(), ButterflyLinear(NARROW), split)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_step_is_one_graph_made_once(autocast: bool) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = small_model(), torch.randn(5, 8)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found, expected = compiled(x), model(x)
        torch.testing.assert_close(found, expected, rtol=2e-2 if autocast else 1e-5, atol=2e-2 if autocast else 1e-6)
        found.float().square().mean().backward()
        optimizer.step()
    assert counter.frame_count == 1
