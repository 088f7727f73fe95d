"""Few rows and some hundred on the GPU, beyond what test_dense_kernels.py tries: behind a norm, in whole blocks, compiled."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter
from torch.nn.functional import layer_norm

from flysurgery.gpu.few_rows import run_few_rows
from flysurgery.ops import Dense, FeedForward, FusedFactors, Norm, ks_linear, run, way
from flysurgery.patterns import Pattern, gonon
from tests.gpu.dense_kernels import need_warpgroups
from tests.support.oracle import product
from tests.support.problems import make_factor, make_factors, make_input, make_vector
from tests.support.tolerance import ARITHMETICS, BF16, FP16, Arithmetic, assert_epilogue_comparable, assert_equal

pytestmark = pytest.mark.gpu

SQUARE, UP, DOWN, BASE = Pattern(1, 384, 384, 1), Pattern(1, 1536, 384, 1), Pattern(1, 384, 1536, 1), Pattern(1, 768, 768, 1)


@pytest.fixture(params=[FP16, BF16], ids=["fp16", "bf16"])
def halves(request: pytest.FixtureRequest) -> Arithmetic:
    return request.param


@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (50.0, 1.0), (0.5, 2e-3)])
@pytest.mark.parametrize("pattern", [SQUARE, UP, BASE], ids=str)
def test_a_norm_before(halves: Arithmetic, pattern: Pattern, mean: float, deviation: float) -> None:
    x = (torch.randn(197, pattern.c, generator=torch.Generator("cuda").manual_seed(1), device="cuda") * deviation + mean).to(halves.dtype)
    weight, bias = make_vector(pattern.c, halves, device="cuda"), make_vector(pattern.c, halves, device="cuda")
    factor = make_factor(pattern, halves, device="cuda")
    out = run_few_rows(x, weight, bias, 1e-6, [factor[0, :, :, 0]], [0], [None], "none", None, None)
    truth = product(layer_norm(x.double(), (pattern.c,), weight.double(), bias.double(), 1e-6), [factor])
    yardstick = ks_linear(layer_norm(x, (pattern.c,), weight, bias, 1e-6), [factor], None, backend="bmm")
    assert_epilogue_comparable(out, yardstick, truth, halves)


def test_infinities_and_nan_do_not_come_out_of_a_norm_finite(halves: Arithmetic) -> None:
    x, factor = make_input(64, 384, halves, device="cuda"), make_factor(SQUARE, halves, device="cuda")
    x[3, 5], x[9, 200] = torch.inf, torch.nan
    out = run_few_rows(x, None, None, 1e-6, [factor[0, :, :, 0]], [0], [None], "none", None, None)
    assert not bool(out[[3, 9]].isfinite().any())
    assert bool(out[[row for row in range(64) if row not in (3, 9)]].isfinite().all())


def test_compiled_for_any_number_of_rows(halves: Arithmetic) -> None:
    """Few and many, which take different kernels."""
    x, norm = make_input(394, 384, halves, device="cuda"), Norm(None, None, 1e-6)
    matrices = (make_factor(pattern, halves, device="cuda")[0, :, :, 0].contiguous() for pattern in (UP, DOWN))
    up, down = (Dense(Parameter(matrix, requires_grad=False)) for matrix in matrices)  # parameters' sizes count as constants
    compiled = torch.compile(lambda x: run(x, FeedForward(norm, up, down, "gelu")), fullgraph=True, dynamic=True)
    for rows in (197, 394, 100):
        assert_equal(compiled(x[:rows]), run(x[:rows], FeedForward(norm, up, down, "gelu")))


def test_a_feed_forward_block_of_factors(mode: str) -> None:
    """Of two images: its norm has a launch of its own, and so has each layer."""
    need_warpgroups()
    arithmetic = ARITHMETICS[mode]
    x, norm = make_input(394, 384, arithmetic, device="cuda"), Norm(torch.ones(384, device="cuda"), None, 1e-6)
    up, down = (FusedFactors(tuple(make_factors(gonon(*sizes), arithmetic, device="cuda"))) for sizes in ((1536, 384), (384, 1536)))
    assert way(x, FeedForward(norm, up, down)).launches() == ("norm", "up and activation", "down and residual")
    exact_up, exact_down = (FusedFactors(tuple(factor.double() for factor in linear.factors)) for linear in (up, down))
    truth = FeedForward(Norm(None, None, 1e-6), exact_up, exact_down).plainly(x.double())
    yardstick = FeedForward(Norm(None, None, 1e-6), up, down).plainly(x)
    assert_epilogue_comparable(run(x, FeedForward(norm, up, down)), yardstick, truth, arithmetic)
