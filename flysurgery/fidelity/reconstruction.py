"""Fit a converted model to the dense one, block by block and all blocks at once, and keep the best state that held-out samples saw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from flysurgery.calibration import Samples, unchanged_state
from flysurgery.errors import DataError, SurgeryError
from flysurgery.fidelity.measure import Fidelity, measure_fidelity
from flysurgery.fidelity.settings import Settings, moments, rate_for
from flysurgery.fidelity.step import Step
from flysurgery.walker import Cut

Progress = Callable[[int, int, str], None]
"""Called with the updates done, the number of all, and a few words on the error."""

TIMED = 5
"""Updates at a rate of zero that tell how long one takes."""

WARM_UP = 0.05
"""Share of the updates in which the rate grows."""

LOOKS = 8
"""Times that held-out samples judge a run."""

SLACK = 0.1
"""Share of the budget by which a run may be late before its schedule follows the clock."""


@dataclass(frozen=True)
class Reconstruction:
    """What a reconstruction did: the fidelity before and after, on held-out samples, and what it cost.

    ``kept`` is the update whose state was kept: 0 is the start.
    """

    before: Fidelity
    after: Fidelity
    updates: int
    kept: int
    batch: int
    seconds: float
    history: tuple[tuple[int, float], ...]

    def to_json(self) -> dict[str, Any]:
        """The numbers as JSON values."""
        return asdict(self)


def reconstruct(
    student: nn.Module,
    teacher: nn.Module,
    samples: Samples,
    cuts: Sequence[Cut],
    settings: Settings,
    *,
    progress: Progress | None = None,
) -> Reconstruction:
    """Fit the parameters of ``student``, in place, so that every block gives what the dense one's gives.

    All parameters that require gradients and lie behind the first cut of kind "start" learn: factors, biases, norms, scales and dense
    layers. Samples that are held out judge ``LOOKS`` times; the best state is kept, and the start is one of them. If anything
    fails or is interrupted, the student is as it was. Takes ``settings.minutes``; memory for three further copies of the parameters, one
    forward with its activations, and the pictures, which stay where they are if the device has no room.

    Raises:
        DataError: outputs that are no finite numbers, or a model that gives no tensor.
        SurgeryError: the model has no cut to hold its blocks against the dense ones, no parameter that learns, or weights in half
            precision.
    """
    started = perf_counter()
    if not any(cut.kind in ("block", "tokens") for cut in cuts):
        raise SurgeryError("the model has no place where one tensor carries everything on, so its blocks cannot be fitted one by one")
    learning = [parameter for parameter in student.parameters() if parameter.requires_grad]
    if not learning:
        raise SurgeryError("every parameter of the model has requires_grad=False, so there is nothing to fit; let some of them learn")
    small = next((each.dtype for each in learning if each.dtype in (torch.float16, torch.bfloat16)), None)
    if small is not None:
        raise SurgeryError(
            f"the steps of a reconstruction are too small for weights in {small}; convert the model in float32, then cast it"
        )
    device = next(student.parameters()).device
    held_out = list(samples.held_out())
    before = measure_fidelity(student, teacher, held_out, cuts)
    if not math.isfinite(before.relative_error):
        raise DataError(f"{samples.name}: the model's outputs are no finite numbers, so there is nothing to fit to")
    start = best = _copied(student)
    done, kept, after = 0, 0, before
    history = [(0, before.relative_error)]
    rate = rate_for(before.relative_error, settings.rate)
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
            unchanged_state(student),
            unchanged_state(teacher),
            Step(student, teacher, samples.to_view(), cuts, settings, rate) as step,
        ):
            torch.manual_seed(settings.seed)
            step.capture()
            updates = _affordable(step, settings, perf_counter() - started, device)
            looks = moments(updates, LOOKS)
            for done in range(1, updates + 1):
                # A machine that has become slower ends in time all the same.
                spent = (perf_counter() - started) / (60 * settings.minutes)
                step.update(_share(max(done / (updates + 1), spent - SLACK)))
                ends = spent - SLACK >= 1
                if done in looks or ends:
                    step.settle()
                    found = measure_fidelity(student, teacher, held_out, cuts)
                    history.append((done, found.relative_error))
                    if found.relative_error < after.relative_error:
                        best, kept, after = _copied(student), done, found
                    if ends or not math.isfinite(found.relative_error):
                        break
                if progress is not None and (done in looks or done % 10 == 0):
                    progress(done, updates, f"reconstruction, error {after.relative_error:.3f}")
        _restore(student, best)
    except BaseException:
        _restore(student, start)
        raise
    return Reconstruction(before, after, done, kept, settings.batch, perf_counter() - started, tuple(history))


def _affordable(step: Step, settings: Settings, spent: float, device: torch.device) -> int:
    """How many updates fit into what is left of the budget, by the time of a few at a rate of zero."""
    step.update(0.0)
    _wait(device)
    started = perf_counter()
    for _ in range(TIMED):
        step.update(0.0)
    _wait(device)
    each = (perf_counter() - started) / TIMED
    return max(1, int((60 * settings.minutes - spent) * 0.97 / each))


def _share(done: float) -> float:
    """The share of the highest rate when this share of the run is done: up in a line, then down in a cosine."""
    done = min(done, 1.0)
    return done / WARM_UP if done < WARM_UP else 0.5 + 0.5 * math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP))


def _copied(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@torch.no_grad()
def _restore(model: nn.Module, values: list[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
