"""The operator on the GPU: autocast, switches, compilation, export, threads, devices, sizes."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops import Problem, explain, ks_linear
from flysurgery.ops.multiply import ks_linear_group
from flysurgery.patterns import Architecture
from tests.gpu.gpu_layer import DEEP, SQUARE, Layer, check, check_product, rows_of
from tests.support.oracle import product
from tests.support.problems import make_factors, make_vector
from tests.support.tolerance import BF16, FP16, FP32_BY_FP16_PAIRS, Arithmetic, assert_comparable, assert_equal

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


@pytest.mark.parametrize(("mode", "with_bias"), [(FP32_BY_FP16_PAIRS, True), (FP16, False), (BF16, True)])
def test_groups_equal_their_parts(mode: Arithmetic, with_bias: bool) -> None:
    linears = [[factor * (n + 1) for factor in make_factors(SQUARE, mode, device="cuda")] for n in range(3)]
    biases = [make_vector(SQUARE.out_features, mode, device="cuda") * n if with_bias else None for n in range(3)]
    for rows in (0, 1, 700):
        x = rows_of(rows, mode)
        out = ks_linear_group(x, linears, biases, backend="cuda")
        assert out.shape == (rows, 3 * SQUARE.out_features)
        for part, factors, bias in zip(out.chunk(3, dim=-1), linears, biases, strict=True):
            zero = torch.zeros(SQUARE.out_features, device="cuda", dtype=mode.dtype)
            check_product(part, x, factors, zero if bias is None else bias)
            if rows == 700:
                assert_comparable(part, ks_linear(x, factors, bias, backend="bmm"), x, factors, bias, mode)


def test_threads_that_have_not_used_the_device() -> None:
    layer, x = Layer().requires_grad_(False), rows_of(64)
    expected = layer(x)
    torch.cuda.synchronize()
    outs: list[Tensor] = []
    threads = [threading.Thread(target=lambda: outs.append(layer(x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(outs) == 4
    for out in outs:
        assert_equal(out, expected)


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
