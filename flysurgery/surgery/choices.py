"""What a plan was chosen by: the trade-off between costs and errors, and measured times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flysurgery.patterns import Architecture
from flysurgery.surgery.plan import Plan
from flysurgery.surgery.serial import as_json
from flysurgery.surgery.tables import blocks_of_text, grouped, text_table

MEASURED = ("measured", "n", "choice", "ms", "/ dense", "fused", "chosen")

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
        return as_json(self)

    def __str__(self) -> str:
        lines = [(point, "") for point in self.curve] + [(self.chosen, "chosen")]
        lines += [(point, f"{family} alone") for family, point in self.alone if point is not None]
        header = ["lambda", self.unit, "share", "predicted error", *([] if self.samples is None else ["held-out error"]), ""]
        table = text_table(header, [(*_cells(point), note) for point, note in lines], right=header[:-1])
        return blocks_of_text(table, self.samples, self.search, self.sentence)


@dataclass(frozen=True)
class TimedChoice:
    """What the layers of a group may get together, and the milliseconds that the group then takes in one forward.

    ``architectures`` has one entry for each layer, None for dense; every part of a layer gets it. ``fused`` says whether the time is
    that of a fused module.
    """

    name: str
    architectures: tuple[Architecture | None, ...]
    ms: float
    fused: bool = False


@dataclass(frozen=True)
class TimedGroup:
    """Layers that are timed and chosen for together. The first of the choices is dense.

    ``noise`` is the share by which two times of one thing may differ. ``failed`` has choices of which a way to run them failed, and why.
    """

    fqns: tuple[str, ...]
    choices: tuple[TimedChoice, ...]
    noise: float = 0.0
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def dense(self) -> TimedChoice:
        """The choice to leave all as it is."""
        return self.choices[0]

    @property
    def faster(self) -> tuple[TimedChoice, ...]:
        """The choices that are faster than dense by more than the noise."""
        return tuple(choice for choice in self.choices[1:] if choice.ms < self.dense.ms * (1 - self.noise))

    def in_plan(self, plan: Plan) -> TimedChoice:
        """The choice that a plan made from this one's choices gives the group."""
        planned = {layer.fqn: layer.parts[0].architecture for layer in plan.replaced}
        architectures = tuple(planned.get(fqn) for fqn in self.fqns)
        return next((choice for choice in self.choices if choice.architectures == architectures), self.dense)


@dataclass(frozen=True)
class Measurement:
    """The times that a plan was chosen by, and those of the whole model: dense, optimized dense (None where that was not asked), converted.

    ``chosen`` has the name of each group's choice. ``returned`` are the layers that went back to dense because the whole model was slower
    than dense with them.
    """

    device: str
    dtype: str
    batch: int
    groups: tuple[TimedGroup, ...]
    chosen: tuple[str, ...]
    dense_ms: float
    dense_optimized_ms: float | None
    converted_ms: float
    returned: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON values, one entry for each group; architectures as texts, dense ones null."""
        groups = [
            {
                "layers": list(group.fqns),
                "noise": group.noise,
                "failed": dict(group.failed),
                "chosen": name,
                "choices": [
                    as_json(choice) | {"architectures": [None if each is None else str(each) for each in choice.architectures]}
                    for choice in group.choices
                ],
            }
            for group, name in zip(self.groups, self.chosen, strict=True)
        ]
        names = ("device", "dtype", "batch", "dense_ms", "dense_optimized_ms", "converted_ms", "returned")
        return {name: as_json(getattr(self, name)) for name in names} | {"groups": groups}

    def __str__(self) -> str:
        pairs = list(zip(self.groups, self.chosen, strict=True))
        alike = grouped(pairs, lambda pair: " + ".join(pair[0].fqns), lambda pair: (pair[0].choices, pair[0].noise))
        failures = dict.fromkeys(f"{name} failed: {reason}" for group in self.groups for name, reason in group.failed.items())
        lines = [line for name, members in alike for line in _lines(name, members)]
        optimized = "" if self.dense_optimized_ms is None else f", optimized dense {self.dense_optimized_ms:.3g} ms"
        whole = f"batch {self.batch} in {self.dtype} on {self.device}, the whole model: dense {self.dense_ms:.3g} ms{optimized}, "
        whole += f"converted {self.converted_ms:.3g} ms"
        if self.returned:
            whole += f"; {len(self.returned)} layers went back to dense for it"
        return blocks_of_text(text_table(MEASURED, lines, right=("n", "ms", "/ dense", "chosen")), *failures, whole)


def _brief(point: Point) -> str:
    return f"{point.error:.4f} at {point.share:.1%}"


def _cells(point: Point) -> tuple[str, ...]:
    multiplier = "" if point.multiplier is None else f"{point.multiplier:.3g}"
    cost = f"{point.cost:,.4g}" if point.cost < 1000 else f"{point.cost:,.0f}"
    held_out = () if point.held_out_error is None else (f"{point.held_out_error:.4f}",)
    return (multiplier, cost, f"{point.share:.1%}", f"{point.error:.4f}", *held_out)


def _lines(name: str, members: list[tuple[TimedGroup, str]]) -> list[tuple[str, ...]]:
    first = members[0][0]
    lines = []
    for index, choice in enumerate(first.choices):
        count = sum(chosen == choice.name for _, chosen in members)
        head = (name, str(len(members))) if index == 0 else ("", "")
        times = (f"{choice.ms:.3g}", f"{choice.ms / first.dense.ms:.2f}", "yes" if choice.fused else "")
        lines.append((*head, choice.name, *times, str(count) if count else ""))
    return lines
