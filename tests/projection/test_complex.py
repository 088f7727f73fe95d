"""The projection of complex matrices: the Fourier transform exactly, and any other as near as numpy's SVDs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flysurgery.errors import PatternError, ProjectionError
from flysurgery.factors import bit_reversal, factors_to_dense
from flysurgery.ops import ks_linear
from flysurgery.patterns import Architecture, gonon, low_rank, monarch, square_dyadic
from flysurgery.projection import metric_of, project, project_calibrated
from flysurgery.projection.moments import Moments
from tests.projection.oracle import EXACT, best_error, random_matrix


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


@pytest.mark.parametrize("architecture", [monarch(24, 24, 2), gonon(24, 96), low_rank(24, 40, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_two_factors_are_the_optimum(architecture: Architecture, dtype: torch.dtype) -> None:
    matrix = torch.complex(random_matrix(architecture, 0), random_matrix(architecture, 1)).to(dtype)
    projection = project(matrix, architecture)
    assert all(factor.dtype == dtype for factor in projection.factors)
    wide = matrix.to(torch.complex128)
    measured = float((wide - factors_to_dense([factor.to(torch.complex128) for factor in projection.factors])).norm())
    assert measured == pytest.approx(best_error(wide, architecture), rel=1e-10 if dtype == torch.complex128 else 1e-6)
    assert projection.relative_error == pytest.approx(measured / float(wide.norm()), rel=EXACT)


def test_small_singular_values_are_kept() -> None:
    generator = np.random.default_rng(0)
    U, V = (np.linalg.qr(generator.normal(size=(n, 5)) + 1j * generator.normal(size=(n, 5)))[0] for n in (40, 24))
    matrix = torch.from_numpy(U * np.geomspace(1, 1e-9, 5) @ V.conj().T)
    assert project(matrix, low_rank(40, 24, 5)).relative_error <= 1e-12


def test_infinite_entries_and_calibration_are_refused() -> None:
    weight = torch.ones(16, 16, dtype=torch.complex64)
    moments = Moments(16)
    moments.add(torch.randn(64, 16, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(ProjectionError, match=r"expected a real weight to calibrate, got torch\.complex64; use project"):
        project_calibrated(weight, monarch(16, 16), metric_of(moments, bias=False))
    weight[3, 7] = complex(0, float("inf"))
    with pytest.raises(ProjectionError, match=r"1 NaN or infinite entries of 256, the first .* at row 3, column 7"):
        project(weight, monarch(16, 16))
