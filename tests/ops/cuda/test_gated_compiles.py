"""The gate's kernel compiles for every generation of devices, without spills."""

from __future__ import annotations

import pytest

from flysurgery.ops.cuda.compile import compile_cubin
from flysurgery.ops.cuda.fused import ACTIVATIONS


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize(("columns", "mode"), [(512, 0), (4096, 1), (2048, 2)])
def test_compiles_without_spills(arch: str, columns: int, mode: int) -> None:
    defines = {"COLUMNS": columns, "MODE": mode, "ACTIVATION": ACTIVATIONS.index("silu")}
    assert compile_cubin("gated.cu", defines, arch=arch, name="gated").spill_bytes == 0
