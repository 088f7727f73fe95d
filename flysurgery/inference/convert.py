"""Plan and apply in one call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from flysurgery.calibration import Data, samples_of
from flysurgery.errors import OptionError
from flysurgery.surgery.allocating import PLACEHOLDER, FidelityGoal, allocate
from flysurgery.surgery.apply import apply, sample_shape
from flysurgery.surgery.planning import plan as make_plan
from flysurgery.surgery.projecting import Progress
from flysurgery.surgery.report import Report

AUTO = "auto"


def convert(
    model: nn.Module,
    arch: str = "monarch",
    *,
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
    **options: Any,
) -> Report:
    """Plan and apply in one call. ``options`` are those of ``plan``, the named arguments those of ``apply``. Raises what they raise.

    With ``budget``, ``max_error``, ``latency`` or ``fidelity`` (the cosine to reach), ``allocate`` chooses the architectures, and ``arch``
    and its options must not be given. ``arch="auto"`` needs one of them. The choice reaches ``fidelity`` before a reconstruction, which
    then raises it further.
    """
    tradeoff = None
    if (budget, max_error, latency, fidelity) == (None, None, None, None):
        if arch == AUTO:
            raise OptionError(f"arch '{AUTO}' needs what it is to choose by; give a budget, max_error, latency or fidelity")
        plan = make_plan(model, arch, **options)
    else:
        named = [name for name in ("nblocks", "rank", "patterns") if options.get(name) is not None]
        if arch not in ("monarch", AUTO):
            named.append("arch")
        if named:
            raise OptionError(
                f"a budget, max_error, latency and fidelity choose the architectures, so {' and '.join(named)} cannot be given with them"
            )
        plan = make_plan(model, PLACEHOLDER, **options)
        if calibrate is not None:  # the same samples for the choice and for the fit
            calibrate = samples_of(calibrate, count=samples, shape=sample_shape(plan))
        plan, tradeoff = allocate(
            plan,
            model,
            budget=budget,
            max_error=max_error,
            latency=latency,
            fidelity=None if fidelity is None else FidelityGoal(fidelity, sequential, permute),
            calibrate=calibrate,
            samples=samples,
            progress=progress,
        )
    report = apply(
        plan,
        model,
        calibrate=calibrate,
        samples=samples,
        sequential=sequential,
        permute=permute,
        reconstruct=reconstruct,
        seed=seed,
        progress=progress,
        verify=verify,
    )
    return replace(report, tradeoff=tradeoff)
