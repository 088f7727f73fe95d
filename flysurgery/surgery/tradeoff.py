"""What an allocation could have chosen, and what it did."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flysurgery.surgery.table import text_table


@dataclass(frozen=True)
class Point:
    """One solution: the multiplier of the cost (None of the chosen one), the cost, its share of the dense one, the predicted error."""

    multiplier: float | None
    cost: float
    share: float
    error: float


@dataclass(frozen=True)
class Tradeoff:
    """The curve of the Lagrangian's solutions, and the chosen one.

    ``unit`` is what costs are counted in, "weights" or "ms". Errors are ``sqrt(sum w |y' - y|² / sum w |y|²)`` over the layers, with y a
    layer's output where there were calibration data and its weight where there were none; ``weighted`` says whether the w are
    sensitivities of the model's output, else they are 1.
    """

    unit: str
    weighted: bool
    chosen: Point
    curve: tuple[Point, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON values; the multiplier of the cheapest solution has no bound and is null."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [_line(point, "") for point in self.curve]
        lines.append(_line(self.chosen, "chosen"))
        return text_table(
            ("lambda", self.unit, "share", "predicted error", ""), lines, right=("lambda", self.unit, "share", "predicted error")
        )


def _line(point: Point, note: str) -> tuple[str, ...]:
    multiplier = "" if point.multiplier is None else f"{point.multiplier:.3g}"
    return (
        multiplier,
        f"{point.cost:,.4g}" if point.cost < 1000 else f"{point.cost:,.0f}",
        f"{point.share:.1%}",
        f"{point.error:.4f}",
        note,
    )
