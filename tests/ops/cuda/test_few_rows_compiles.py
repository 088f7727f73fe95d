"""The kernels for few rows compile for every generation of devices, without spills, for the widths of timm's models."""

from __future__ import annotations

import pytest
import torch

from flysurgery.factors import factors_to_dense
from flysurgery.ops.cuda.compile import compile_cubin
from flysurgery.ops.cuda.few_rows import few_rows_tilings, pack_vectors, pack_weights
from flysurgery.patterns import gonon

SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90a": 227 * 1024, "sm_100": 227 * 1024}
SPILL_BYTES = {"sm_100": 8}
"""Stores and loads a thread, for as many registers as let two blocks run at once."""
CASES = [(192, 576), (192, 192), (384, 1152), (384, 384), (384, 1536), (1536, 384), (768, 2304), (768, 768), (1024, 1024)]


@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize(("in_features", "out_features"), CASES, ids=str)
def test_compiles_without_spills(arch: str, in_features: int, out_features: int) -> None:
    for norm, dtype in ((in_features <= out_features, torch.float16), (False, torch.bfloat16)):
        tiles = few_rows_tilings(in_features, out_features, norm, SHARED_BYTES[arch])
        for tile in (tiles[0], tiles[len(tiles) // 2]):
            compiled = compile_cubin("few_rows.cu", tile.defines(dtype, "gelu", residual=True), arch=arch, name="few_rows")
            assert compiled.spill_bytes <= SPILL_BYTES.get(arch, 0)
            assert 0 < compiled.registers * 32 * tile.split * tile.resident <= 65536
            assert tile.shared_bytes + compiled.shared_bytes <= SHARED_BYTES[arch]


@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize(("head", "warps"), [(64, 7), (64, 8), (32, 7), (64, 1)])
def test_attention_compiles_without_spills(arch: str, head: int, warps: int) -> None:
    defines = {"HEAD": head, "WARPS": warps, "STEPS": 2, "MODE": 0}
    assert compile_cubin("few_attention.cu", defines, arch=arch, name="few_attention").spill_bytes == 0


def test_the_smallest_blocks_come_first_and_other_sizes_have_none() -> None:
    tiles = few_rows_tilings(384, 1152, True, SHARED_BYTES["sm_90a"])
    areas = [tile.row_tiles * tile.columns for tile in tiles]
    assert areas == sorted(areas)
    assert tiles[0].most_rows(132) < 197 < max(tile.most_rows(132) for tile in tiles)
    assert tiles[0].grid(197) == (36, 13, 1)
    for sizes in ((100, 384), (32 * 97, 384), (384, 100)):
        assert not few_rows_tilings(*sizes, False, SHARED_BYTES["sm_90a"])


def test_linears_side_by_side_are_packed_in_their_order() -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(64, 96, generator=generator, dtype=torch.float64)
    factors = [torch.randn(pattern.factor_shape, generator=generator, dtype=torch.float64) for pattern in gonon(96, 96)]
    weight = pack_weights([dense, *factors], [0, 2])
    torch.testing.assert_close(weight, torch.cat([dense, factors_to_dense(factors)]), rtol=0, atol=0)
    bias, scale = torch.randn(96, generator=generator), torch.randn(160, generator=generator)
    norm, columns = pack_vectors(dense, (None, None), [None, bias], scale, 96, [64, 96])
    torch.testing.assert_close(norm, torch.stack((torch.ones(96), torch.zeros(96))), rtol=0, atol=0)
    torch.testing.assert_close(columns, torch.stack((scale, torch.cat((torch.zeros(64), bias)) * scale)), rtol=0, atol=0)
