"""Launch parameters, without a launch."""

from __future__ import annotations

import ctypes

import pytest
import torch

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.kernel import Parameters


def read(address: int, sizes: list[int]) -> list[bytes]:
    """What the driver copies: for each parameter as many bytes as it has."""
    pointers = (ctypes.c_void_p * len(sizes)).from_address(address)
    return [ctypes.string_at(pointer or 0, size) for pointer, size in zip(pointers, sizes, strict=True)]


def test_arguments_become_pointers_numbers_and_structs() -> None:
    x = torch.nn.Parameter(torch.zeros(3))
    sizes = [8, 8, 4, 24, 8]
    parameters = Parameters(sizes)
    found = read(parameters.fill((x, None, -7, x[1:], 1 << 40, 5, -1), "some"), sizes)
    numbers = [x.data_ptr(), 0, -7, x.data_ptr() + 4, 1 << 40, 5, -1]
    whole = [number.to_bytes(8, "little", signed=True) for number in numbers]
    assert found == [whole[0], whole[1], whole[2][:4], b"".join(whole[3:6]), whole[6]]


def test_a_wrong_number_of_arguments_is_refused() -> None:
    with pytest.raises(BackendError, match="some takes 2 arguments, got 3"):
        Parameters([8, 8]).fill((1, 2, 3), "some")
