"""Makes a plan by measured times, with which the whole model is no slower than dense."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flysurgery.calibration import Data
from flysurgery.errors import FlysurgeryError, InferenceError, OptionError, PlanError, first_line
from flysurgery.inference.measuring import Progress, WholeTimer, WholeTimes, measure_groups
from flysurgery.inference.optimize import MEASURED_IMAGES
from flysurgery.surgery import (
    Allocation,
    ExampleInput,
    FidelityGoal,
    Measurement,
    Plan,
    Reason,
    Search,
    TimedGroup,
    Tradeoff,
    Trials,
    check_budget,
    decide,
    prepare,
    within,
)


@dataclass(frozen=True)
class Setting:
    """The use for which a model should be fast: ``batch`` samples a forward (None: 64 on CUDA, else one) in ``dtype`` (None: the model's).

    With ``optimized`` it will be optimized, and is also compared with optimized dense.
    """

    batch: int | None = None
    dtype: torch.dtype | None = None
    optimized: bool = False


def choose_measured(
    plan: Plan,
    model: nn.Module,
    setting: Setting,
    *,
    budget: float | None = None,
    max_error: float | None = None,
    fidelity: FidelityGoal | None = None,
    ms: float | None = None,
    calibrate: Data | None = None,
    samples: int | None = None,
    progress: Progress | None = None,
) -> tuple[Plan, Tradeoff, Measurement]:
    """``plan`` with choices among dense, low rank and the named architectures, made by times on the device where ``model`` is.

    Each group of ``measure_groups`` gets the choice of least error among those that are faster than dense by more than the noise. With
    ``budget``, ``max_error`` or ``fidelity``, these bound the groups' milliseconds, the error or the fidelity instead, as in ``allocate``.
    Then the whole model is timed, dense and converted with random weights. While it is slower than dense, the kind of group that gained
    the least goes back to dense. ``ms`` bounds the milliseconds of the whole model: plans of several budgets are timed, and the largest
    one within the bound is chosen. The model is only read.

    Raises:
        PlanError: nothing is faster than dense, or dense keeps to ``ms``.
        OptionError: a model that does not take one tensor, ``ms`` that even the fastest choices exceed, and the cases of ``allocate``.
        InferenceError: the model cannot run in this setting: too little memory, or no operator for its dtype.
    """
    check_budget(budget, max_error, None, fidelity=None if fidelity is None else fidelity.target, ms=ms, measured=True)
    device = next(model.parameters()).device
    dense = copy.deepcopy(model).eval().requires_grad_(False)
    dense = dense if setting.dtype is None else dense.to(setting.dtype)
    example = _example(plan, setting, device, next(p.dtype for p in dense.parameters() if p.is_floating_point()))
    with _in_one_sentence(example):
        with torch.no_grad():
            dense(example)
        groups = measure_groups(plan, dense, example, fused=setting.optimized, progress=progress)
    allocation = prepare(
        plan,
        model,
        budget=budget,
        needs_data=fidelity is not None,
        times=groups,
        calibrate=calibrate,
        samples=samples,
        progress=progress,
    )
    with _in_one_sentence(example):
        timer = WholeTimer(dense, example, optimized=setting.optimized)
    if ms is None:
        chosen, tradeoff = decide(allocation, model, budget=budget, max_error=max_error, fidelity=fidelity, progress=progress)
        with _in_one_sentence(example):
            kept, times = _not_slower(chosen, timer, groups)
    else:
        with _in_one_sentence(example):
            chosen, tradeoff, times = _within(ms, allocation, timer)
        kept = chosen
    returned = tuple(layer.fqn for layer in chosen.replaced if layer.fqn not in {each.fqn for each in kept.replaced})
    measurement = Measurement(
        device=str(device) if device.type != "cuda" else torch.cuda.get_device_name(device),
        dtype=_name(example.dtype),
        batch=len(example),
        groups=tuple(groups),
        chosen=tuple(group.in_plan(kept).name for group in groups),
        dense_ms=times.dense_ms,
        dense_optimized_ms=times.dense_optimized_ms,
        converted_ms=times.converted_ms,
        returned=returned,
    )
    return kept, allocation.after_return(kept, tradeoff) if returned else tradeoff, measurement


def _not_slower(plan: Plan, timer: WholeTimer, groups: Sequence[TimedGroup]) -> tuple[Plan, WholeTimes]:
    """The plan without the groups that make the whole model slower than dense, and the times of that model."""
    while True:
        times = timer.times(plan)
        if times.converted_ms <= times.reference_ms:
            return plan, times
        margin = f"{times.converted_ms / times.reference_ms - 1:+.1%}"
        text = f"with it the whole model takes {times.converted_ms:.3g} ms here, dense {times.reference_ms:.3g} ms ({margin})"
        remaining = [group for group in groups if group.in_plan(plan) is not group.dense]
        least = min(remaining, key=lambda group: group.dense.ms - group.in_plan(plan).ms)
        back = [group for group in remaining if (group.choices, group.in_plan(plan).name) == (least.choices, least.in_plan(plan).name)]
        plan = plan.keeping({fqn: Reason("slower-model", text) for group in back for fqn in group.fqns})
        if not plan.replaced:
            what = f"{len(timer.example)} samples in {_name(timer.example.dtype)}"
            raise PlanError(f"nothing would be replaced: {text}, at {what}; leave it dense")


def _within(ms: float, allocation: Allocation, timer: WholeTimer) -> tuple[Plan, Tradeoff, WholeTimes]:
    """Of the plans tried, the one of most cost with which the whole model takes at most ``ms`` milliseconds and no more than dense."""
    trials = Trials(allocation, timer.times, lambda times: times.converted_ms <= min(ms, times.reference_ms))
    fastest = trials.at(allocation.least)
    if fastest.reference_ms <= ms:
        text = f"dense takes {fastest.reference_ms:.3g} ms, which is within {ms:g} ms"
        raise PlanError(f"nothing would be replaced: {text}; ask for less, or leave it dense")
    if fastest.converted_ms > ms:
        raise OptionError(
            f"no choice of architectures takes at most {ms:g} ms for the whole model here: the fastest tried takes "
            f"{fastest.converted_ms:.4g} ms; ask for at least that"
        )
    cost = trials.bisect(allocation.least, allocation.whole)
    search = Search("milliseconds of the whole model", ms, tuple((share, times.converted_ms) for share, times in trials.seen))
    plan, tradeoff = allocation.chosen(within(cost), f"the least predicted error within {ms:g} ms for the whole model", search)
    return plan, tradeoff, trials.at(cost)


@contextmanager
def _in_one_sentence(example: Tensor) -> Iterator[None]:
    """Turn PyTorch's errors about memory, dtypes and launches into an ``InferenceError``."""
    try:
        yield
    except FlysurgeryError:
        raise
    except RuntimeError as error:
        what = f"{len(example)} samples in {_name(example.dtype)} on {example.device}"
        raise InferenceError(f"measuring with {what} failed: {first_line(error)}; try another batch, dtype or device") from error


def _example(plan: Plan, setting: Setting, device: torch.device, dtype: torch.dtype) -> Tensor:
    first = plan.example[0] if plan.example is not None and len(plan.example) == 1 else None
    if not isinstance(first, ExampleInput) or not getattr(torch, first.dtype).is_floating_point:
        raise OptionError("measuring takes a model whose only input is one tensor of images or the like; choose by a budget of weights")
    batch = setting.batch or (MEASURED_IMAGES if device.type == "cuda" else 1)
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn((batch, *first.shape[1:]), generator=generator, device=device, dtype=dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
