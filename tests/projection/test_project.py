"""What goes into a projection and what comes out: dtypes, refusals, the report."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flysurgery.errors import PatternError, ProjectionError
from flysurgery.patterns import Architecture, dense, gonon, monarch, square_dyadic
from flysurgery.projection import project
from tests.patterns.brute_force import blocks, support
from tests.patterns.strategies import pairs, patterns
from tests.projection.oracle import EXACT, best_error, dense_factor, dense_product, random_matrix

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@given(patterns(), st.integers(0, 2**31))
def test_one_factor_keeps_exactly_the_entries_on_its_support(pattern, seed: int) -> None:
    architecture = Architecture((pattern,))
    matrix = random_matrix(architecture, seed)
    projection = project(matrix, architecture)
    kept = matrix.numpy() * support(pattern)
    assert np.array_equal(dense_factor(projection.factors[0]), kept)
    lost = np.linalg.norm(matrix.numpy() - kept) / np.linalg.norm(matrix.numpy())
    assert projection.relative_error == pytest.approx(lost, rel=EXACT)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_is_that_of_the_stored_factors(dtype: torch.dtype) -> None:
    architecture = monarch(48, 72, 3)
    weight = random_matrix(architecture).to(dtype)
    projection = project(weight, architecture)
    assert all(factor.dtype == dtype and factor.is_contiguous() for factor in projection.factors)
    matrix = weight.double().numpy()
    measured = np.linalg.norm(matrix - dense_product(projection.factors)) / np.linalg.norm(matrix)
    assert projection.relative_error == pytest.approx(measured, rel=EXACT)
    assert projection.energy_kept == pytest.approx(1 - measured**2, rel=EXACT)
    optimum = best_error(weight, architecture) / np.linalg.norm(matrix)
    rounding = 2 * torch.finfo(dtype).eps  # two factors, each rounded by at most eps/2 an entry
    assert optimum * (1 - EXACT) <= measured <= optimum + rounding


@given(pairs(), st.integers(0, 2**31))
def test_block_errors_are_those_of_the_blocks_and_add_up(architecture: Architecture, seed: int) -> None:
    matrix = random_matrix(architecture, seed)
    projection = project(matrix, architecture)
    residual = matrix.numpy() - dense_product(projection.factors)
    total = np.linalg.norm(residual)
    by_block = projection.block_errors.numpy()
    assert np.linalg.norm(by_block) == pytest.approx(total, rel=EXACT, abs=EXACT)
    left, right = architecture
    for rows, columns, _ in blocks(architecture):
        row_class = rows[0] // (left.b * left.d) * left.d + rows[0] % left.d
        column_class = columns[0] // (right.c * right.d) * right.d + columns[0] % right.d
        assert by_block[row_class, column_class] == pytest.approx(np.linalg.norm(residual[np.ix_(rows, columns)]), rel=EXACT, abs=EXACT)


def test_block_errors_of_a_deep_product_add_up() -> None:
    matrix = random_matrix(square_dyadic(16))
    projection = project(matrix, square_dyadic(16))
    assert projection.block_errors.shape == (8, 8)
    assert float(projection.block_errors.norm()) == pytest.approx(projection.relative_error * float(matrix.norm()), rel=EXACT)


@pytest.mark.parametrize("architecture", [dense(6, 4), monarch(6, 4, 2), square_dyadic(8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_weight_is_neither_changed_nor_shared(architecture: Architecture, dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(random_matrix(architecture).to(dtype))
    before = weight.detach().clone()
    factors = project(weight, architecture).factors
    assert not any(factor.requires_grad for factor in factors)
    for factor in factors:
        factor.zero_()
    assert torch.equal(weight, before)


def test_the_layout_of_the_weight_does_not_matter() -> None:
    architecture = gonon(48, 192)
    weight = random_matrix(architecture)
    transposed = weight.mT.contiguous().mT
    for factor, other in zip(project(weight, architecture).factors, project(transposed, architecture).factors, strict=True):
        assert torch.equal(factor, other)


@pytest.mark.parametrize("magnitude", [1e-200, 1e200])
def test_errors_of_extreme_weights_are_measured_without_overflow(magnitude: float) -> None:
    architecture = monarch(16, 16, 4)
    weight = random_matrix(architecture)
    usual, extreme = project(weight, architecture), project(weight * magnitude, architecture)
    assert extreme.relative_error == pytest.approx(usual.relative_error, rel=EXACT)
    assert (extreme.block_errors / magnitude).numpy() == pytest.approx(usual.block_errors.numpy(), rel=1e-8)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_entries_that_are_not_finite_are_counted_and_located(bad: float) -> None:
    weight = torch.ones(8, 12, dtype=torch.bfloat16)
    weight[3, 7] = weight[3, 9] = weight[6, 0] = bad
    with pytest.raises(ProjectionError, match=rf"3 NaN or infinite entries of 96, the first {bad} at row 3, column 7"):
        project(weight, monarch(8, 12, 4))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.complex64, torch.bool])
def test_weights_that_are_not_real_floats_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ProjectionError, match=str(dtype)):
        project(torch.ones(8, 8, dtype=dtype), monarch(8, 8, 4))


def test_a_weight_without_values_is_refused() -> None:
    with pytest.raises(ProjectionError, match="meta device"):
        project(torch.ones(8, 8, device="meta"), monarch(8, 8, 4))


@pytest.mark.parametrize("shape", [(8, 12), (8,), (2, 8, 8)])
def test_a_weight_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(PatternError, match="8"):
        project(torch.ones(shape), monarch(8, 8, 4))


def test_the_time_is_that_of_this_call() -> None:
    assert 0.0 < project(torch.ones(8, 8), monarch(8, 8, 4)).seconds < 60.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_factors_return_to_the_device_of_the_weight() -> None:
    weight = random_matrix(monarch(48, 72, 3)).cuda()
    factors = project(weight, monarch(48, 72, 3)).factors
    expected = project(weight.cpu(), monarch(48, 72, 3)).factors
    assert all(factor.device == weight.device for factor in factors)
    assert all(torch.equal(factor.cpu(), other) for factor, other in zip(factors, expected, strict=True))
