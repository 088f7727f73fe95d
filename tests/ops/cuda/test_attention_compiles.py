"""The attention kernel compiles for every generation of devices, without spills where it is tuned."""

from __future__ import annotations

import pytest

from flysurgery.ops.cuda.compile import compile_cubin

SPILL_BYTES = {"sm_100": 64}
"""Stores and loads a thread, with 128 registers: ptxas for sm_100 moves loads of TF32 grade further ahead than these last."""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("mode", [2, 3])
@pytest.mark.parametrize(("head", "warps"), [(64, 8), (64, 4), (48, 8), (32, 8), (16, 4)])
def test_compiles_without_spills(arch: str, head: int, mode: int, warps: int) -> None:
    compiled = compile_cubin("attention.cu", {"HEAD": head, "KEYS": 48, "MODE": mode, "WARPS": warps}, arch=arch, name="attention")
    assert compiled.spill_bytes <= SPILL_BYTES.get(arch, 0)
