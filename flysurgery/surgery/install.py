"""Put the modules of a plan in place without their weights, as loading a checkpoint needs it."""

from __future__ import annotations

from torch import nn

from flysurgery.surgery.build import build, empty_weights
from flysurgery.surgery.check import check_plan
from flysurgery.surgery.plan import Plan
from flysurgery.surgery.transaction import Change


def install(plan: Plan, model: nn.Module) -> None:
    """Replace the planned layers of ``model``, in place, by modules of the same shapes, and set the plan's switches.

    Nothing is projected: the factors hold arbitrary numbers until weights are loaded. Works on the meta device, where
    nothing is allocated. Every check comes before the first change.

    Raises:
        SurgeryError: the model is converted already.
        PlanError: the plan does not fit the model: a name that it lacks, or other sizes.
    """
    dense = check_plan(plan, model)
    modules = {layer.fqn: build(layer, dense[layer.fqn], empty_weights(dense[layer.fqn])) for layer in plan.replaced}
    with Change(model) as change:
        change.convert(plan, modules)
