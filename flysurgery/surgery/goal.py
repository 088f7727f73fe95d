"""Look for the smallest budget at which a converted model is as close to the dense one as was asked for."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from flysurgery.calibration import Data
from flysurgery.errors import PlanError
from flysurgery.surgery.allocation import Picks, prepare
from flysurgery.surgery.apply import apply
from flysurgery.surgery.choices import Tradeoff
from flysurgery.surgery.plan import Plan
from flysurgery.surgery.projecting import Progress

TRIES = 5
"""How often a copy is converted. The last step between two budgets is a 32nd of the distance from the smallest to all."""


def plan_for_fidelity(
    plan: Plan,
    model: nn.Module,
    fidelity: float,
    *,
    calibrate: Data,
    samples: int | None = None,
    progress: Progress | None = None,
    **fitting: Any,
) -> tuple[Plan, Tradeoff]:
    """Choose the architectures of the layers that ``plan`` replaces, with as few weights as ``fidelity`` allows. The model is only read.

    A copy is converted ``TRIES`` times, for budgets that close in on the smallest one at which the lower of the output's and the tokens'
    cosine with the dense model is at least ``fidelity``, on samples that nothing was fitted to. ``fitting`` are the options of ``apply``,
    ``reconstruct`` among them, so that each try is what the user gets.

    Cost: that of ``allocate`` and of ``TRIES`` conversions, and memory for a copy of the model.

    Raises:
        PlanError: no try is close enough; the message says how close the best one is.
        What ``allocate`` and ``apply`` raise.
    """
    allocation = prepare(plan, model, calibrate=calibrate, samples=samples, progress=progress)
    low, high = allocation.least, 1.0
    found: tuple[float, Plan, Picks] | None = None
    best = 0.0
    for _ in range(TRIES):
        budget = (low + high) / 2
        picks = allocation.pick(budget)
        candidate = allocation.plan_of(picks)
        report = apply(candidate, copy.deepcopy(model), calibrate=calibrate, samples=samples, progress=progress, **fitting)
        reached = 0.0 if report.fidelity is None else report.fidelity.lowest_cosine
        best = max(best, reached)
        if reached >= fidelity:
            high, found = budget, (budget, candidate, picks)
        else:
            low = budget
    if found is None:
        raise PlanError(
            f"no choice with up to {low:.0%} of the weights reaches a cosine of {fidelity:g}; the closest has {best:.4f}; "
            "give --reconstruct, more --minutes, more images, or a lower goal"
        )
    budget, candidate, picks = found
    return candidate, allocation.tradeoff(picks, budget)
