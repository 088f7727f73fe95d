"""Dense layers whose weights stream, on the GPU: against float64, beside PyTorch's own operators in the same dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flysurgery.gpu.dense import run_dense, run_dense_moments, streamed_for
from flysurgery.gpu.kernel import device_arch
from tests.support.oracle import ACTIVATIONS

pytestmark = pytest.mark.gpu

K = 1.25
"""Level 2 of the tolerance policy, in half precision."""
HALVES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
SIZES = [(768, 768), (768, 1152), (1024, 1024)]
ROWS = 8451


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)
    if device_arch(0) != "sm_90a":
        pytest.skip("weights stream on compute capability 9.0")


def normal(*shape: int, dtype: torch.dtype, deviation: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * deviation).to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("in_features", "out_features"), SIZES)
@pytest.mark.parametrize(("activation", "with_residual"), [("none", True), ("gelu", False), ("silu", True)])
def test_as_accurate_as_pytorch(dtype: torch.dtype, in_features: int, out_features: int, activation: str, with_residual: bool) -> None:
    assert streamed_for(ROWS, in_features, out_features, HALVES[dtype], 0) is not None
    x = normal(ROWS, in_features + 64, dtype=dtype)[:, :in_features]
    weight, bias = normal(out_features, in_features, dtype=dtype, deviation=in_features**-0.5), normal(out_features, dtype=dtype)
    scale = normal(out_features, dtype=dtype)
    residual = normal(ROWS, out_features + 8, dtype=dtype)[:, :out_features] if with_residual else None
    out = run_dense(x, weight, bias, activation, residual, scale, HALVES[dtype])

    def plain(dtype: torch.dtype) -> Tensor:
        y = ACTIVATIONS[activation](scale.to(dtype) * torch.nn.functional.linear(x.to(dtype), weight.to(dtype), bias.to(dtype)))
        return y if residual is None else y + residual.to(dtype)

    truth = plain(torch.float64)
    assert out.dtype == dtype and bool(out.isfinite().all())
    error, allowed = (float((value.double() - truth).square().mean().sqrt()) for value in (out, plain(dtype)))
    assert error <= K * allowed, f"rms error {error:.3g}, PyTorch's is {allowed:.3g}"


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("in_features", "out_features"), SIZES)
def test_moments_are_those_of_the_result(dtype: torch.dtype, in_features: int, out_features: int) -> None:
    """Also of rows whose mean is far larger than their deviations, and of rows with one element that is."""
    x, weight = normal(ROWS, in_features, dtype=dtype), normal(out_features, in_features, dtype=dtype, deviation=in_features**-0.5)
    residual = normal(ROWS, out_features, dtype=dtype)
    residual[::3] += 100
    residual[1::3, 0] += 100
    y, moments = run_dense_moments(x, weight, None, residual, None, HALVES[dtype])
    assert torch.equal(y, run_dense(x, weight, None, "none", residual, None, HALVES[dtype]))
    parts = y.double().unflatten(1, (moments.shape[1], -1))
    mean = parts.mean(dim=2)
    squares = (parts - mean[..., None]).square().sum(dim=2)
    assert float((moments[..., 0] - mean).abs().max()) < 1e-4
    assert float((moments[..., 1] / squares - 1).abs().max()) < 1e-3


def test_every_row_is_there() -> None:
    """Of integers, whose products are exact: more rows than tiles, and fewer in the last tile."""
    for rows in (6337, 25216, 25217):
        x = torch.randint(-2, 3, (rows, 768), device="cuda").half()
        weight = torch.randint(-1, 2, (768, 768), device="cuda").half()
        assert torch.equal(run_dense(x, weight, None, "none", x, None, "fp16"), (x.float() @ weight.float().T + x.float()).half())


def test_weights_that_change_are_seen_and_graphs_replay() -> None:
    x, weight = (torch.randint(-2, 3, (rows, 768), device="cuda").half() for rows in (ROWS, 768))
    first = run_dense(x, weight, None, "none", None, None, "fp16")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run_dense(x, weight, None, "none", None, None, "fp16")
    graph.replay()
    assert torch.equal(replayed, first)
    weight.mul_(2)
    assert torch.equal(run_dense(x, weight, None, "none", None, None, "fp16"), 2 * first)
