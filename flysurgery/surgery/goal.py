"""Convert a model with the fewest weights that keep it as close to the dense one as was asked for."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import nn

from flysurgery.calibration import Data, samples_of
from flysurgery.errors import PlanError
from flysurgery.surgery.allocation import prepare
from flysurgery.surgery.apply import apply, install, sample_shape
from flysurgery.surgery.plan import Plan
from flysurgery.surgery.projecting import Progress
from flysurgery.surgery.report import Report

TRIES = 5
"""How often a copy is converted. The last step between two budgets is a 32nd of the distance from the smallest to all."""


def convert_to_fidelity(
    plan: Plan,
    model: nn.Module,
    fidelity: float,
    *,
    calibrate: Data,
    samples: int | None = None,
    progress: Progress | None = None,
    **fitting: Any,
) -> Report:
    """Replace the layers that ``plan`` replaces, in place, by as few weights as ``fidelity`` allows; gives the report of ``apply``.

    A copy is converted ``TRIES`` times, for budgets that close in on the smallest one at which the lower of the output's and the tokens'
    cosine with the dense model is at least ``fidelity``, on the held-out samples of the report. The model gets the weights of the
    smallest copy that is close enough. ``fitting`` are the options of ``apply``. As the budget is chosen by the held-out samples, the
    fidelity on others may be a little lower.

    Cost: that of ``allocate`` and of ``TRIES`` conversions, and memory for two copies of the model.

    Raises:
        PlanError: no copy is close enough; the message says how close the best one is. The model is as it was.
        What ``allocate`` and ``apply`` raise.
    """
    taken = samples_of(calibrate, count=samples, shape=sample_shape(plan))
    given = {"calibrate": taken, "samples": samples, "progress": progress}
    allocation = prepare(plan, model, **given)
    low, high, best = allocation.least, 1.0, 0.0
    found: tuple[Plan, nn.Module, Report] | None = None
    for _ in range(TRIES):
        budget = (low + high) / 2
        picks = allocation.pick(budget)
        candidate, converted = allocation.plan_of(picks), copy.deepcopy(model)
        report = apply(candidate, converted, **given, **fitting)
        reached = 0.0 if report.fidelity is None else report.fidelity.lowest_cosine
        best = max(best, reached)
        if reached >= fidelity:
            high, found = budget, (candidate, converted, replace(report, tradeoff=allocation.tradeoff(picks, budget)))
        else:
            low = budget
    if found is None:
        raise PlanError(
            f"no choice with up to {low:.0%} of the weights reaches a cosine of {fidelity:g}; the closest has {best:.4f}; "
            "give --reconstruct, more --minutes, more images, or a lower goal"
        )
    candidate, converted, report = found
    install(candidate, model)
    model.load_state_dict(converted.state_dict())
    return report
