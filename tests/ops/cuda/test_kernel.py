"""Launch parameters, without a launch."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flysurgery.errors import BackendError
from flysurgery.ops.cuda import kernel as kernels
from flysurgery.ops.cuda.kernel import Kernel, Parameters, Prepared, Series


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


def test_launches_read_their_addresses_from_one_table() -> None:
    """A struct's members stand side by side there; numbers stay with the launch."""
    table = (ctypes.c_int64 * 5)(10, 20, 30, 40, 50)
    sizes = [8, 16, 8, 4]
    parameters = Parameters(sizes)
    parameters.fill((None, None, None, None, 7), "some")
    pointers = parameters.reading(table, (4, 1, 2, 0))
    numbers = [int.from_bytes(part, "little") for part in read(ctypes.addressof(pointers), sizes)]
    assert numbers == [50, 20 + (30 << 64), 10, 7]


class Config(SimpleNamespace):
    """Stands in for what ``launch_config`` gives."""

    def __init__(self, sizes: tuple[int, ...], early: bool = False) -> None:
        names = ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes")
        super().__init__(**dict(zip(names, sizes, strict=True)), early=early, hStream=None)


class Queue:
    """Stands in for a kernel, and keeps what it is launched with."""

    name, parameter_sizes = "some", (8, 8, 4)

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def queue(self, config: Config, address: int) -> None:
        words = [int.from_bytes(part, "little") for part in read(address, [*self.parameter_sizes])]
        self.seen.append((config.gridDimY, config.sharedMemBytes, config.hStream, words, config.early))


def test_a_series_launches_all_from_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "launch_config", Config)
    kernel, sizes = Queue(), (1, 2, 3, 4, 5, 6, 7)
    first, second = (Prepared(kernel, sizes, (number,), early=number == 9) for number in (8, 9))  # pyright: ignore[reportArgumentType]
    series = Series([(first, (0, 1)), (second, (2, 0))], 3)
    for stream in (77, 77, 78):
        series(stream, 100, 200, 300)
        assert kernel.seen == [(2, 7, stream, [100, 200, 8], False), (2, 7, stream, [300, 100, 9], True)]
        kernel.seen.clear()


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
