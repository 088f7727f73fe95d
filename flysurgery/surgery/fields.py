"""Typed reading of JSON objects that may come from anywhere."""

from __future__ import annotations

from typing import Any

from flysurgery.errors import PlanError

JSON_NAMES = {dict: "an object", list: "a list", str: "a text", int: "a whole number", bool: "true or false", None: "null"}

MAX_COUNT = (1 << 63) - 1
"""Largest accepted number, that of a signed 64-bit integer."""


class Fields:
    """The entries of one JSON object, taken one by one; ``done`` complains about what is left over.

    Raises:
        PlanError: the data is no object, or an entry is missing, of another type or unknown; the message names it.
    """

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, dict):
            raise PlanError(f"{where} must be a JSON object, got {_shown(data)}")
        self._left = dict(data)
        self._where = where

    def take(self, key: str, *types: type | None, optional: bool = False) -> Any:
        """The entry ``key``, which is of one of the ``types`` (None means null); an optional one may be missing and is None."""
        if key not in self._left:
            if optional:
                return None
            raise PlanError(f"{self._where} has no entry '{key}'")
        value = self._left.pop(key)
        if (type(value) if value is not None else None) not in types:
            expected = " or ".join(JSON_NAMES[each] for each in types)
            raise PlanError(f"{self._where}: '{key}' must be {expected}, got {_shown(value)}")
        return value

    def count(self, key: str) -> int:
        """The entry ``key``, a whole number from zero to ``MAX_COUNT``."""
        value = self.take(key, int)
        if not 0 <= value <= MAX_COUNT:
            raise PlanError(f"{self._where}: '{key}' must lie between 0 and {MAX_COUNT}, got {_shown(value)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """The entry ``key``, a list of texts."""
        value = self.take(key, list)
        if not all(isinstance(each, str) for each in value):
            raise PlanError(f"{self._where}: '{key}' must be a list of texts, got {_shown(value)}")
        return tuple(value)

    def done(self) -> None:
        """Complain about entries that nobody took."""
        if self._left:
            raise PlanError(f"{self._where} has an unknown entry {_shown(next(iter(self._left)))}")


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
