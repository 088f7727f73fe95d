"""The macros that the kernels of single factors and of their gradients have in common."""

from __future__ import annotations

from flysurgery.gpu.modes import MODE_NUMBERS
from flysurgery.patterns import Pattern


def pattern_macros(pattern: Pattern, mode: str) -> dict[str, int]:
    """A pattern and a mode, as macros."""
    a, b, c, d = pattern.factor_shape
    return {"PATTERN_A": a, "PATTERN_B": b, "PATTERN_C": c, "PATTERN_D": d, "MODE": MODE_NUMBERS[mode]}
