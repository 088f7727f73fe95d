"""Plan, choose and apply in one call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from flysurgery.calibration import Data, samples_of
from flysurgery.inference.choosing import Setting, choose_measured
from flysurgery.inference.measuring import Progress
from flysurgery.surgery import PLACEHOLDER, FidelityGoal, Measurement, Plan, Report, Tradeoff, allocate, apply, is_chosen, sample_shape
from flysurgery.surgery import plan as make_plan


def convert(
    model: nn.Module,
    arch: str = "monarch",
    *,
    init: Literal["projection", "random"] = "projection",
    calibrate: Data | None = None,
    samples: int | None = None,
    sequential: bool = False,
    permute: bool = False,
    reconstruct: bool | float = False,
    seed: int = 0,
    progress: Progress | None = None,
    verify: bool = True,
    budget: float | None = None,
    max_error: float | None = None,
    latency: Path | None = None,
    fidelity: float | None = None,
    ms: float | None = None,
    measure: Setting | bool = False,
    **options: Any,
) -> Report:
    """Plan and apply in one call. ``options`` are those of ``plan``, the named arguments those of ``apply``. Raises what they raise.

    With ``budget``, ``max_error``, ``latency`` or ``fidelity`` (the cosine to reach), ``allocate`` chooses the architectures, and ``arch``
    and its options must not be given. ``measure`` times all choices where the model is: True, or a ``Setting`` with batch and dtype. Then
    each layer gets what is faster than dense, or, with ``ms``, the whole model keeps to these milliseconds; see ``choose_measured``.
    ``arch="auto"`` needs one of them. The choice reaches ``fidelity`` before a reconstruction, which then raises it further.
    """
    goal: dict[str, Any] = {"budget": budget, "max_error": max_error, "latency": latency, "fidelity": fidelity, "ms": ms}
    setting = Setting() if measure is True else measure or None
    tradeoff = measurement = None
    named = [name for name in ("nblocks", "rank", "patterns") if options.get(name) is not None]
    if not is_chosen(arch, goal, named, measured=setting is not None):
        plan = make_plan(model, arch, **options)
    else:
        plan = make_plan(model, PLACEHOLDER, **options)
        if calibrate is not None:  # the same samples for the choice and for the fit
            calibrate = samples_of(calibrate, count=samples, shape=sample_shape(plan))
        goal["fidelity"] = None if fidelity is None else FidelityGoal(fidelity, sequential, permute)
        plan, tradeoff, measurement = choose(plan, model, setting, **goal, calibrate=calibrate, samples=samples, progress=progress)
    report = apply(
        plan,
        model,
        init=init,
        calibrate=calibrate,
        samples=samples,
        sequential=sequential,
        permute=permute,
        reconstruct=reconstruct,
        seed=seed,
        progress=progress,
        verify=verify,
    )
    return replace(report, tradeoff=tradeoff, measurement=measurement)


def choose(
    plan: Plan, model: nn.Module, setting: Setting | None, *, latency: Path | None, ms: float | None, **goal: Any
) -> tuple[Plan, Tradeoff, Measurement | None]:
    """``plan`` with a choice for each layer: by times measured in ``setting``, or without one as ``allocate`` chooses.

    ``goal`` has what both take: ``budget``, ``max_error``, ``fidelity``, ``calibrate``, ``samples``, ``progress``. Raises what they raise.
    """
    if setting is not None:
        return choose_measured(plan, model, setting, ms=ms, **goal)
    return *allocate(plan, model, latency=latency, **goal), None
