"""The operator on the GPU: gradients, autocast, switches, compilation, threads, sizes; packed weights, streams and graphs."""

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.gpu import weight_space
from flysurgery.gpu.weight_cache import forget_derived
from flysurgery.ops import Problem, explain
from flysurgery.ops.multiply import ks_linear_group
from flysurgery.patterns import Architecture, gonon, monarch
from tests.gpu.gpu_layer import DEEP, SQUARE, Layer, check, rows_of
from tests.gpu.test_autograd import reference
from tests.support.blocks import check_replay
from tests.support.oracle import product
from tests.support.tolerance import BF16, FP32_BY_FP16_PAIRS, Arithmetic, assert_equal

pytestmark = pytest.mark.gpu


def test_the_backend_is_chosen_by_default() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert explain(Problem(SQUARE, 25088, dtype, "cuda", bias=True)).choice == "cuda"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("linears", [1, 3])
def test_autocast_rounds_as_linear_does(dtype: torch.dtype, linears: int) -> None:
    layers, x = [Layer(mode=FP32_BY_FP16_PAIRS) for _ in range(linears)], rows_of(64, FP32_BY_FP16_PAIRS)
    factors, biases = [tuple(layer.factors) for layer in layers], [layer.bias for layer in layers]
    with torch.autocast("cuda", dtype):
        out = ks_linear_group(x, factors, biases, backend="cuda")
    assert out.dtype == dtype
    for part, layer in zip(out.chunk(linears, dim=-1), layers, strict=True):
        check(part, layer, x.to(dtype))
    out.float().square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for layer in layers for parameter in layer.parameters())
    with torch.autocast("cuda", dtype):
        direct = torch.ops.flysurgery.ks_linear(x, list(factors[0]), [biases[0]], 1, "fp32")
    assert_equal(direct, out.chunk(linears, dim=-1)[0])


def test_the_switches_for_tf32_are_obeyed() -> None:
    layer, x = Layer(mode=FP32_BY_FP16_PAIRS).requires_grad_(False), rows_of(700, FP32_BY_FP16_PAIRS)
    truth = product(x, tuple(layer.factors), layer.bias)
    errors = {}
    before = torch.get_float32_matmul_precision()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    try:
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            for name, run in (("eager", layer), ("compiled", compiled)):
                errors[name, precision] = ((run(x) - truth).square().mean() / truth.square().mean()).sqrt().item()
    finally:
        torch.set_float32_matmul_precision(before)
    for name in ("eager", "compiled"):
        assert errors[name, "highest"] < 1e-6 < 1e-5 < errors[name, "high"] < 1e-3


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("mode", [FP32_BY_FP16_PAIRS, BF16], ids=lambda mode: mode.name)
def test_compiles_whole_and_for_any_number_of_rows(mode: Arithmetic) -> None:
    layer = Layer(mode=mode)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for rows in (64, 129, 1):
        x, y = (rows_of(rows, mode).requires_grad_() for _ in range(2))
        out, expected = compiled(x), layer(y)
        assert_equal(out, expected)
        dy = torch.ones_like(out)
        left = torch.autograd.grad(out, (x, *layer.parameters()), dy)
        right = torch.autograd.grad(expected, (y, *layer.parameters()), dy)
        for ours, theirs in zip(left[:-1], right[:-1], strict=True):
            assert_equal(ours, theirs)


def test_a_second_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, there is {torch.cuda.device_count()}")
    layer, x = Layer(), rows_of(64)
    there, far = Layer(device="cuda:1"), rows_of(64, device="cuda:1")
    far.requires_grad_()
    assert torch.cuda.current_device() == 0
    out = there(far)
    out.sum().backward()
    assert_equal(out.cpu(), layer(x).cpu())
    assert far.grad is not None and far.grad.device.index == 1
    with pytest.raises(BackendError, match="device"):
        there(x)


@pytest.mark.parametrize("architecture", [SQUARE, DEEP], ids=str)
@torch.no_grad()
def test_more_than_two_to_the_31_elements(architecture: Architecture) -> None:
    layer, features = Layer(architecture), architecture.in_features
    rows = (1 << 31) // features + 1000
    if torch.cuda.mem_get_info()[0] < 8 * rows * features:
        pytest.skip("needs 17 GB of device memory")
    x = torch.randn(997, features, device="cuda", dtype=torch.float16).repeat(-(-rows // 997), 1)[:rows]
    out = layer(x)
    assert_equal(out[-997:], layer(x[-997:]))
    assert_equal(out[:997], layer(x[:997]))


CASES = [(gonon(384, 384), 3), (monarch(384, 384), 3), (gonon(1536, 384), 1), (gonon(384, 1536), 1), (DEEP, 1)]
GROUPS = [pytest.param(*case, id=f"{case[1]}x{case[0]}") for case in CASES]


def draw(shape: tuple[int, ...], share: float, seed: int) -> Tensor:
    """Ones, zeros and minus ones; zeros make up all but a share."""
    generator = torch.Generator("cuda").manual_seed(seed)
    signs = torch.randint(0, 2, shape, generator=generator, device="cuda") * 2 - 1
    return signs * (torch.rand(shape, generator=generator, device="cuda") < share)


def gradients(found: Tensor, leaves: Sequence[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(found, leaves, dy.to(found.dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("architecture", "linears"), GROUPS)
def test_groups_and_their_gradients_are_exact(architecture: Architecture, linears: int, dtype: torch.dtype) -> None:
    shapes = [pattern.factor_shape for _ in range(linears) for pattern in architecture]
    for rows in (1, 517):
        x, dy = draw((rows, architecture.in_features), 0.5, 0), draw((rows, linears * architecture.out_features), 0.25, 200)
        drawn = [x, *(draw(shape, 0.2, seed) for seed, shape in enumerate(shapes, 1))]
        drawn += [draw((architecture.out_features,), 0.5, 100 + n) for n in range(linears)]
        ours, exact = ([each.to(kind).requires_grad_() for each in drawn] for kind in (dtype, torch.float64))
        groups = [ours[1 + n : 1 + n + len(architecture)] for n in range(0, len(shapes), len(architecture))]
        out = ks_linear_group(ours[0], groups, ours[1 + len(shapes) :], backend="cuda")
        truth = reference(exact[0], exact[1 : 1 + len(shapes)], exact[1 + len(shapes) :], linears)
        for left, right in zip((out, *gradients(out, ours, dy)), (truth, *gradients(truth, exact, dy)), strict=True):
            assert float(right.abs().max()) <= 2048, "beyond it, halves do not hold all whole numbers"
            assert left.dtype == dtype
            assert_equal(left, right)


def test_two_runs_give_equal_bits() -> None:
    layers, x, dy = [Layer() for _ in range(3)], rows_of(4096).requires_grad_(), torch.randn(4096, 3 * 384, device="cuda")
    leaves = [x, *(parameter for layer in layers for parameter in layer.parameters())]

    def once() -> tuple[Tensor, ...]:
        out = ks_linear_group(x, [tuple(layer.factors) for layer in layers], [layer.bias for layer in layers], backend="cuda")
        return gradients(out, leaves, dy)

    assert all(map(torch.equal, once(), once()))


@torch.no_grad()
def test_other_streams_wait_for_the_packing() -> None:
    x = rows_of(64)
    for _ in range(20):
        layer = Layer()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        torch.cuda._sleep(2_000_000)
        here = layer(x)  # packs behind the sleeping kernel
        with torch.cuda.stream(side):
            there = layer(x)
        torch.cuda.synchronize()
        assert_equal(there, here)


@pytest.mark.parametrize("architecture", [SQUARE, DEEP], ids=str)
def test_inference_in_a_graph(architecture: Architecture) -> None:
    layer, x = Layer(architecture).requires_grad_(False), rows_of(129, architecture=architecture)
    check_replay(lambda: layer(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    x.copy_(-rows_of(129, architecture=architecture))
    graph.replay()
    check(out, layer, x)
    layer.factors[0].mul_(2)
    layer(x)  # a call outside brings new weights to the graph
    graph.replay()
    check(out, layer, x)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("mode", [FP32_BY_FP16_PAIRS, BF16], ids=lambda mode: mode.name)
def test_compiled_graphs_follow_training(mode: Arithmetic) -> None:
    weight_space._table.cache_clear()  # it must not be made in the graph's memory
    layer, x = Layer(mode=mode), rows_of(300, mode)
    reference = copy.deepcopy(layer)
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    for run, module in ((compiled, layer), (reference, reference)):
        optimizer = torch.optim.SGD(module.parameters(), 0.05)
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad()  # the gradients are memory of the graph, which the next step writes anew
            run(x).square().mean().backward()
            optimizer.step()
    for index, (ours, theirs) in enumerate(zip(layer.factors, reference.factors, strict=True)):
        assert not torch.equal(ours, Layer(mode=mode).factors[index])
        assert_equal(ours, theirs)


def test_replays_that_train_are_missed_until_forgotten() -> None:
    layer, x = Layer(mode=FP32_BY_FP16_PAIRS), rows_of(64, FP32_BY_FP16_PAIRS)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        layer.factors[0].mul_(-2)
    with torch.no_grad():
        before = layer(x)
        graph.replay()
        assert_equal(layer(x), before)
        forget_derived()
        check(layer(x), layer, x)


@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_compiled_graphs_keep_their_packed_weights() -> None:
    layers = [Layer().requires_grad_(False) for _ in range(4)]
    compiled = [torch.compile(layer, mode="reduce-overhead", fullgraph=True) for layer in layers]
    for rows in (64, 129, 64, 300, 129):
        x = rows_of(rows)
        for layer, run in zip(layers, compiled, strict=True):
            torch.compiler.cudagraph_mark_step_begin()
            check(run(x).clone(), layer, x)
            torch.empty(1 << 20, device="cuda").fill_(float("nan"))
            check(run(x).clone(), layer, x)
