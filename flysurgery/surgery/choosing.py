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
from flysurgery.fidelity import Progress
from flysurgery.inference.optimize import MEASURED_IMAGES
from flysurgery.reason import Reason
from flysurgery.surgery.allocation import Allocation, Picks, check_budget, prepare
from flysurgery.surgery.choices import Measurement, TimedGroup, Tradeoff
from flysurgery.surgery.measuring import WholeTimer, WholeTimes, measure_groups
from flysurgery.surgery.plan import ExampleInput, Plan


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
    calibrate: Data | None = None,
    samples: int | None = None,
    progress: Progress | None = None,
) -> tuple[Plan, Tradeoff, Measurement]:
    """``plan`` with choices among dense, low rank and the named architectures, made by times on the device where ``model`` is.

    Each group of ``measure_groups`` gets the choice of least error among those that are faster than dense by more than the noise. A
    ``budget`` bounds the milliseconds of all groups instead, as in ``allocate``. Then the whole model is timed, dense and converted with
    random weights. While it is slower than dense, the kind of group that gained the least goes back to dense. The model is only read.

    Raises:
        PlanError: nothing is faster than dense.
        OptionError: a model that does not take one tensor, and the cases of ``allocate``.
        InferenceError: the model cannot run in this setting: too little memory, or no operator for its dtype.
    """
    check_budget(budget, measured=True, named=())
    device = next(model.parameters()).device
    dense = copy.deepcopy(model).eval().requires_grad_(False)
    dense = dense if setting.dtype is None else dense.to(setting.dtype)
    example = _example(plan, setting, device, next(p.dtype for p in dense.parameters() if p.is_floating_point()))
    with _in_one_sentence(example):
        with torch.no_grad():
            dense(example)
        groups = measure_groups(plan, dense, example, fused=setting.optimized, progress=progress)
    allocation = prepare(plan, model, budget=budget, times=groups, calibrate=calibrate, samples=samples, progress=progress)
    with _in_one_sentence(example):
        timer = WholeTimer(dense, example, optimized=setting.optimized)
        picks, reasons, times = _not_slower(allocation, allocation.pick(budget), timer, groups)
    measurement = Measurement(
        device=str(device) if device.type != "cuda" else torch.cuda.get_device_name(device),
        dtype=_name(example.dtype),
        batch=len(example),
        groups=tuple(groups),
        chosen=tuple(option.name for option in picks),
        dense_ms=times.dense_ms,
        dense_optimized_ms=times.dense_optimized_ms,
        converted_ms=times.converted_ms,
        returned=tuple(fqn for number in sorted(reasons) for fqn in groups[number].fqns),
    )
    return allocation.plan_of(picks, reasons), allocation.tradeoff(picks, budget), measurement


def _not_slower(
    allocation: Allocation, picks: Picks, timer: WholeTimer, groups: Sequence[TimedGroup]
) -> tuple[Picks, dict[int, Reason], WholeTimes]:
    """The picks without the groups that make the whole model slower than dense, why these went back, and the times of that model."""
    reasons: dict[int, Reason] = {}
    while True:
        times = timer.times(allocation.plan_of(picks, reasons))
        if times.converted_ms <= times.reference_ms:
            return picks, reasons, times
        margin = f"{times.converted_ms / times.reference_ms - 1:+.1%}"
        text = f"with it the whole model takes {times.converted_ms:.3g} ms here, dense {times.reference_ms:.3g} ms ({margin})"
        dense = [options[0] for options in allocation.options]
        converted = [number for number, option in enumerate(picks) if option is not dense[number]]
        least = min(converted, key=lambda number: dense[number].cost - picks[number].cost)
        kind = (groups[least].choices, picks[least].name)
        back = [number for number in converted if (groups[number].choices, picks[number].name) == kind]
        if back == converted:
            what = f"{len(timer.example)} samples in {_name(timer.example.dtype)}"
            raise PlanError(f"nothing would be replaced: {text}, at {what}; leave it dense")
        reasons |= dict.fromkeys(back, Reason("slower-model", text))
        picks = tuple(dense[number] if number in back else option for number, option in enumerate(picks))


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
