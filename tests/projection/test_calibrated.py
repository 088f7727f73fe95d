"""What surgery gets of a calibrated projection: factors as stored, the bias's shift, and a reason where nothing was fitted."""

from __future__ import annotations

import pytest
import torch

from flysurgery.errors import PatternError, ProjectionError
from flysurgery.factors import factors_to_dense
from flysurgery.patterns import monarch, square_dyadic
from flysurgery.projection import Moments, metric_of, output_error, project, project_calibrated

N = 16


@pytest.fixture
def moments() -> Moments:
    generator = torch.Generator().manual_seed(1)
    found = Moments(N)
    scales = torch.arange(1, N + 1) ** -1.0
    for _ in range(8):
        found.add(torch.randn(64, N, generator=generator) * scales @ torch.ones(N, N).triu() + 3)
    return found


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(N, N, generator=torch.Generator().manual_seed(2))


def test_factors_have_the_weights_dtype_and_less_output_error(moments: Moments, weight: torch.Tensor) -> None:
    architecture = monarch(N, N, 2)
    found = project_calibrated(weight.to(torch.bfloat16), architecture, metric_of(moments, bias=True))
    assert {factor.dtype for factor in found.projection.factors} == {torch.bfloat16}
    full = project_calibrated(weight, architecture, metric_of(moments, bias=True))
    plain = project(weight, architecture)
    ours, theirs = (
        output_error(weight.double(), factors_to_dense([f.double() for f in each.factors]), shift, moments).relative
        for each, shift in ((full.projection, full.shift), (plain, None))
    )
    assert ours < 0.5 * theirs
    assert full.projection.relative_error > plain.relative_error and full.reason is None


def test_the_shift_keeps_the_mean_of_the_output(moments: Moments, weight: torch.Tensor) -> None:
    found = project_calibrated(weight, monarch(N, N, 4), metric_of(moments, bias=True))
    product = factors_to_dense([factor.double() for factor in found.projection.factors])
    assert found.shift is not None
    assert torch.allclose(product @ moments.mean + found.shift, weight.double() @ moments.mean, rtol=1e-10)
    assert project_calibrated(weight, monarch(N, N, 4), metric_of(moments, bias=False)).shift is None


def test_more_than_two_factors_are_the_plain_ones_with_the_reason(moments: Moments, weight: torch.Tensor) -> None:
    architecture = square_dyadic(N)
    found, plain = project_calibrated(weight, architecture, metric_of(moments, bias=True)), project(weight, architecture)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found.projection.factors, plain.factors, strict=True))
    assert found.reason is not None and "two factors" in found.reason and "has 4" in found.reason
    assert found.shift is not None and found.errors == ()


def test_bad_weights_are_refused_as_by_project(moments: Moments, weight: torch.Tensor) -> None:
    metric = metric_of(moments, bias=True)
    with pytest.raises(PatternError, match="32x32"):
        project_calibrated(weight, monarch(32, 32), metric)
    weight[3, 4] = torch.nan
    with pytest.raises(ProjectionError, match="row 3, column 4"):
        project_calibrated(weight, monarch(N, N), metric)
