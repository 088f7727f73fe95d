"""What kernels cannot run is refused with the reason, and what they are for is not; no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flysurgery.gpu.attention import attention_obstacle
from flysurgery.gpu.dense_tiling import dense_tiling
from flysurgery.gpu.ffn import ffn_obstacle
from flysurgery.gpu.product import product_obstacle
from flysurgery.gpu.single_choice import single_reason
from flysurgery.gpu.tiling import tiling
from flysurgery.patterns import Architecture, Pattern
from flysurgery.patterns.catalog import gonon, monarch

SHARED, SMALL = 227 * 1024, 99 * 1024
GONON, MONARCH = (gonon(1536, 384), gonon(384, 1536)), (monarch(1536, 384), monarch(384, 1536))


def block(up: Architecture, down: Architecture, mode: str = "fp16", norm: bool = True) -> str | None:
    return ffn_obstacle(up, down, mode, norm, SHARED)


def halves_of(b: int, linears: int) -> object:
    return tiling(Architecture.of((1, b, 16, 2), (2, 16, 32, 1)), "fp16", linears, gated=True)


REASONS: dict[str, tuple[Callable[[], object], str]] = {
    "a block too wide": (lambda: block(gonon(3072, 768), gonon(768, 3072)), "no tile"),
    "a block of one factor": (lambda: block(Architecture.of((1, 1536, 384, 1)), gonon(384, 1536)), "two factors"),
    "layers that do not meet": (lambda: block(monarch(1536, 384, 2), monarch(384, 768)), "reads 768 features"),
    "a block of floats without a norm": (lambda: block(*GONON, mode="fp32", norm=False), "behind a norm"),
    "a block of floats too wide": (lambda: block(gonon(3072, 768), gonon(768, 3072), mode="tf32"), "no tile"),
    "a block of floats with long rows": (
        lambda: block(monarch(1536, 384), Architecture.of((1, 384, 400, 1), (1, 400, 1536, 1)), mode="fp32"),
        "do not fit in tiles in the rows",
    ),
    "an odd gate": (lambda: halves_of(31, 1), "halves of one layer's outputs"),
    "two gates": (lambda: halves_of(32, 2), "halves of one layer's outputs"),
    "odd dense sizes": (
        lambda: dense_tiling(100, 384, "fp16", SHARED),
        "multiples of 64 inputs and 32 outputs, got 100 and 384",
    ),
    "a dense layer too wide": (lambda: dense_tiling(65536, 384, "fp32", SHARED), "exceed"),
    "long heads": (lambda: attention_obstacle(64, 577, 577, "fp32", SHARED), "577 queries and 577 keys"),
    "narrow heads": (lambda: attention_obstacle(32, 197, 197, "tf32", SHARED), "take 64 features, got 32"),
    "long heads of halves": (lambda: attention_obstacle(64, 577, 577, "fp16", SHARED), "577 queries and 577 keys"),
}


@pytest.mark.parametrize("case", REASONS)
def test_the_reason_says_what_is_wrong(case: str) -> None:
    reason, words = REASONS[case]
    found = reason()
    assert isinstance(found, str) and words in found


@pytest.mark.parametrize("mode", ["fp16", "fp32"])
def test_every_single_factor_runs(mode: str) -> None:
    for pattern in (Pattern(6, 3, 5, 5), Pattern(2, 192, 48, 3), Pattern(1, 1024, 1024, 1), Pattern(1, 1024, 256, 64)):
        for limit in (SMALL, SHARED):
            assert single_reason(pattern, mode, limit) is None


@pytest.mark.parametrize(("width", "nblocks"), [(192, 2), (384, 8), (768, 4), (1280, 8), (1408, 2), (1664, 4)])
def test_monarch_layers_of_timm_run(width: int, nblocks: int) -> None:
    for out_features, in_features in ((width, width), (4 * width, width), (width, 4 * width)):
        assert product_obstacle(monarch(out_features, in_features, nblocks), "fp32", 1, 163 * 1024) is None


@pytest.mark.parametrize("mode", ["fp16", "bf16", "tf32", "fp32"])
def test_whole_blocks_and_heads_of_small_models_run(mode: str) -> None:
    for width in (192, 384):
        assert block(gonon(4 * width, width), gonon(width, 4 * width), mode) is None
        assert block(monarch(4 * width, width), monarch(width, 4 * width), mode) is None
    for tokens in (1, 5, 50, 129, 197, 208, 257):
        assert attention_obstacle(64, tokens, tokens, mode, SHARED) is None
