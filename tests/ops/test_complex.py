"""Complex factors: every backend either multiplies them exactly, with gradients, or refuses in a sentence."""

import pytest
import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.factors import factors_to_dense
from flysurgery.ops import BACKENDS, Problem, explain, ks_linear
from flysurgery.patterns import Architecture
from tests.support.oracle import dense
from tests.support.problems import make_integers
from tests.support.tolerance import FP64, assert_equal

LAYER = Architecture.of((1, 8, 6, 2), (2, 6, 4, 1))
SHAPES = [pattern.factor_shape for pattern in LAYER]
ON_CPU = ("einsum", "bmm", "chunked", "dense")


def gaussian_integers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.complex(make_integers(shape, seed=seed, mode=FP64), make_integers(shape, seed=seed + 100, mode=FP64))


def assert_same(out: Tensor, expected: Tensor) -> None:
    assert_equal(torch.view_as_real(out.resolve_conj()), torch.view_as_real(expected.resolve_conj()))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("rows", [0, 5, 600])
@pytest.mark.parametrize("backend", [None, *ON_CPU])
def test_products_of_gaussian_integers_are_exact(backend: str | None, rows: int, dtype: torch.dtype) -> None:
    factors, bias = [gaussian_integers(shape, seed) for seed, shape in enumerate(SHAPES)], torch.arange(16) * 1j
    x = gaussian_integers((rows, 8), 7)
    left, right = (torch.complex(dense(factor.real), dense(factor.imag)) for factor in factors)
    expected = x @ (left @ right).T + bias
    assert_same(factors_to_dense(factors), left @ right)
    small = [factor.to(dtype) for factor in factors]
    found = ks_linear(x.to(dtype), small, bias.to(dtype), backend=backend)
    assert found.dtype == dtype
    assert_same(found.to(expected.dtype), expected)
    conjugate = ks_linear(x.to(dtype).conj(), [factor.conj() for factor in small], bias.to(dtype).conj(), backend=backend)
    assert_same(conjugate, found.conj())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(ks_linear(x.to(dtype), small, bias.to(dtype), backend=backend), found)


@pytest.mark.parametrize("backend", [None, "einsum", "bmm", "dense"])
def test_gradients_follow_pytorchs_convention(backend: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 8), (16,), *SHAPES]
    operands = [torch.randn(shape, generator=generator, dtype=torch.complex128).requires_grad_() for shape in shapes]
    assert torch.autograd.gradcheck(lambda x, bias, *factors: ks_linear(x, factors, bias, backend=backend), operands)


@pytest.mark.parametrize("name", ["cuda", "bsr", "sparse"])
def test_other_ways_refuse_in_a_sentence(name: str) -> None:
    problem = Problem(LAYER, 5, torch.complex64, "cuda")
    reason = BACKENDS[name].can_run(problem)
    assert reason is not None and "complex" in reason
    assert explain(problem).choice == "einsum"
    with pytest.raises(BackendError, match=rf"backend '{name}' cannot run this"):
        ks_linear(gaussian_integers((5, 8), 7), [gaussian_integers(shape, 0) for shape in SHAPES], backend=name)


@pytest.mark.gpu
def test_on_a_gpu_pytorchs_products_take_them() -> None:
    x, factors = gaussian_integers((5, 8), 7), [gaussian_integers(shape, seed) for seed, shape in enumerate(SHAPES)]
    found = ks_linear(x.to("cuda", torch.complex64), [factor.to("cuda", torch.complex64) for factor in factors])
    assert_same(found.cpu().to(torch.complex128), ks_linear(x, factors))
