"""Launch parameters, without a launch."""

from __future__ import annotations

import ctypes

import pytest
import torch

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.kernel import Parameters, Prepared, Series


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


class Refusing:
    """Stands in for a kernel whose launches the driver refuses the first time."""

    function, name = 3, "some"

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def driver_launch(self, *arguments: object) -> tuple[int]:
        self.seen.append(arguments)
        return (1,)

    def queue(self, *arguments: object) -> None:
        self.seen.append(arguments)


def test_a_series_launches_all_and_asks_its_kernels_why_not() -> None:
    kernel = Refusing()
    first, second = (Prepared(kernel, (1, 2, 3, 4, 5, 6, 7), [8, 8, 4], (number,)) for number in (8, 9))  # pyright: ignore[reportArgumentType]
    Series([(first, (0, 1)), (second, (2, 0))], 3)(77, 100, 200, 300)
    launches, again = kernel.seen[::2], kernel.seen[1::2]
    assert all(launch[:9] == (3, 1, 2, 3, 4, 5, 6, 7, 77) for launch in launches) and len(launches) == 2
    assert [arguments[:2] for arguments in again] == [((1, 2, 3, 4, 5, 6, 7), 77)] * 2
