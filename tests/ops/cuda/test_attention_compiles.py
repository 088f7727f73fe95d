"""The attention kernel compiles for every generation of devices, without spills where it is tuned."""

from __future__ import annotations

import pytest
import torch

from flysurgery.ops.cuda.attention import block_attention, head_attention
from flysurgery.ops.cuda.compile import compile_cubin
from flysurgery.ops.cuda.short_attention import WarpAttention, WarpgroupAttention, short_attention, short_attention_obstacle

SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90a": 227 * 1024, "sm_100": 227 * 1024}
SPILL_BYTES = {"sm_100": 64}
"""Stores and loads a thread, with 128 registers: ptxas for sm_100 moves loads of TF32 grade further ahead than these last."""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("mode", [2, 3])
@pytest.mark.parametrize(("head", "warps"), [(64, 8), (64, 4), (48, 8), (32, 8), (16, 4)])
def test_compiles_without_spills(arch: str, head: int, mode: int, warps: int) -> None:
    compiled = compile_cubin("attention.cu", {"HEAD": head, "KEYS": 48, "MODE": mode, "WARPS": warps}, arch=arch, name="attention")
    assert compiled.spill_bytes <= SPILL_BYTES.get(arch, 0)


@pytest.mark.parametrize("mode", ["tf32", "fp32"])
@pytest.mark.parametrize("tokens", [1, 5, 50, 129, 197, 208, 257])
def test_whole_heads_fit_and_compile(mode: str, tokens: int) -> None:
    sizes = head_attention(mode, tokens, tokens, SHARED_BYTES["sm_90a"])
    assert sizes is not None
    padded = sizes.chunk * sizes.chunks
    assert tokens <= padded <= sizes.rows and padded - tokens < 16 * sizes.chunks
    assert sizes.shared_bytes <= SHARED_BYTES["sm_90a"] and sizes.slots >= 3
    compiled = compile_cubin(sizes.source, sizes.defines(), arch="sm_90a", name="attention")
    assert compiled.spill_bytes <= 24 and not compiled.serialized
    assert 0 < compiled.registers * 32 * sizes.warps <= 65536


def test_whole_heads_that_do_not_fit_are_for_blocks_of_queries() -> None:
    assert head_attention("fp32", 577, 577, SHARED_BYTES["sm_90a"]) is None
    assert block_attention("fp32", 64, 577).warps == 8 and block_attention("tf32", 64, 50).warps == 4


@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize("mode", ["fp16", "bf16"])
@pytest.mark.parametrize(("head", "tokens"), [(64, 197), (64, 257), (64, 50), (64, 5), (32, 50), (32, 197)])
def test_short_attention_compiles_without_spills(arch: str, mode: str, head: int, tokens: int) -> None:
    sizes = short_attention(head, tokens, tokens, SHARED_BYTES[arch], wgmma=arch == "sm_90a")
    compiled = compile_cubin(sizes.source, sizes.defines(mode), arch=arch, name="short_attention")
    assert compiled.spill_bytes == 0 and not compiled.serialized
    assert 0 < compiled.registers * 32 * sizes.warps <= 65536
    assert sizes.shared_bytes + compiled.shared_bytes <= SHARED_BYTES[arch]


@pytest.mark.parametrize("tokens", [1, 5, 17, 50, 65, 129, 193, 197, 200, 201, 208, 209, 257, 300])
def test_tiles_of_warpgroups_hold_all_queries_and_keys(tokens: int) -> None:
    sizes = short_attention(64, tokens, tokens, SHARED_BYTES["sm_90a"], wgmma=True)
    assert isinstance(sizes, WarpgroupAttention)
    padded = sizes.chunk * sizes.chunks
    assert tokens <= min(padded, sizes.rows, 64 * sizes.tiles) and padded <= sizes.rows and 64 * (sizes.tiles - 1) < tokens
    assert padded - tokens < 16 * sizes.chunks, "the kernel leaves out no key before these"
    assert sizes.rows % 8 == 0 and sizes.slots >= 5
    assert sizes.last == (tokens in (129, 193, 197, 200, 257))


def test_what_warpgroups_cannot_hold_is_for_warps_or_for_pytorch() -> None:
    for head, tokens, wgmma in ((64, 577, True), (32, 197, True), (64, 197, False)):
        assert isinstance(short_attention(head, tokens, tokens, SHARED_BYTES["sm_90a"], wgmma=wgmma), WarpAttention)
    for keys, limit in (*((keys, SHARED_BYTES["sm_90a"]) for keys in (1, 577, 832)), (577, 200 * 1024)):
        assert short_attention_obstacle(keys, 64, torch.float16, limit) is None
        for wgmma in (False, True):
            assert short_attention(64, keys, keys, limit, wgmma=wgmma).shared_bytes <= limit
    assert "833 keys" in str(short_attention_obstacle(833, 64, torch.float16, SHARED_BYTES["sm_90a"]))
    assert "got 48 of torch.float16" in str(short_attention_obstacle(8, 48, torch.float16, 1 << 17))
    assert "torch.float64" in str(short_attention_obstacle(8, 64, torch.float64, 1 << 17))


def test_the_fake_operator_knows_the_layout() -> None:
    q = torch.empty(2, 3, 5, 64, dtype=torch.float16, device="meta")
    y = torch.ops.flysurgery.short_attention(q, q, q, 0.125)
    assert y.shape == q.shape and y.dtype == q.dtype and y.transpose(1, 2).is_contiguous()
