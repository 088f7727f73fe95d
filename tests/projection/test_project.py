"""The projection to any number of factors: exact where a product exists, the optimum for two factors, bounded for more."""

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
from flysurgery.patterns import Architecture, kaleidoscope, monarch, product_pattern, square_dyadic
from flysurgery.projection import project, workers
from flysurgery.projection.two_factor import truncated_svd
from tests.patterns.brute_force import support
from tests.patterns.strategies import chainable, pairs, patterns
from tests.projection.oracle import EXACT, best_error, dense_factor, dense_product, random_matrix, random_product

SEEDS = st.integers(0, 2**31)
ANY_DEPTH = st.one_of(patterns().map(lambda pattern: Architecture((pattern,))), pairs(), chainable())
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


@st.composite
def weights(draw: st.DrawFn) -> tuple[Architecture, Tensor, float]:
    """Any architecture, a matrix that is a product of it or any other, some or all of its rows zeros, and the magnitude of its entries."""
    architecture, seed, dtype = draw(ANY_DEPTH), draw(SEEDS), draw(st.sampled_from(DTYPES))
    make = draw(st.sampled_from((random_product, random_matrix)))
    weight = make(architecture, seed)
    if dtype.is_complex and make is random_matrix:
        weight = torch.complex(weight, make(architecture, seed + 1))
    weight[: draw(st.sampled_from((0, 0, 1, len(weight))))] = 0
    magnitude = draw(st.sampled_from((1e-200, 1.0, 1e200))) if torch.finfo(dtype).bits == 64 else 1.0
    return architecture, (weight * magnitude).to(dtype), magnitude


def least_errors(matrix: Tensor, architecture: Architecture) -> list[float]:
    """The smallest error of each way to cut the product in two, which no product is below; of one factor what lies off its support."""
    if len(architecture) == 1:
        return [float(np.linalg.norm(matrix.numpy() * (1 - support(architecture.patterns[0]))))]
    patterns = architecture.patterns
    heads = list(accumulate(patterns[:-1], product_pattern))
    tails = list(accumulate(reversed(patterns[1:]), lambda tail, pattern: product_pattern(pattern, tail)))[::-1]
    return [best_error(matrix, Architecture(cut)) for cut in zip(heads, tails, strict=True)]


@settings(max_examples=300)
@given(weights())
def test_factors_are_as_near_as_they_are_promised_to_be_and_the_error_is_theirs(case: tuple[Architecture, Tensor, float]) -> None:
    """One factor and two are the optimum, and more lie between the largest of all cuts and the root of the sum of their squares."""
    architecture, weight, magnitude = case
    before = weight.clone()
    found, other = project(torch.nn.Parameter(weight), architecture), project(weight.mT.contiguous().mT, architecture)
    assert all(torch.equal(one, two) for one, two in zip(found.factors, other.factors, strict=True)), "the layout does not matter"
    kept = [(tuple(factor.shape), factor.dtype, factor.is_contiguous(), factor.requires_grad) for factor in found.factors]
    assert kept == [(pattern.factor_shape, weight.dtype, True, False) for pattern in architecture]
    matrix = weight.to(torch.promote_types(weight.dtype, torch.float64)) / magnitude
    norm, product = float(matrix.norm()), dense_product(found.factors) / magnitude
    error, cuts = float(np.linalg.norm(matrix.numpy() - product)), least_errors(matrix, architecture)
    slack = (EXACT if torch.finfo(weight.dtype).bits == 64 else 4 * len(architecture) * torch.finfo(weight.dtype).eps) * norm
    assert max(cuts) - slack <= error <= float(np.linalg.norm(cuts)) + slack
    assert found.relative_error == pytest.approx(error / norm if norm else 0, rel=EXACT, abs=EXACT)
    assert found.energy_kept == pytest.approx(1 - found.relative_error**2) and found.seconds > 0
    sizes = [float(factor.abs().max()) for factor in found.factors]
    if len(sizes) == 1:
        assert np.array_equal(product, matrix.numpy() * support(architecture.patterns[0]))
    elif len(sizes) == 2 and torch.finfo(weight.dtype).bits == 64:
        left, right = map(dense_factor, found.factors)
        assert np.linalg.norm(left, axis=0) == pytest.approx(np.linalg.norm(right, axis=1), rel=EXACT), "each inner index is shared equally"
    elif len(sizes) > 2 and min(sizes) > 0:
        assert sizes == pytest.approx([sizes[0]] * len(sizes), rel=1e-2), "deep factors share one magnitude"
    for factor in found.factors:
        factor.zero_()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("n", [64, 256])
def test_the_fourier_transform_is_a_butterfly_after_bit_reversal(n: int) -> None:
    dft, order = torch.fft.fft(torch.eye(n, dtype=torch.complex128), norm="ortho"), bit_reversal(n)
    projection = project(dft[:, order], square_dyadic(n))
    assert projection.relative_error <= EXACT and not any(factor.is_conj() for factor in projection.factors)
    x = torch.randn(5, n, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    wanted = torch.fft.fft(x, norm="ortho")
    assert float((ks_linear(x[:, order], projection.factors) - wanted).norm()) <= EXACT * float(wanted.norm())
    assert project(dft, square_dyadic(n)).relative_error > 0.1, "without the permutation it is none"


def spoilt(bad: complex, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.ones(8, 12, dtype=dtype).index_put_((torch.tensor([3, 3, 6]), torch.tensor([7, 9, 0])), torch.tensor(bad, dtype=dtype))


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
@pytest.mark.parametrize("smallest", [1e-2, 1e-7, 1e-12])
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
