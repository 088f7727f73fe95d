"""The projection to any number of factors: exact where a product exists, the optimum for two factors, bounded for more."""

from __future__ import annotations

import subprocess
import sys
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flysurgery.errors import PatternError, ProjectionError
from flysurgery.factors import bit_reversal
from flysurgery.ops import ks_linear
from flysurgery.patterns import (
    Architecture,
    Pattern,
    deformable,
    gonon,
    kaleidoscope,
    low_rank,
    monarch,
    product_pattern,
    square_dyadic,
)
from flysurgery.projection import project
from flysurgery.projection.truncated_svd import truncated_svd
from flysurgery.projection.workers import workers
from tests.patterns.brute_force import support
from tests.patterns.strategies import chainable, pairs, patterns
from tests.projection.oracle import EXACT, best_error, dense_factor, dense_product, random_matrix, random_product

SEEDS = st.integers(0, 2**31)
ANY_DEPTH = st.one_of(patterns().map(lambda pattern: Architecture((pattern,))), pairs(), chainable())


def error(matrix: Tensor, architecture: Architecture) -> float:
    return float(np.linalg.norm(matrix.numpy() - dense_product(project(matrix, architecture).factors)))


@given(ANY_DEPTH, SEEDS)
def test_an_exact_product_is_recovered(architecture: Architecture, seed: int) -> None:
    matrix = random_product(architecture, seed)
    projection = project(matrix, architecture)
    assert [tuple(factor.shape) for factor in projection.factors] == [pattern.factor_shape for pattern in architecture]
    assert np.linalg.norm(matrix.numpy() - dense_product(projection.factors)) <= EXACT * float(matrix.norm())
    assert projection.relative_error <= EXACT


@given(patterns(), SEEDS)
def test_one_factor_keeps_exactly_the_entries_on_its_support(pattern: Pattern, seed: int) -> None:
    matrix = random_matrix(Architecture((pattern,)), seed)
    (factor,) = project(matrix, Architecture((pattern,))).factors
    assert np.array_equal(dense_factor(factor), matrix.numpy() * support(pattern))


@given(pairs(), SEEDS, st.booleans())
def test_two_factors_are_the_optimum_and_share_each_inner_index_equally(architecture: Architecture, seed: int, is_complex: bool) -> None:
    matrix = random_matrix(architecture, seed)
    if is_complex:
        matrix = torch.complex(matrix, random_matrix(architecture, seed + 1))
    left, right = map(dense_factor, project(matrix, architecture).factors)
    best = best_error(matrix, architecture)
    assert float(np.linalg.norm(matrix.numpy() - left @ right)) == pytest.approx(best, rel=EXACT, abs=EXACT * float(matrix.norm()))
    assert np.linalg.norm(left, axis=0) == pytest.approx(np.linalg.norm(right, axis=1), rel=EXACT, abs=EXACT)


@settings(max_examples=40)
@given(chainable(), SEEDS)
def test_the_error_of_more_factors_lies_between_the_largest_cut_and_their_sum(architecture: Architecture, seed: int) -> None:
    matrix = random_matrix(architecture, seed)
    heads = list(accumulate(architecture, product_pattern))
    tails = list(accumulate(reversed(architecture.patterns), lambda tail, pattern: product_pattern(pattern, tail)))[::-1]
    cuts = [best_error(matrix, Architecture(cut)) for cut in zip(heads[:-1], tails[1:], strict=True)]
    slack = EXACT * float(matrix.norm())
    assert max(cuts) - slack <= error(matrix, architecture) <= float(np.linalg.norm(cuts)) + slack


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_is_that_of_the_stored_factors(dtype: torch.dtype) -> None:
    architecture = monarch(48, 72, 3)
    weight = random_matrix(architecture)
    weight = (torch.complex(weight, weight.flip(0)) if dtype.is_complex else weight).to(dtype)
    projection = project(weight, architecture)
    assert all(factor.dtype == dtype and factor.is_contiguous() for factor in projection.factors)
    matrix = weight.to(torch.promote_types(dtype, torch.float64)).numpy()
    norm = np.linalg.norm(matrix)
    measured = np.linalg.norm(matrix - dense_product(projection.factors)) / norm
    assert projection.relative_error == pytest.approx(measured, rel=EXACT)
    assert projection.energy_kept == pytest.approx(1 - measured**2, rel=EXACT) and projection.seconds > 0
    optimum, rounding = best_error(weight, architecture) / norm, 2 * torch.finfo(dtype).eps
    assert optimum * (1 - EXACT) <= measured <= optimum * (1 + EXACT) + rounding


@pytest.mark.parametrize("n", [64, 256])
def test_the_fourier_transform_is_a_butterfly_after_bit_reversal(n: int) -> None:
    dft, order = torch.fft.fft(torch.eye(n, dtype=torch.complex128), norm="ortho"), bit_reversal(n)
    projection = project(dft[:, order], square_dyadic(n))
    assert projection.relative_error <= EXACT and not any(factor.is_conj() for factor in projection.factors)
    x = torch.randn(5, n, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    wanted = torch.fft.fft(x, norm="ortho")
    assert float((ks_linear(x[:, order], projection.factors) - wanted).norm()) <= EXACT * float(wanted.norm())
    assert project(dft, square_dyadic(n)).relative_error > 0.1, "without the permutation it is none"
    assert torch.equal(order[order], torch.arange(n))
    with pytest.raises(PatternError, match="power of two, got 12"):
        bit_reversal(12)


@pytest.mark.parametrize("architecture", [monarch(16, 16, 4), deformable(48, 48, 8)], ids=str)
@pytest.mark.parametrize("magnitude", [1e-200, 1e200])
def test_extreme_weights_neither_overflow_nor_vanish(architecture: Architecture, magnitude: float) -> None:
    weight = random_matrix(architecture)
    usual, extreme = project(weight, architecture), project(weight * magnitude, architecture)
    assert extreme.relative_error == pytest.approx(usual.relative_error, rel=EXACT)
    largest = [float(factor.abs().max()) for factor in extreme.factors]
    assert len(largest) == 2 or largest == pytest.approx([largest[0]] * len(largest), rel=EXACT), "deep factors share one magnitude"


@pytest.mark.parametrize("architecture", [monarch(32, 48, 4), gonon(48, 192), low_rank(24, 40, 7), square_dyadic(8)], ids=str)
def test_zeros_stay_zeros_and_do_not_spoil_their_neighbours(architecture: Architecture) -> None:
    projection = project(torch.zeros(architecture.shape), architecture)
    assert (projection.relative_error, projection.energy_kept) == (0.0, 1.0)
    assert all(factor.isfinite().all() for factor in projection.factors) and not dense_product(projection.factors).any()
    if len(architecture) == 2:
        matrix = random_matrix(architecture)
        matrix[:, :4], matrix[::4] = 0, 0
        assert error(matrix, architecture) == pytest.approx(best_error(matrix, architecture), rel=EXACT)


@pytest.mark.parametrize("architecture", [Architecture.of((1, 6, 4, 1)), gonon(48, 192), square_dyadic(8)], ids=str)
def test_the_weight_is_neither_changed_nor_shared_and_its_layout_does_not_matter(architecture: Architecture) -> None:
    weight = torch.nn.Parameter(random_matrix(architecture))
    before = weight.detach().clone()
    factors, other = project(weight, architecture).factors, project(before.mT.contiguous().mT, architecture).factors
    assert all(torch.equal(one, two) and not one.requires_grad for one, two in zip(factors, other, strict=True))
    for factor in factors:
        factor.zero_()
    assert torch.equal(weight, before)


def spoilt(bad: complex, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    weight = torch.ones(8, 12, dtype=dtype)
    weight[3, 7] = weight[3, 9] = weight[6, 0] = bad
    return weight


NOT_FINITE = "3 NaN or infinite entries of 96, the first .* at row 3, column 7"


@pytest.mark.parametrize(
    ("weight", "architecture", "error", "words"),
    [
        (torch.ones(8, 8, dtype=torch.int64), monarch(8, 8, 4), ProjectionError, "got torch.int64; convert it first"),
        (torch.ones(8, 8, device="meta"), monarch(8, 8, 4), ProjectionError, "meta device"),
        (torch.ones(8, 12), monarch(8, 8, 4), PatternError, "8x8"),
        (torch.ones(2, 8, 8), monarch(8, 8, 4), PatternError, r"shape \(8, 8\), got a tensor of shape \(2, 8, 8\)"),
        (torch.zeros(8, 8), kaleidoscope(8), ProjectionError, r"\(4,2,2,1\),\(2,2,2,2\) are not chainable; .*--init random"),
        *((spoilt(float(bad)), monarch(8, 12, 4), ProjectionError, NOT_FINITE.replace(".*", bad)) for bad in ("nan", "inf", "-inf")),
        (spoilt(complex(0, float("inf")), torch.complex64), monarch(8, 12, 4), ProjectionError, NOT_FINITE),
    ],
)
def test_what_cannot_be_projected_is_one_sentence(weight: Tensor, architecture: Architecture, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        project(weight, architecture)


@pytest.mark.gpu
def test_factors_return_to_the_device_of_the_weight() -> None:
    weight = random_matrix(monarch(48, 72, 3)).cuda()
    factors, expected = project(weight, monarch(48, 72, 3)).factors, project(weight.cpu(), monarch(48, 72, 3)).factors
    assert all(one.device == weight.device and torch.equal(one.cpu(), two) for one, two in zip(factors, expected, strict=True))


@pytest.mark.parametrize(("b", "c"), [(60, 20), (20, 60), (20, 20)])
@pytest.mark.parametrize("smallest", [1e-2, 1e-4, 1e-7, 1e-12])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_small_singular_values_are_kept(b: int, c: int, smallest: float, dtype: torch.dtype) -> None:
    values, generator = np.geomspace(1, smallest, 5), torch.Generator().manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(3, n, 5, generator=generator, dtype=dtype))[0] for n in (b, c))
    blocks = U * torch.from_numpy(values) @ V.mH
    U, S, Vh = truncated_svd(blocks, 5)
    assert float((U * S[:, None] @ Vh - blocks).norm()) <= 1e-12 * float(blocks.norm())
    assert S.numpy() == pytest.approx(np.tile(values, (3, 1)), rel=1e-3) and (S.diff(dim=1) <= 0).all()
    assert max(float((each @ each.mH - torch.eye(5)).norm()) for each in (U.mH, Vh)) <= 1e-8


def test_threads_are_given_back_after_a_failure() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError), workers() as pool:
            assert pool.submit(torch.get_num_threads).result() == 1
            pool.submit(lambda: 1 // 0).result()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


FRESH = """
import timm, torch, flysurgery
model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=4, num_heads=3).cuda()
torch.set_num_threads(4)
report = flysurgery.convert(model, "monarch", calibrate=torch.rand(40, 3, 32, 32))
print(len(report.replaced))
"""


@pytest.mark.gpu
def test_the_first_linear_algebra_of_a_process_may_be_that_of_threads() -> None:
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "12"
