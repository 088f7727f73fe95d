"""The layers as modules: what they compute, how they start, and that they can be handled and compiled like any others."""

import copy
import io
import math
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from flysurgery.errors import BackendError, PatternError
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.patterns import Architecture, named
from tests.support.problems import ARCHITECTURES, make_input
from tests.support.tolerance import FP32, OF_DTYPE, Arithmetic, assert_bounded, assert_equal

SQUARE = ARCHITECTURES[0]
SMALL = Architecture.of((1, 8, 6, 2), (2, 6, 4, 1))


def check(layer: ButterflyLinear, mode: Arithmetic) -> None:
    x = make_input(40, layer.in_features, mode)
    factors = [factor.detach() for factor in layer.factors]
    bias = None if layer.bias is None else layer.bias.detach()
    with torch.no_grad():
        assert_bounded(layer(x), x, factors, bias, mode, bias_apart=True)
    assert_bounded(layer(x).detach(), x, factors, bias, mode, bias_apart=True)


def written_by_numpy(layer: ButterflyLinear) -> None:
    for parameter in layer.parameters():
        array = parameter.detach().numpy()
        array *= 2  # of which nothing tells PyTorch


def swapped(layer: ButterflyLinear) -> None:
    bias = layer.bias
    with patch.object(torch.__future__, "_swap_module_params_on_conversion", True):
        layer.double()
        layer.load_state_dict(ButterflyLinear(layer.architecture, bias is not None).double().state_dict())
    assert layer.bias is bias


def emptied(layer: ButterflyLinear) -> None:
    layer.to("meta")
    assert layer(torch.empty(3, layer.in_features, device="meta")).shape == (3, layer.out_features)
    layer.to_empty(device="cpu").reset_parameters()


def loaded(layer: ButterflyLinear) -> ButterflyLinear:
    trains = layer.factors[0].requires_grad  # those that do are multiplied in another way, whose bits may differ
    other = ButterflyLinear(layer.architecture, layer.bias is not None).requires_grad_(trains)
    other(torch.zeros(3, layer.in_features))
    other.load_state_dict(layer.state_dict())
    return other


def pickled(layer: ButterflyLinear) -> ButterflyLinear:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Doubled(nn.Module):
    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return 2 * factor


CHANGES: dict[str, Callable[[ButterflyLinear], object]] = {
    **{str(dtype): lambda layer, dtype=dtype: layer.to(dtype) for dtype in OF_DTYPE},
    **{change.__name__: change for change in (written_by_numpy, swapped, emptied, loaded, pickled, copy.deepcopy)},
    "parametrized": lambda layer: nn.utils.parametrize.register_parametrization(layer.factors, "0", Doubled()) and None,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("architecture", [SQUARE, *ARCHITECTURES[5:]], ids=str)
def test_computes_the_product_of_the_factors_that_it_has(architecture: Architecture, change: str) -> None:
    """Copies share nothing with it. Rows are as many as take chunks."""
    for bias, trains in ((True, True), (True, False), (False, False)):
        layer = ButterflyLinear(architecture, bias).requires_grad_(trains)
        x = make_input(600, architecture.in_features, FP32)
        before = layer(x).detach()
        made = CHANGES[change](layer)
        if isinstance(made, ButterflyLinear) and made is not layer:
            for parameter in layer.parameters():
                parameter.data.zero_()
            assert_equal(made(x), before)
        layer = made if isinstance(made, ButterflyLinear) else layer
        check(layer, OF_DTYPE[layer.factors[0].dtype])


def test_it_says_what_it_is_and_names_parameters_as_checkpoints_hold_them() -> None:
    layer = ButterflyLinear(SQUARE)
    assert (layer.in_features, layer.out_features, layer.architecture) == (384, 384, SQUARE)
    assert str(SQUARE) in repr(layer)
    shapes = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    assert shapes == {"factors.0": (1, 192, 48, 2), "factors.1": (2, 48, 192, 1), "bias": (384,)}
    assert "bias" not in ButterflyLinear(SQUARE, bias=False).state_dict()
    assert not any(hasattr(layer, name) for name in ("fuse", "reparameterize", "switch_to_deploy")), "a parent would use them in its place"


@pytest.mark.parametrize("arch", ["gonon", "monarch", "lowrank"])
@pytest.mark.parametrize(("out_features", "in_features"), [(384, 384), (1536, 384), (384, 1536)])
def test_starts_with_the_variance_of_a_dense_layer(arch: str, out_features: int, in_features: int) -> None:
    starts = []
    for seed in (1, 0, 0):
        torch.manual_seed(seed)
        starts.append(ButterflyLinear(named(arch, out_features, in_features)))
    _, other, layer = starts
    assert torch.equal(layer.factors[0], other.factors[0]) and not torch.equal(layer.factors[0], starts[0].factors[0])
    x, dense = torch.randn(2000, in_features), nn.Linear(in_features, out_features)
    with torch.no_grad():
        ratio = layer(x).std() / dense(x).std()
    assert 0.9 < ratio < 1.1  # the spread of an estimate over 2000 rows is below 0.05
    assert layer.bias is not None
    bound = 1 / math.sqrt(in_features)
    assert 0.9 * bound < layer.bias.abs().max() <= bound


@pytest.mark.parametrize("dense", [True, False])
def test_the_outputs_of_parts_are_joined_in_order_under_their_names_and_hooks_of_the_parts_run(dense: bool) -> None:
    key = nn.Linear(8, 16) if dense else ButterflyLinear(SMALL)
    children: dict[str, ButterflyLinear | nn.Linear] = {"q": ButterflyLinear(SMALL), "k": key, "v": ButterflyLinear(SMALL, bias=False)}
    split, x, called = SplitLinear(children), make_input(5, 8, FP32), []
    assert_equal(split(x).detach(), torch.cat([child(x) for child in children.values()], dim=1).detach())
    own = ["k.weight"] if dense else ["k.factors.0", "k.factors.1"]
    assert sorted(split.state_dict()) == sorted(["q.bias", "q.factors.0", "q.factors.1", "k.bias", *own, "v.factors.0", "v.factors.1"])
    for name, child in children.items():
        child.register_forward_hook(lambda module, inputs, output, name=name: called.append(name))
    split(x)
    assert called == ["q", "k", "v"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ButterflyLinear(SMALL, backend="fast")(torch.ones(3, 8)), "there is no backend 'fast'"),
        (lambda: ButterflyLinear(SMALL, backend="chunked")(torch.ones(3, 8)), "'chunked' cannot run this: it gives no gradients"),
        (lambda: SplitLinear({}), "at least one part"),
        (lambda: SplitLinear({"q": ButterflyLinear(SMALL), "k": nn.Linear(9, 3)}), "'q' takes 8, 'k' takes 9"),
    ],
)
def test_backends_and_parts_that_do_not_go_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises((BackendError, PatternError), match=words):
        make()


@pytest.mark.parametrize("autocast", [False, True])
def test_a_step_is_one_graph_made_once(autocast: bool) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    split = SplitLinear({name: ButterflyLinear(Architecture.of((1, 4, 2, 2), (2, 2, 4, 1))) for name in "qkv"})
    model = nn.Sequential(ButterflyLinear(SMALL), nn.GELU(), ButterflyLinear(Architecture.of((1, 4, 6, 2), (2, 6, 8, 1))), split)
    x = torch.randn(5, 8)
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
