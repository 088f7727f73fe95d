"""The times of layers with each choice that they have, and what became of a choice by measured times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flysurgery.patterns import Architecture
from flysurgery.surgery.plan import Plan
from flysurgery.surgery.table import grouped, text_table

HEADER = ("measured", "n", "choice", "ms", "/ dense", "fused", "chosen")


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
                    {
                        "name": choice.name,
                        "architectures": [None if each is None else str(each) for each in choice.architectures],
                        "ms": choice.ms,
                        "fused": choice.fused,
                    }
                    for choice in group.choices
                ],
            }
            for group, name in zip(self.groups, self.chosen, strict=True)
        ]
        whole = {"dense_ms": self.dense_ms, "dense_optimized_ms": self.dense_optimized_ms, "converted_ms": self.converted_ms}
        head = {"device": self.device, "dtype": self.dtype, "batch": self.batch}
        return {**head, **whole, "returned": list(self.returned), "groups": groups}

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
        return "\n\n".join([text_table(HEADER, lines, right=("n", "ms", "/ dense", "chosen")), *failures, whole])


def _lines(name: str, members: list[tuple[TimedGroup, str]]) -> list[tuple[str, ...]]:
    first = members[0][0]
    lines = []
    for index, choice in enumerate(first.choices):
        count = sum(chosen == choice.name for _, chosen in members)
        head = (name, str(len(members))) if index == 0 else ("", "")
        times = (f"{choice.ms:.3g}", f"{choice.ms / first.dense.ms:.2f}", "yes" if choice.fused else "")
        lines.append((*head, choice.name, *times, str(count) if count else ""))
    return lines
