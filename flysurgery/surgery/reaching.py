"""The least costs at which the calibrated model reaches a fidelity."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

from torch import nn

from flysurgery.errors import DataError, OptionError
from flysurgery.surgery.allocation import Allocation
from flysurgery.surgery.apply import apply
from flysurgery.surgery.plan import Plan
from flysurgery.surgery.projecting import Progress
from flysurgery.surgery.search import STEPS, Trials, within
from flysurgery.surgery.tradeoff import Search, Tradeoff


@dataclass(frozen=True)
class FidelityGoal:
    """The ``target`` that output and token cosine are to reach, and the options of ``apply`` that the model will be calibrated with.

    Raises:
        OptionError: a target that is no cosine between 0 and 1.
    """

    target: float
    sequential: bool = False
    permute: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise OptionError(f"fidelity is the cosine to reach, above 0 and below 1; got {self.target!r}")


def reach(allocation: Allocation, model: nn.Module, goal: FidelityGoal, progress: Progress | None = None) -> tuple[Plan, Tradeoff]:
    """The cheapest plan found of which the calibrated model has both cosines at the goal.

    Each trial calibrates a copy of the model, which is only read, and measures its fidelity on the samples held out, as ``apply`` does
    and reports it; there is no reconstruction. One trial has the cheapest choices, and then the range of costs is halved ``STEPS`` times.

    Raises:
        OptionError: no plan tried reaches the goal; the message has the closest.
        DataError: the dense model or a converted one gives outputs that are not finite.
        What ``apply`` raises.
    """

    def see(plan: Plan) -> float:
        trial = copy.deepcopy(model)
        found = apply(plan, trial, calibrate=allocation.samples, sequential=goal.sequential, permute=goal.permute).fidelity
        assert found is not None  # there are samples
        if not math.isfinite(found.lowest_cosine):
            raise DataError("the fidelity is no number: one of the two models gives outputs that are not finite")
        if progress is not None:
            progress(len(trials.seen) + 1, STEPS + 1, "fidelity")
        return found.lowest_cosine

    trials = Trials(allocation, see, lambda cosine: cosine >= goal.target)
    cost = allocation.least if trials.meets(allocation.least) else trials.bisect(allocation.whole, allocation.least)
    if cost == allocation.whole:  # which is dense and was not tried
        share, closest = max(trials.seen, key=lambda trial: trial[1])
        closest = math.floor(1e4 * closest) / 1e4  # so that it is reached when it is asked for
        raise OptionError(
            f"no choice of architectures that was tried reaches a fidelity of {goal.target}: the closest, at a share of {share:.3f} "
            f"of the dense layers' {allocation.unit}, has {closest:.4f}; ask for at most that, or leave the model dense"
        )
    words = f"the fewest {allocation.unit} at which output and token cosine reach {goal.target}"
    return allocation.chosen(within(cost), words, Search("the lowest cosine", goal.target, tuple(trials.seen)))
