"""The feed-forward kernel for float32 on the GPU: against float64, beside PyTorch's operators in the same arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flysurgery.ops import FusedFactors, Norm, ffn, ffn_launches
from flysurgery.patterns import Architecture
from flysurgery.patterns.catalog import low_rank
from tests.ops.cuda.test_ffn import GONON, MONARCH, SMALL, SMALL_GONON, Block, check, check_graphs_and_compilers, make_block, rows_of
from tests.support.tolerance import MODES

pytestmark = pytest.mark.gpu

LOW_RANK = (low_rank(1536, 384, 96), low_rank(384, 1536, 96))


@pytest.fixture(autouse=True)
def any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, too, by the kernel that has the whole block."""
    monkeypatch.setattr("flysurgery.ops.feed_forward.takes_few_rows", lambda *_: False)


@pytest.fixture(params=["tf32", "fp32"])
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param == "tf32"
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = before


def check_whole(
    x: Tensor, block: tuple[Norm, FusedFactors, FusedFactors, Tensor | None], mode: str, activation: str = "gelu", residual: bool = True
) -> None:
    norm, up, down, scale = block
    assert ffn_launches(x, norm, up, down, activation, scale, residual) == ("the whole block",)
    check(x, block, activation, residual, k=MODES[mode].k)


@pytest.mark.parametrize("architectures", [GONON, MONARCH, SMALL, SMALL_GONON, LOW_RANK])
def test_any_number_of_rows(architectures: tuple[Architecture, Architecture], mode: str) -> None:
    block = make_block(architectures, torch.float32)
    for rows in (1, 75, 197, 25217):
        check_whole(rows_of(rows, architectures[0].in_features, torch.float32), block, mode)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_activations_without_scale_and_residual(activation: str, mode: str) -> None:
    norm, up, down, _ = make_block(SMALL, torch.float32)
    check_whole(rows_of(131, 192, torch.float32), (norm, up, down, None), mode, activation, residual=False)


def test_layers_without_parameters(mode: str) -> None:
    _, up, down, _ = make_block(SMALL_GONON, torch.float32)
    check_whole(rows_of(64, 192, torch.float32), (Norm(None, None, 1e-6), FusedFactors(up.factors), FusedFactors(down.factors), None), mode)


@pytest.mark.parametrize("mean", [30.0, 1000.0])
def test_rows_far_from_zero(mean: float, mode: str) -> None:
    check_whole(rows_of(197, 192, torch.float32, mean), make_block(SMALL, torch.float32), mode)


@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_rows_and_weights_of_any_size(size: float, mode: str) -> None:
    """Factors that undo each other's size, and rows of that size, which the norm undoes."""
    norm, up, down, scale = make_block(SMALL, torch.float32)
    for factor, by in zip((*up.factors, *down.factors), (1 / size, size, 1 / size, size), strict=True):
        factor.mul_(by)
    check_whole(rows_of(64, 192, torch.float32) * min(size, 1e5), (norm, up, down, scale), mode)


def test_one_row_decides_nothing_for_others(mode: str) -> None:
    """A row of one large element is the longest that a norm gives; equal elements give none; infinities stay where they are."""
    norm, up, down, scale = make_block(GONON, torch.float32)
    x = rows_of(197, 384, torch.float32)
    expected = ffn(x, norm, up, down, "gelu", scale)
    x[3], x[5, 17], x[7] = 0.25, 1e15, 0.0
    x[7, 9] = torch.inf
    out = ffn(x, norm, up, down, "gelu", scale)
    others = [n for n in range(197) if n not in (3, 5, 7)]
    assert torch.equal(out[others], expected[others])
    assert not bool(out[7].isfinite().any())
    check_whole(x[[3, 5]], (norm, up, down, scale), mode, residual=False)


def test_strided_rows_batches_and_runs_on_all_multiprocessors_are_bit_equal(mode: str) -> None:
    norm, up, down, scale = make_block(MONARCH, torch.float32)
    x = rows_of(25216, 384, torch.float32)
    out = ffn(x, norm, up, down, "gelu", scale)
    for _ in range(20):
        assert torch.equal(out, ffn(x, norm, up, down, "gelu", scale))
    assert torch.equal(out[-197:], ffn(x[-197:], norm, up, down, "gelu", scale))
    assert torch.equal(out.view(128, 197, 384), ffn(x.view(128, 197, 384), norm, up, down, "gelu", scale))
    wide = torch.full((25216, 400), torch.nan, device="cuda")
    wide[:, :384] = x
    assert torch.equal(out, ffn(wide[:, :384], norm, up, down, "gelu", scale))
    assert ffn(x[:0], norm, up, down, "gelu", scale).shape == (0, 384)


def test_the_mode_is_that_of_the_call(mode: str) -> None:
    norm, up, down, scale = make_block(SMALL, torch.float32)
    x = rows_of(64, 192, torch.float32)
    out = ffn(x, norm, up, down, "gelu", scale)
    torch.backends.cuda.matmul.allow_tf32 = mode != "tf32"
    assert not torch.equal(out, ffn(x, norm, up, down, "gelu", scale))


def test_graphs_and_compilers(mode: str) -> None:
    block: Block = make_block(SMALL, torch.float32)
    check_graphs_and_compilers(block, rows_of(394, 192, torch.float32))
