"""What readers of an ``nn.Linear`` meet: its weight, torch.fx, feature extractors, counters of operations."""

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from fvcore.nn import FlopCountAnalysis
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models.feature_extraction import create_feature_extractor

import flysurgery
from flysurgery.layers import ButterflyConv, ButterflyLinear, SplitLinear
from flysurgery.ops.backends.pytorch import ConvolutionBackend
from flysurgery.patterns import Architecture
from tests.support.tolerance import assert_equal

ARCHITECTURE = Architecture.of((1, 8, 6, 2), (2, 6, 4, 1))


def factors(bias: bool = True) -> ButterflyLinear:
    return ButterflyLinear(ARCHITECTURE, bias)


LAYERS: dict[str, Callable[[], Any]] = {
    "factors": factors,
    "no bias": lambda: factors(False),
    "parts": lambda: SplitLinear({"q": factors(), "k": nn.Linear(8, 5, bias=False), "v": factors()}),
    "parts of one kind": lambda: SplitLinear({name: factors() for name in "qkv"}),
    "parts without bias": lambda: SplitLinear({name: factors(False) for name in "qkv"}),
    **{f"{axes} axes": lambda axes=axes: ButterflyConv(ARCHITECTURE, axes=axes) for axes in (1, 2, 3)},
}


@pytest.mark.parametrize("name", LAYERS)
def test_it_computes_what_its_weight_and_bias_say_on_inputs_of_any_shape_and_layout(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    axes = getattr(layer, "axes", 0)
    function = (nn.functional.linear, nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)[axes]
    parameters = list(layer.parameters())
    for parameter in parameters:  # small integers, whose products and sums are exact in any order
        parameter.data = torch.randint(-3, 4, parameter.shape).double()
    x = torch.randint(-3, 4, (2, 8, *(3, 4, 5)[:axes]) if axes else (2, 3, 8)).double()
    for given in (x, x[0], x[:0], x.transpose(0, 1).contiguous().transpose(0, 1), *(() if axes else (x[0, 0],))):
        found, expected = layer(given), function(given, layer.weight, layer.bias)
        assert_equal(found.detach(), expected.detach())
        for one, other in zip(*(torch.autograd.grad(y.square().sum(), parameters) for y in (found, expected)), strict=True):
            assert_equal(one, other)
    if axes == 2:
        assert layer(x).is_contiguous()
        assert layer(x.to(memory_format=torch.channels_last)).is_contiguous(memory_format=torch.channels_last)
    assert layer.weight.shape == (layer.out_features, layer.in_features, *(1,) * axes)
    with pytest.raises(KeyError, match="weight"):
        layer.weight = nn.Parameter(torch.zeros(16, 8))


def multiplied_and_added(model: nn.Module, x: Tensor) -> float:
    """What fvcore counts: half as many as PyTorch, as it takes a product and its sum for one."""
    counter = FlopCountAnalysis(model, x)  # pyright: ignore[reportCallIssue]
    return counter.unsupported_ops_warnings(False).uncalled_modules_warnings(False).total()


def test_a_converted_model_is_traced_counted_and_looked_into() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10).eval()
    dense, x, counted, plan = copy.deepcopy(model), torch.randn(2, 3, 64, 64), [], flysurgery.plan(model, arch="monarch")
    for _ in range(2):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(x)
        counted.append(counter.get_total_flops())
        if len(counted) == 1:
            flysurgery.apply(plan, model)
    saved = len(x) * sum(layer.flops_before - layer.flops_after for layer in plan.replaced)
    assert counted[0] - counted[1] == saved
    assert 2 * (multiplied_and_added(dense, x) - multiplied_and_added(model, x)) == saved
    traced = torch.fx.symbolic_trace(model)
    names = [node.target.__name__ for node in traced.graph.nodes if node.op == "call_function" and "ks_" in node.target.__name__]
    assert names == 2 * ["ks_linear_group", "ks_linear", "ks_linear"]
    torch.testing.assert_close(traced(x), model(x))
    found = create_feature_extractor(model, {"blocks.0": "first", "blocks.1.mlp.fc1": "hidden"})(x)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {"first": (2, 17, 192), "hidden": (2, 17, 768)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_an_onnx_file_has_grouped_convolutions_and_the_outputs(tmp_path: Path) -> None:
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10).eval()
    flysurgery.apply(flysurgery.plan(model, arch="monarch"), model)
    file, x = tmp_path / "model.onnx", torch.randn(2, 3, 64, 64)
    torch.onnx.export(model, (x,), file, dynamo=False, input_names=["images"])
    nodes = Counter(node.op_type for node in onnx.load(file).graph.node)
    assert nodes["Conv"] == 1 + 2 * 5 * 2  # patches; two factors of q, k, v and both layers of the FFN in each block
    (found,) = runtime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, {"images": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 5, 8)])
@pytest.mark.parametrize("architecture", [ARCHITECTURE, Architecture.of((1, 8, 2, 3), (3, 2, 8, 1))], ids=str)
def test_grouped_convolutions_compute_the_product(architecture: Architecture, shape: tuple[int, ...]) -> None:
    layer = ButterflyLinear(architecture).double()
    x = torch.randn(*shape[:-1], layer.in_features, dtype=torch.float64)
    found = ConvolutionBackend().linear(x, tuple(layer.factors), layer.bias)
    torch.testing.assert_close(found, layer(x))
