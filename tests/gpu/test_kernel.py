"""Launch parameters, without a launch."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from flysurgery.errors import BackendError
from flysurgery.gpu import kernel as kernels
from flysurgery.gpu.kernel import Kernel, Parameters


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


class Config(SimpleNamespace):
    """Stands in for what ``launch_config`` gives."""

    def __init__(self, sizes: tuple[int, ...], early: bool = False) -> None:
        names = ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes")
        super().__init__(**dict(zip(names, sizes, strict=True)), early=early, hStream=None)


class Refused(Kernel):
    """Whose launches the driver refuses with these results, one after the other."""

    def __init__(self, *names: str) -> None:
        self.name, self.device_index, self.function = "some", 3, 0
        self.results = [SimpleNamespace(name=name) if name else 0 for name in names]
        self._launch_as = lambda *arguments: (self.results.pop(0),)


def test_a_refused_launch_is_told_and_a_missing_context_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(kernels, "_make_context_current", made.append)
    config = Config((1, 2, 3, 4, 5, 6, 7))
    Refused("CUDA_ERROR_INVALID_CONTEXT", "").queue(config, 0)
    assert made == [3]
    for names in (["CUDA_ERROR_INVALID_VALUE"], ["CUDA_ERROR_INVALID_CONTEXT", "CUDA_ERROR_INVALID_VALUE"]):
        with pytest.raises(BackendError, match=r"some was not launched: CUDA_ERROR_INVALID_VALUE with grid \(1, 2, 3\), .* 7 bytes"):
            Refused(*names).queue(config, 0)
