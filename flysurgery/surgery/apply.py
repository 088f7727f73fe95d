"""Carry a plan out: check all, project all, swap all, verify; or leave the model as it was."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from torch import nn

from flysurgery.surgery.change import Change
from flysurgery.surgery.check import check_plan, check_weights
from flysurgery.surgery.plan import Plan
from flysurgery.surgery.planning import plan as make_plan
from flysurgery.surgery.projecting import Progress, project_layers
from flysurgery.surgery.report import Report, row_of
from flysurgery.surgery.verify import check_runs


def apply(plan: Plan, model: nn.Module, *, progress: Progress | None = None, verify: bool = True) -> Report:
    """Replace the planned layers of ``model``, in place, by their projections.

    Every check comes before the first change. The new modules are made aside, with the dtype, device, mode, biases
    and ``requires_grad`` of the old ones; then all are swapped in, the plan's switches are set, and with ``verify`` one
    forward in eval mode must call each of them. Whatever fails or is interrupted, the model is as it was before.

    Until the end the old weights are kept, so memory peaks at the dense model, the factors, and a few layers in float64.

    Raises:
        SurgeryError: the model is converted already, has no weights (meta), or fails the verifying forward.
        PlanError: the plan does not fit the model.
        ProjectionError: a weight or bias has NaN or infinite entries; the message names the layer.
    """
    started = perf_counter()
    dense = check_plan(plan, model)
    check_weights(dense)
    params_before = _count(model)
    modules, rows = project_layers(plan, dense, progress)
    with Change(model) as change:
        change.convert(plan, modules)
        if verify:
            check_runs(plan, model)
    return Report(
        rows=tuple(rows.get(layer.fqn) or row_of(layer, (), None, None) for layer in plan.layers),
        model_params_before=params_before,
        model_params_after=_count(model),
        seconds=perf_counter() - started,
        verified=verify,
    )


def convert(model: nn.Module, arch: str = "monarch", *, progress: Progress | None = None, verify: bool = True, **options: Any) -> Report:
    """``plan`` and ``apply`` in one; ``options`` are those of ``plan``. Raises what they raise."""
    return apply(make_plan(model, arch, **options), model, progress=progress, verify=verify)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
