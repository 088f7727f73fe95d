"""Which way linears that share x go, by their widths and the number of rows."""

from __future__ import annotations

import pytest
import torch

from flysurgery.ops import FusedFactors, wide
from flysurgery.patterns import Architecture, gonon, monarch


@pytest.mark.parametrize(
    ("architecture", "linears", "rows", "together", "by_factors"),
    [
        (monarch(512, 512), 3, 197, True, False),
        (monarch(768, 768), 3, 6304, True, True),
        (monarch(768, 768), 3, 12608, True, False),
        (monarch(768, 768), 3, 12608, False, True),
        (monarch(768, 768), 1, 7679, True, True),
        (monarch(768, 768), 1, 7680, True, False),
        (monarch(1024, 1024), 3, 50432, True, True),
        (gonon(768, 768), 3, 1919, True, True),
        (gonon(768, 768), 3, 1920, True, False),
        (gonon(768, 768), 2, 6304, True, True),
        (gonon(768, 768), 1, 3200, True, True),
        (gonon(768, 768), 1, 4096, True, False),
    ],
    ids=str,
)
def test_many_rows_take_one_launch_where_little_lies_between_the_factors(
    monkeypatch: pytest.MonkeyPatch, architecture: Architecture, linears: int, rows: int, together: bool, by_factors: bool
) -> None:
    monkeypatch.setattr(wide, "_group_obstacle", lambda *sizes: None)
    factors = tuple(torch.empty(pattern.factor_shape, device="meta") for pattern in architecture)
    x = torch.empty(1, rows, architecture.in_features, device="meta")
    assert wide.takes_group(x, [FusedFactors(factors)] * linears, together) is by_factors
