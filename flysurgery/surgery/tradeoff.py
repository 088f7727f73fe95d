"""What an allocation could have chosen, and what it did."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flysurgery.surgery.table import text_table

FEW = 20
"""Below so many samples their mean says little of others."""


@dataclass(frozen=True)
class Point:
    """One solution: the multiplier of the cost (None of the chosen one), the cost, its share of the dense one, and the predicted error.

    ``error`` is the one that the choice was made by; ``held_out_error`` is measured on samples that had no part in it, None where there
    were no calibration data.
    """

    multiplier: float | None
    cost: float
    share: float
    error: float
    held_out_error: float | None = None

    @property
    def reported(self) -> float:
        """The error that was not chosen by, where there is one."""
        return self.error if self.held_out_error is None else self.held_out_error


@dataclass(frozen=True)
class Split:
    """How many samples the candidates were fitted to, how many others they were chosen by, and on how many further ones reported."""

    fitted: int
    chosen: int
    reported: int

    def __str__(self) -> str:
        text = (
            f"candidates were fitted to {self.fitted} samples and chosen by their errors on {self.chosen} others; "
            f"held-out errors are those on {self.reported} that had no part in it"
        )
        return text + (", so few that on others the error may well be another" if self.reported < FEW else "")


@dataclass(frozen=True)
class Search:
    """A search for the share that meets a ``target``: each share tried, and the ``measure`` that the model then had."""

    measure: str
    target: float
    trials: tuple[tuple[float, float], ...]

    def __str__(self) -> str:
        tried = ", ".join(f"{value:.4g} at {share:.1%}" for share, value in self.trials)
        return f"search by {self.measure}, to meet {self.target:.6g}: {tried}"


@dataclass(frozen=True)
class Tradeoff:
    """The curve of the Lagrangian's solutions, and the chosen one.

    ``unit`` is what costs are counted in, "weights" or "ms". Errors are ``sqrt(sum w |y' - y|² / sum w |y|²)`` over the layers, with y a
    layer's output where there were calibration data and its weight where there were none; ``weighted`` says whether the w are
    sensitivities of the model's output, else they are 1. ``samples`` is None where there were no data. ``goal`` says what was looked for,
    ``families`` how many layers got what; ``alone`` has what the same goal gives with dense and one family alone, None where nothing of it
    is cheap enough. ``search`` is None where the goal was a bound on the cost or on the predicted error.
    """

    unit: str
    weighted: bool
    chosen: Point
    curve: tuple[Point, ...]
    samples: Split | None
    goal: str
    families: tuple[tuple[str, int], ...]
    alone: tuple[tuple[str, Point | None], ...]
    search: Search | None = None

    @property
    def sentence(self) -> str:
        """How many layers got which family, and why."""
        first, *rest = self.families
        counts = ", ".join([f"{first[0]} for {first[1]} {'layers' if first[1] > 1 else 'layer'}", *(f"{each} for {n}" for each, n in rest)])
        others = [f"{family} alone " + ("costs more" if point is None else f"has {_brief(point)}") for family, point in self.alone]
        this = f"its predicted error is {_brief(self.chosen)} of the dense {self.unit}"
        return "; ".join([f"chosen for {self.goal}: {counts}", this, *([", ".join(others)] if others else [])])

    def to_json(self) -> dict[str, Any]:
        """As JSON values; the multiplier of the cheapest solution has no bound and is null."""
        return asdict(self)

    def __str__(self) -> str:
        header = ["lambda", self.unit, "share", "predicted error", *([] if self.samples is None else ["held-out error"]), ""]
        lines = [_line(point, "") for point in self.curve]
        lines.append(_line(self.chosen, "chosen"))
        lines += [_line(point, f"{family} alone") for family, point in self.alone if point is not None]
        table = text_table(header, lines, right=header[:-1])
        return "\n\n".join([table, *(str(each) for each in (self.samples, self.search) if each is not None), self.sentence])


def _brief(point: Point) -> str:
    return f"{point.error:.4f} at {point.share:.1%}"


def _line(point: Point, note: str) -> tuple[str, ...]:
    multiplier = "" if point.multiplier is None else f"{point.multiplier:.3g}"
    cost = f"{point.cost:,.4g}" if point.cost < 1000 else f"{point.cost:,.0f}"
    held_out = () if point.held_out_error is None else (f"{point.held_out_error:.4f}",)
    return (multiplier, cost, f"{point.share:.1%}", f"{point.error:.4f}", *held_out, note)
