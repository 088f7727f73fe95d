"""The search for a kernel's configurations: all candidates, enlarged as far as they fit, in the order of their estimated costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Config = TypeVar("Config")
_CANDIDATES = 12


def most_promising(
    configs: Iterable[Config],
    fill: Callable[[Config], Config | None],
    cost: Callable[[Config], float],
) -> tuple[Config, ...]:
    """The dozen cheapest of those that ``fill`` does not refuse, the cheapest first."""
    filled = [found for found in map(fill, configs) if found is not None]
    return tuple(sorted(filled, key=cost)[:_CANDIDATES])
