"""Launch arguments, without a launch."""

from __future__ import annotations

import ctypes

import torch

from flysurgery.ops.cuda.kernel import marshal


def test_arguments_become_pointers_and_sized_numbers() -> None:
    x = torch.nn.Parameter(torch.zeros(3))
    values, types = marshal((x, None, 5, ctypes.c_int32(-7), ctypes.c_float(0.5), x[1:]))
    assert values == (x.data_ptr(), 0, 5, -7, 0.5, x.data_ptr() + 4)
    assert [ctypes.sizeof(kind) for kind in types] == [8, 8, 8, 4, 4, 8]


def test_numbers_beyond_32_bits_survive() -> None:
    values, types = marshal((1 << 40,))
    assert types[0](values[0]).value == 1 << 40
