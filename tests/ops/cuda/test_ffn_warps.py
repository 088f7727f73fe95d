"""The feed-forward kernel of devices without wgmma, on the GPU at hand: against float64, beside PyTorch's operators in the same dtype."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flysurgery.ops import FusedFactors, Norm, ffn, ffn_launches
from flysurgery.ops import decided as decisions
from flysurgery.ops.cuda import ffn as kernels
from flysurgery.patterns import Architecture
from flysurgery.patterns.catalog import low_rank
from tests.ops.cuda.test_ffn import (
    GONON,
    MONARCH,
    SMALL,
    SMALL_GONON,
    check,
    check_chain,
    check_graphs_and_compilers,
    make_block,
    rows_of,
)

pytestmark = pytest.mark.gpu

LOW_RANK = (low_rank(1536, 384, 96), low_rank(384, 1536, 96))
Pair = tuple[Architecture, Architecture]


@pytest.fixture(autouse=True)
def without_wgmma(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device of another generation, as far as the choice of the kernel goes, and few rows, too, by the kernel of whole blocks."""
    monkeypatch.setattr(kernels, "_has_wgmma", lambda index: False)
    monkeypatch.setattr(decisions, "_decided", {})
    monkeypatch.setattr("flysurgery.ops.feed_forward.takes_few_rows", lambda *_: False)
    kernels._fused_ffn.cache_clear()
    yield
    kernels._fused_ffn.cache_clear()


@pytest.mark.parametrize("architectures", [GONON, MONARCH, SMALL, SMALL_GONON, LOW_RANK])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_any_number_of_rows(architectures: Pair, dtype: torch.dtype) -> None:
    block = make_block(architectures, dtype)
    assert ffn_launches(rows_of(1, architectures[0].in_features, dtype), *block[:3], "gelu", block[3]) == ("the whole block",)
    for rows in (1, 75, 197, 25217):
        check(rows_of(rows, architectures[0].in_features, dtype), block, "gelu")


@pytest.mark.parametrize(("architectures", "kilobytes"), [(GONON, 163), (MONARCH, 163), (MONARCH, 99), (SMALL, 99)])
def test_less_shared_memory(architectures: Pair, kilobytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as a block may use on compute capability 8.0, and on 8.9 and 12.0."""
    monkeypatch.setattr(kernels, "shared_limit_of", lambda index: kilobytes * 1024)
    block = make_block(architectures, torch.float16)
    x = rows_of(9999, architectures[0].in_features, torch.float16)
    assert ffn_launches(x, *block[:3]) == ("the whole block",)
    check(x, block, "gelu")


@pytest.mark.parametrize(
    ("activation", "residual", "with_norm", "with_scale"),
    [("gelu_tanh", True, True, False), ("silu", False, True, True), ("gelu", True, False, True), ("gelu_tanh", False, False, False)],
)
def test_all_options(activation: str, residual: bool, with_norm: bool, with_scale: bool) -> None:
    norm, up, down, scale = make_block(SMALL, torch.float16)
    check(rows_of(131, 192, torch.float16), (norm if with_norm else None, up, down, scale if with_scale else None), activation, residual)


def test_layers_without_parameters_and_rows_far_from_zero() -> None:
    _, up, down, _ = make_block(SMALL, torch.float16)
    block = (Norm(None, None, 1e-6), FusedFactors(up.factors), FusedFactors(down.factors), None)
    check(rows_of(64, 192, torch.float16, mean=1000.0), block, "gelu")


def test_strided_rows_batches_and_runs_on_all_multiprocessors_are_bit_equal() -> None:
    norm, up, down, scale = make_block(MONARCH, torch.float16)
    x = rows_of(25216, 384, torch.float16)
    out = ffn(x, norm, up, down, "gelu", scale)
    for _ in range(20):
        assert torch.equal(out, ffn(x, norm, up, down, "gelu", scale))
    assert torch.equal(out[-197:], ffn(x[-197:], norm, up, down, "gelu", scale))
    assert torch.equal(out.view(128, 197, 384), ffn(x.view(128, 197, 384), norm, up, down, "gelu", scale))
    wide = torch.full((25216, 400), torch.nan, device="cuda", dtype=torch.float16)
    wide[:, :384] = x
    assert torch.equal(out, ffn(wide[:, :384], norm, up, down, "gelu", scale))
    assert ffn(x[:0], norm, up, down, "gelu", scale).shape == (0, 384)


def test_graphs_and_compilers() -> None:
    check_graphs_and_compilers(make_block(SMALL, torch.float16), rows_of(394, 192, torch.float16))


def test_a_chain_of_launches_that_begin_early() -> None:
    check_chain(make_block(SMALL, torch.float16), rows_of(9999, 192, torch.float16))
