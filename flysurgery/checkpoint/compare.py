"""Two sets of named shapes held against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SHOWN = 3
"""How many names a message lists of each kind."""


def difference(found: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]) -> str | None:
    """What is missing, unknown or of another shape in ``found``, as the end of a sentence; None where nothing is."""
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected]
    reshaped = [
        f"{name} is {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    parts = [(missing, "missing"), (unknown, "unknown"), (reshaped, "of another shape")]
    return "; ".join(f"{len(names)} {what}: {_listed(names)}" for names, what in parts if names) or None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
