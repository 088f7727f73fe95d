"""The dense kernel compiles for every generation of devices, without spills, for the widths of timm's models."""

from __future__ import annotations

import pytest

from flysurgery.ops.cuda.compile import compile_cubin
from flysurgery.ops.cuda.dense_tiling import DenseTiling, Patch, StreamTiling, dense_tiling, stream_tiling

SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90a": 227 * 1024, "sm_100": 227 * 1024}
SPILL_BYTES = 64
"""Of patches of 8x8: their few inputs leave room for the widest tile, beside which pointers to patches run short of registers."""
CASES = [(384, 384, "fp16"), (384, 384, "fp32"), (192, 192, "bf16"), (768, 768, "tf32"), (768, 384, "fp32"), (1024, 1024, "fp16")]


@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize(("in_features", "out_features", "mode"), CASES, ids=str)
def test_compiles_without_spills(arch: str, in_features: int, out_features: int, mode: str) -> None:
    tile = dense_tiling(in_features, out_features, mode, SHARED_BYTES[arch], arch == "sm_90a")
    assert isinstance(tile, DenseTiling), tile
    compiled = compile_cubin("dense_linear.cu", tile.defines("gelu", residual=True), arch=arch, name="dense_linear")
    assert compiled.spill_bytes == 0
    assert compiled.serialized == ()
    assert 0 < compiled.registers * 32 * tile.warps <= 65536
    assert tile.shared_bytes + compiled.shared_bytes <= SHARED_BYTES[arch]


@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize("mode", ["fp16", "tf32", "fp32"])
@pytest.mark.parametrize(("side", "position", "prefix"), [(8, False, 0), (16, False, 0), (16, True, 0), (16, True, 5), (16, False, 1)])
def test_patches_compile(arch: str, mode: str, side: int, position: bool, prefix: int) -> None:
    tile = dense_tiling(3 * side * side, 384, mode, SHARED_BYTES[arch], arch == "sm_90a")
    assert isinstance(tile, DenseTiling), tile
    defines = tile.defines("none", position, Patch(side, side, prefix))
    compiled = compile_cubin("dense_linear.cu", defines, arch=arch, name="dense_linear")
    assert compiled.spill_bytes <= (SPILL_BYTES if side == 8 else 0)
    assert compiled.serialized == ()


@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize(
    ("in_features", "hidden", "mode"), [(192, 512, "fp16"), (384, 1024, "fp32"), (768, 2048, "bf16"), (384, 1024, "tf32")]
)
def test_a_gate_and_a_value_compile(arch: str, in_features: int, hidden: int, mode: str) -> None:
    tile = dense_tiling(in_features, 2 * hidden, mode, SHARED_BYTES[arch], arch == "sm_90a", gated=True)
    assert isinstance(tile, DenseTiling), tile
    compiled = compile_cubin("dense_linear.cu", tile.defines("silu", residual=False), arch=arch, name="dense_linear")
    assert compiled.spill_bytes == 0
    assert compiled.serialized == ()


@pytest.mark.parametrize(("in_features", "out_features", "mode"), [(768, 768, "fp16"), (1024, 1024, "bf16"), (768, 3072, "fp16")], ids=str)
def test_streams_compile(in_features: int, out_features: int, mode: str) -> None:
    resident = dense_tiling(in_features, out_features, mode, SHARED_BYTES["sm_90a"], wgmma=True)
    assert isinstance(resident, DenseTiling)
    tile = stream_tiling(resident, SHARED_BYTES["sm_90a"])
    assert isinstance(tile, StreamTiling)
    compiled = compile_cubin("dense_stream.cu", tile.defines("gelu", residual=True, moments=True), arch="sm_90a", name="dense_stream")
    assert compiled.spill_bytes == 0
    assert compiled.serialized == ()
    assert tile.shared_bytes + compiled.shared_bytes <= SHARED_BYTES["sm_90a"]


def test_only_weights_that_leave_narrow_tiles_stream() -> None:
    for sizes, wgmma in (((384, 384, "fp16"), True), ((768, 768, "fp16"), False), ((768, 768, "tf32"), True)):
        resident = dense_tiling(*sizes, SHARED_BYTES["sm_90a"], wgmma)
        assert isinstance(resident, DenseTiling)
        assert stream_tiling(resident, SHARED_BYTES["sm_90a"]) is None
