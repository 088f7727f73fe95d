"""What a converted model carries: the plan it was converted by, and how its parents' switches stood before; what an optimized one does."""

from __future__ import annotations

from torch import nn

from flysurgery.errors import SurgeryError
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.surgery.plan import Plan

PLAN = "_flysurgery_plan"
SWITCHES_BEFORE = "_flysurgery_switches_before"
STANDS_FOR = "_flysurgery_stands_for"
"""On a fused module of an optimized model: the module in whose place it stands; on one on which a fused method was set, itself, and the
method's name."""


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that ``model`` was converted by, None for a model that is not converted. Copies and pickles keep it."""
    return getattr(model, PLAN, None)


def converted_layers(model: nn.Module) -> dict[str, ButterflyLinear | SplitLinear]:
    """The converted layers by name, a shared one under each of its names; a split layer counts, its parts do not."""
    parts = {part for module in model.modules() if isinstance(module, SplitLinear) for part in module.children()}
    return {
        fqn: module
        for fqn, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, ButterflyLinear | SplitLinear) and module not in parts
    }


def refuse_converted(model: nn.Module) -> None:
    """Raise ``SurgeryError`` for a model that is converted already, or optimized."""
    refuse_optimized(model)
    layers = converted_layers(model)
    if layers:
        first = next(iter(layers)) or type(model).__name__
        raise SurgeryError(f"the model is converted already ({len(layers)} layers, such as {first}); densify it first")


def is_optimized(model: nn.Module) -> bool:
    """Whether fused modules stand in ``model``, or a fused method was set on one of its own."""
    return any(STANDS_FOR in vars(module) for module in model.modules())


def refuse_optimized(model: nn.Module) -> None:
    """Raise ``SurgeryError`` for a model whose fused modules refer to the layers that surgery would replace, and for what is no model."""
    if not isinstance(model, nn.Module):
        made = f"; build it first, as with timm.create_model('{model}')" if isinstance(model, str) else ""
        raise SurgeryError(f"expected a torch.nn.Module, got {type(model).__name__}{made}")
    if is_optimized(model):
        raise SurgeryError("the model is optimized for inference; put its own layers back first, with flysurgery.restore(model)")
