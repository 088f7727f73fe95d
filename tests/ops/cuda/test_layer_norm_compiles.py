"""The norm's kernel compiles for every generation of devices, without spills."""

from __future__ import annotations

import pytest

from flysurgery.ops.cuda.compile import compile_cubin


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize(("columns", "mode"), [(192, 0), (384, 1), (1664, 0), (1024, 2), (4096, 2)])
@pytest.mark.parametrize("moments", [0, 1])
def test_compiles_without_spills(arch: str, columns: int, mode: int, moments: int) -> None:
    compiled = compile_cubin("layer_norm.cu", {"COLUMNS": columns, "MODE": mode, "MOMENTS": moments}, arch=arch, name="layer_norm")
    assert compiled.spill_bytes == 0
