"""The contract, kept by the bsr backend on the CPU, and its tiles on CUDA."""

import pytest
import torch

from flysurgery.ops.backends.bsr import tile_size
from tests.ops.contract import BackendContract


class TestBsr(BackendContract):
    backend = "bsr"
    bias_apart = True


@pytest.mark.parametrize(
    ("b", "c", "dtype", "tile"),
    [
        (512, 128, None, 128),
        (512, 128, torch.float16, 128),
        (512, 128, torch.float32, 64),
        (256, 1024, torch.bfloat16, 128),
        (768, 192, torch.float32, 192),
        (48, 48, torch.float16, 48),
    ],
)
def test_powers_of_two_on_cuda_are_cut_until_they_fit(b: int, c: int, dtype: torch.dtype | None, tile: int) -> None:
    assert tile_size(b, c, dtype) == tile
