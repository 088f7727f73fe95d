"""What a plan was chosen by: the trade-off between costs and errors, and measured times."""

from collections.abc import Mapping
from dataclasses import dataclass

from flysurgery.patterns import Architecture
from flysurgery.tables import blocks_of_text, grouped, text_table

MEASURED = ("measured", "n", "choice", "ms", "/ dense", "fused", "chosen")


@dataclass(frozen=True)
class Point:
    """One solution: the cost, its share of the dense one, and the predicted error."""

    cost: float
    share: float
    error: float

    @property
    def cells(self) -> tuple[str, str, str]:
        cost = f"{self.cost:,.4g}" if self.cost < 1000 else f"{self.cost:,.0f}"
        return cost, f"{self.share:.1%}", f"{self.error:.4f}"


@dataclass(frozen=True)
class Tradeoff:
    """The chosen architectures, beside those of least error for other costs (``curve``).

    ``unit`` is what costs are counted in, "weights" or "ms". Errors are ``sqrt(sum w |y' - y|² / sum w |y|²)`` over the layers. Where
    there were calibration data, y is a layer's output on ``judged_on`` samples that nothing was fitted to, and the w are sensitivities of
    the model's output. Else ``judged_on`` is None, y is the layer's weight, and the w are 1. ``goal`` says what was looked for,
    ``families`` how many layers got what.
    """

    unit: str
    chosen: Point
    curve: tuple[Point, ...]
    judged_on: int | None
    goal: str
    families: tuple[tuple[str, int], ...]

    @property
    def sentence(self) -> str:
        """How many layers got which family, and why."""
        counts = ", ".join(f"{family} for {count} layer{'s' if count > 1 else ''}" for family, count in self.families)
        where = "" if self.judged_on is None else f", on {self.judged_on} samples that nothing was fitted to"
        error = f"its predicted error is {self.chosen.error:.4f} at {self.chosen.share:.1%} of the dense {self.unit}{where}"
        return f"chosen for {self.goal}: {counts}; {error}"

    def __str__(self) -> str:
        header = (self.unit, "share", "predicted error", "")
        lines = [*((*point.cells, "") for point in self.curve), (*self.chosen.cells, "chosen")]
        return blocks_of_text(text_table(header, lines, right=header[:-1]), self.sentence)


@dataclass(frozen=True)
class TimedChoice:
    """What the layers of a group may get together, and the milliseconds that the group then takes in one forward.

    ``architectures`` has one entry for each layer, None for dense; every part of a layer gets it. ``fused`` says whether the time is
    that of a fused module.
    """

    name: str
    architectures: tuple[Architecture | None, ...]
    ms: float
    fused: bool


@dataclass(frozen=True)
class TimedGroup:
    """Layers that are timed and chosen for together. The first of the choices is dense.

    ``noise`` is the share by which two times of one thing may differ. ``failed`` has choices of which a way to run them failed, and why.
    """

    fqns: tuple[str, ...]
    choices: tuple[TimedChoice, ...]
    noise: float
    failed: Mapping[str, str]

    @property
    def dense(self) -> TimedChoice:
        return self.choices[0]

    @property
    def faster(self) -> tuple[TimedChoice, ...]:
        """The choices that are faster than dense by more than the noise."""
        return tuple(choice for choice in self.choices[1:] if choice.ms < self.dense.ms * (1 - self.noise))


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

    def __str__(self) -> str:
        pairs = list(zip(self.groups, self.chosen, strict=True))
        lines = []
        for name, alike in grouped(pairs, lambda pair: " + ".join(pair[0].fqns), lambda pair: (pair[0].choices, pair[0].noise)):
            group = alike[0][0]
            for choice in group.choices:
                count = sum(chosen == choice.name for _, chosen in alike)
                head = (name, str(len(alike))) if choice is group.dense else ("", "")
                times = (f"{choice.ms:.3g}", f"{choice.ms / group.dense.ms:.2f}", "yes" if choice.fused else "")
                lines.append((*head, choice.name, *times, str(count) if count else ""))
        failures = dict.fromkeys(f"{name} failed: {reason}" for group in self.groups for name, reason in group.failed.items())
        optimized = "" if self.dense_optimized_ms is None else f", optimized dense {self.dense_optimized_ms:.3g} ms"
        whole = f"batch {self.batch} in {self.dtype} on {self.device}, the whole model: dense {self.dense_ms:.3g} ms{optimized}, "
        whole += f"converted {self.converted_ms:.3g} ms"
        if self.returned:
            whole += f"; {len(self.returned)} layers went back to dense for it"
        return blocks_of_text(text_table(MEASURED, lines, right=("n", "ms", "/ dense", "chosen")), *failures, whole)
