"""The kernel for some hundred rows compiles without spills, its tilings fit, and its weights are packed as it reads them."""

from __future__ import annotations

import pytest
import torch

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.compile import compile_cubin
from flysurgery.ops.cuda.some_rows import pack_floats
from flysurgery.ops.cuda.some_rows_tiling import MODES, most_rows, some_rows_tiling, some_rows_tilings

MULTIPROCESSORS, SHARED_BYTES = 132, 227 * 1024
CASES = [(384, 1536), (1536, 384), (768, 2304)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("in_features", "out_features"), CASES, ids=str)
def test_compiles_without_spills(mode: str, in_features: int, out_features: int) -> None:
    for rows in (197, 788):
        tile = some_rows_tiling(rows, in_features, out_features, mode, MULTIPROCESSORS, SHARED_BYTES)
        compiled = compile_cubin("some_rows.cu", tile.defines("gelu", residual=True), arch="sm_90a", name="some_rows")
        assert compiled.spill_bytes == 0 and not compiled.serialized
        assert 0 < compiled.registers * 32 * tile.warps * tile.resident <= 65536
        assert tile.resident * (tile.shared_bytes + compiled.shared_bytes + 1024) <= SHARED_BYTES + 1024


@pytest.mark.parametrize("mode", MODES)
def test_every_input_and_output_has_a_block(mode: str) -> None:
    for tile in some_rows_tilings(1536, 384, mode, SHARED_BYTES):
        across, down, _ = tile.grid(394)
        assert across * tile.columns == 384 * tile.shares and down * tile.rows >= 394 > (down - 1) * tile.rows
        assert tile.steps * tile.split * tile.shares * 64 == 1536 and 0 < tile.stages <= tile.steps


def test_few_rows_have_small_tiles_and_some_sizes_have_none() -> None:
    few, more = (some_rows_tiling(rows, 384, 1536, "fp16", MULTIPROCESSORS, SHARED_BYTES) for rows in (197, 1576))
    assert few.rows * few.columns < more.rows * more.columns
    assert (
        394
        < most_rows(384, 1536, False, "fp16", MULTIPROCESSORS, SHARED_BYTES)
        < most_rows(384, 1536, True, "fp16", MULTIPROCESSORS, SHARED_BYTES)
    )
    assert most_rows(384, 100, True, "fp16", MULTIPROCESSORS, SHARED_BYTES) == 0
    with pytest.raises(BackendError, match="no tiling for 384 inputs and 100 outputs"):
        some_rows_tiling(197, 384, 100, "fp16", MULTIPROCESSORS, SHARED_BYTES)


@pytest.mark.parametrize("mode", ["tf32", "fp32"])
def test_the_images_of_floats_hold_the_product(mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randint(-3, 4, shape, generator=generator).double() for shape in ((96, 64), (64,)))
    weight[0] *= 2.0**100  # outputs have scales of their own
    weight[1] = 0.0
    columns = torch.randint(1, 4, (2, 96), generator=generator).float()
    (factor, shift), images = pack_floats(weight, columns, mode)
    assert images.shape == (96, 2 if mode == "fp32" else 1, 64)
    k = torch.arange(64)
    read = x[k // 16 * 16 + k % 8 // 2 * 4 + k // 8 % 2 * 2 + k % 2]  # as lanes hold the inputs
    y = (images.double().sum(dim=1) @ read) * 2.0**-13 * factor.double() + shift.double()
    torch.testing.assert_close(y, weight @ x * columns[0].double() + columns[1].double(), rtol=0, atol=0)
