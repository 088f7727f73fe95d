"""The most that building a model may take, worked out from the tensors that a folder stores."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from flysurgery.errors import ModelError

MAX_DEPTH = 4096
"""Most blocks, stages or layers that an argument may ask for; constructors make Python lists of that length."""

PAIR_BYTES = 32
"""What a constructor may take in Python for each pair of places in a window, which some list before they make a tensor of it."""


class LimitError(ModelError):
    """A base that takes more to build than the stored tensors justify. It is not to be tried again in another way."""


@dataclass(frozen=True)
class Limits:
    """The most that building one model may take.

    ``parameters`` and ``modules`` count registrations, ``operations`` those of torch, and ``nbytes`` adds the sizes of all tensors that
    they make, except parameters that wait on meta. A folder of no size gets 32 MiB.
    """

    parameters: int
    modules: int
    operations: int
    nbytes: int

    @classmethod
    def of_stored(cls, shapes: Collection[Sequence[int]], names: int) -> Limits:
        """The limits for a folder that stores tensors of these shapes, under ``names`` names."""
        return cls(
            parameters=500 + 2 * names,
            modules=4000 + 40 * names,
            operations=20_000 + 200 * names,
            nbytes=(32 << 20) + 64 * sum(prod(shape) for shape in shapes),
        )

    def check_arguments(self, base_args: Mapping[str, Any]) -> None:
        """Refuse arguments that would make a constructor loop in Python for longer than any stored tensor justifies.

        Raises:
            LimitError: the depth or the window, and the most that it may be.
        """
        for name, number in _numbers("", base_args):
            if any(part in name for part in ("depth", "layer", "block")) and number > MAX_DEPTH:
                raise LimitError(f"base_args: {name} is {number}, and models have at most {MAX_DEPTH} layers")
            largest = int((self.nbytes / PAIR_BYTES) ** 0.25)
            if "window" in name and number > largest:
                raise LimitError(f"base_args: {name} is {number}, and the tensors that are stored allow windows of at most {largest}")


def _numbers(name: str, value: Any) -> Iterable[tuple[str, int | float]]:
    """All numbers within the arguments, each with the name of the argument or the innermost entry that holds it."""
    if isinstance(value, Mapping):
        for inner, each in value.items():
            yield from _numbers(inner, each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _numbers(name, each)
    elif isinstance(value, int | float):
        yield name, value
