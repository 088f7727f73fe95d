"""Gradients on the GPU, exact: products of small integers are whole numbers that even halves hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flysurgery.factors import ks_einsum
from flysurgery.ops.multiply import ks_linear_group
from flysurgery.patterns import Architecture, gonon, monarch
from tests.support.tolerance import assert_equal

pytestmark = pytest.mark.gpu

DEEP = Architecture.of((1, 64, 64, 4), (4, 32, 32, 2), (8, 32, 32, 1))
CASES = [(gonon(384, 384), 3), (monarch(384, 384), 3), (gonon(1536, 384), 1), (gonon(384, 1536), 1), (DEEP, 1)]
GROUPS = [pytest.param(*case, id=f"{case[1]}x{case[0]}") for case in CASES]


def draw(shape: tuple[int, ...], share: float, seed: int) -> Tensor:
    """Ones, zeros and minus ones; zeros make up all but a share."""
    generator = torch.Generator("cuda").manual_seed(seed)
    signs = torch.randint(0, 2, shape, generator=generator, device="cuda") * 2 - 1
    return signs * (torch.rand(shape, generator=generator, device="cuda") < share)


def tensors(
    architecture: Architecture, linears: int, rows: int, dtype: torch.dtype
) -> tuple[Tensor, list[list[Tensor]], list[Tensor], Tensor]:
    x = draw((rows, architecture.in_features), 0.5, 0).to(dtype)
    factors = [[draw(p.factor_shape, 0.2, 10 * n + k + 1).to(dtype) for k, p in enumerate(architecture)] for n in range(linears)]
    biases = [draw((architecture.out_features,), 0.5, 100 + n).to(dtype) for n in range(linears)]
    return x, factors, biases, draw((rows, linears * architecture.out_features), 0.25, 200).to(dtype)


def gradients(x: Tensor, factors: list[list[Tensor]], biases: list[Tensor], dy: Tensor, dtype: torch.dtype, *, ours: bool) -> list[Tensor]:
    x, *others = [tensor.to(dtype).requires_grad_() for tensor in (x, *(f for linear in factors for f in linear), *biases)]
    length = len(factors[0])
    groups = [others[start : start + length] for start in range(0, length * len(factors), length)]
    if ours:
        out = ks_linear_group(x, groups, others[length * len(factors) :], backend="cuda")
    else:
        parts = []
        for linear, bias in zip(groups, others[length * len(factors) :], strict=True):
            value = x
            for factor in reversed(linear):
                value = ks_einsum(value, factor)
            parts.append(value + bias)
        out = torch.cat(parts, dim=1)
    return list(torch.autograd.grad(out, (x, *others), dy.to(out.dtype)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("architecture", "linears"), GROUPS)
def test_gradients_are_exact(architecture: Architecture, linears: int, dtype: torch.dtype) -> None:
    for rows in (1, 517):
        x, factors, biases, dy = tensors(architecture, linears, rows, dtype)
        found = gradients(x, factors, biases, dy, dtype, ours=True)
        expected = gradients(x, factors, biases, dy, torch.float64, ours=False)
        assert max(float(tensor.abs().max()) for tensor in expected) <= 2048, "beyond it, halves do not hold all whole numbers"
        for left, right in zip(found, expected, strict=True):
            assert left.dtype == dtype
            assert_equal(left.double(), right)


def test_two_runs_give_equal_bits() -> None:
    architecture = gonon(384, 384)
    x, dy = torch.randn(4096, 384, device="cuda").half(), torch.randn(4096, 3 * 384, device="cuda").half()
    factors = [[torch.randn(p.factor_shape, device="cuda").half() for p in architecture] for _ in range(3)]
    biases = [torch.randn(384, device="cuda").half() for _ in range(3)]
    first, second = (gradients(x, factors, biases, dy, torch.float16, ours=True) for _ in range(2))
    for left, right in zip(first, second, strict=True):
        assert_equal(left, right)
