"""The ways to convert that the table on real weights compares: families of architectures, and what is done to fit them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from weight_rivals import RIVALS

from flysurgery import surgery
from flysurgery.errors import OptionError
from flysurgery.patterns import named
from flysurgery.surgery import LayerPlan, Plan

DENSE = "dense"
MIXED = "mixed"
MIDDLE_DENSE = "monarch 3 with dense middle"
RANK = 96
SMALLER_RANKS = (64, 48, 32)

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gonon": {"arch": "gonon"},
    "monarch 4": {"arch": "monarch", "nblocks": 4},
    f"rank {RANK}": {"arch": "lowrank", "rank": RANK},
    MIXED: {"arch": "monarch", "nblocks": 4},
    "monarch 2": {"arch": "monarch", "nblocks": 2},
    MIDDLE_DENSE: {"arch": "monarch", "nblocks": 3, "exclude": r"blocks\.[5-7]\."},
    **{f"rank {rank}": {"arch": "lowrank", "rank": rank} for rank in SMALLER_RANKS},
}
"""Options of ``surgery.plan``. In ``mixed``, q, k, v and the first layer of feed-forward blocks get low rank instead. In
``monarch 3 with dense middle`` the blocks 5 to 7 of 12 stay dense, where dense blocks help patch tokens most.

Rank 96 has the size of ``monarch 4``. The smaller ranks are there to find the one that takes its milliseconds.
"""

SEQUENTIAL: Mapping[str, Any] = {"sequential": True}
PERMUTED = {**SEQUENTIAL, "permute": True}

STEPS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "calibrated": SEQUENTIAL,
    "permuted": PERMUTED,
    "reconstructed": {**SEQUENTIAL, "reconstruct": True},
    "permuted + reconstructed": {**PERMUTED, "reconstruct": True},
}
"""Options of ``surgery.apply``; with any of them it calibrates. ``reconstruct`` is minutes, or True for those that the run has."""

ORDERLESS = tuple(f"rank {rank}" for rank in (RANK, *SMALLER_RANKS))
"""Families that can do the same in any order of their inputs and outputs, so that permuting them gains nothing."""

FEW_STEPS = {f"rank {rank}": ("plain", "reconstructed") for rank in SMALLER_RANKS}
"""Families that have these steps alone: the first tells the time at once, as the ways of a family differ in weights alone."""


@dataclass(frozen=True)
class Way:
    """One way to convert: options of ``surgery.plan`` and of ``surgery.apply``; a rival has neither, and no step."""

    family: str
    step: str
    arch: Mapping[str, Any] = field(default_factory=dict)
    fitting: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The family and the step, by which ``--ways`` picks it."""
        return f"{self.family} {self.step}".strip()

    @property
    def is_random(self) -> bool:
        """Whether another seed gives another result."""
        return bool(self.fitting)

    def minutes(self, usual: float) -> float | None:
        """Of its reconstruction, where it has one; ``usual`` is what the run gives it."""
        wanted = self.fitting.get("reconstruct")
        return None if wanted is None else usual if wanted is True else float(wanted)


def _fitting(family: str, step: str) -> Mapping[str, Any]:
    return {name: value for name, value in STEPS[step].items() if not (name == "permute" and family in ORDERLESS)}


WAYS = (
    Way(DENSE, ""),
    *(
        Way(family, step, arch, _fitting(family, step))
        for step in STEPS
        for family, arch in FAMILIES.items()
        if step in FEW_STEPS.get(family, STEPS) and not (step.startswith("permuted") and family in ORDERLESS)
    ),
    *(Way(rival, "") for rival in RIVALS),
)
QUICK = (DENSE, "monarch 4 plain", "monarch 4 calibrated", "monarch 4 reconstructed", "int8", "2:4")


def ways_of(text: str | None, *, quick: bool = False) -> tuple[Way, ...]:
    """The dense model and the ways that a text lists by name, by family or by step; without one all but the long ones.

    Raises:
        OptionError: a part of the text names none.
    """
    if text is None:
        return tuple(way for way in WAYS if (way.name in QUICK if quick else True))
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not any(part in (way.name, way.family, way.step) for way in WAYS):
            names = ", ".join((DENSE, *FAMILIES, *RIVALS, *STEPS))
            raise OptionError(f"--ways knows no '{part}'; choose families or steps out of {names}, or both as in 'gonon plain'")
    return tuple(way for way in WAYS if way.family == DENSE or {way.name, way.family, way.step} & set(parts))


def plan_of(way: Way, model: nn.Module) -> Plan:
    """What is replaced by what."""
    plan = surgery.plan(model, **way.arch)
    if way.family != MIXED:
        return plan
    return replace(plan, layers=tuple(_low_rank(layer) if layer.role in ("qkv", "ffn_in") else layer for layer in plan.layers))


def _low_rank(layer: LayerPlan) -> LayerPlan:
    parts = tuple(
        part
        if part.architecture is None
        else replace(part, architecture=named("lowrank", part.stop - part.start, layer.in_features, rank=RANK))
        for part in layer.parts
    )
    return replace(layer, parts=parts)
