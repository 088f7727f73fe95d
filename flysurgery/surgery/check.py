"""Whether a plan and a model belong together. Everything here runs before the first change."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from flysurgery.errors import PlanError, ProjectionError, SurgeryError
from flysurgery.surgery.attached_plan import refuse_converted
from flysurgery.surgery.build import Dense
from flysurgery.surgery.layer_plan import LayerPlan
from flysurgery.surgery.plan import Plan
from flysurgery.walker import CONVOLUTIONS, Switch, has_own_forward, is_plain_pointwise

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_plan(plan: Plan, model: nn.Module) -> dict[str, Dense]:
    """Hold a plan against a model, whose weights may live on meta, and give the layers that it replaces.

    Raises:
        SurgeryError: the model is converted already.
        PlanError: a name that the model lacks, a module that is no plain ``nn.Linear``, other sizes or names than the plan
            says, a weight that another module shares, or a parent without the attribute to switch.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"expected a plan and then a model, got {type(plan).__name__} and {type(model).__name__}")
    refuse_converted(model)
    if not plan.replaced:
        raise PlanError("the plan replaces nothing; make one that does")
    names: dict[nn.Module, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(fqn)
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in names:
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(module)
    modules = {fqn: module for module, fqns in names.items() for fqn in fqns}
    found: dict[str, Dense] = {}
    for layer in plan.replaced:
        module = modules.get(layer.fqn)
        if module is None or not layer.fqn:
            raise PlanError(f"the plan replaces '{layer.fqn}', and the model has no module of that name; was the plan made for this model?")
        found[layer.fqn] = _checked_dense(layer, module)
        if set(names[module]) != set(layer.names):
            raise PlanError(f"layer {layer.fqn} goes by the names {names[module]} in the model, by {list(layer.names)} in the plan")
        for parameter in module.parameters(recurse=False):
            others = [names[other][0] for other in owners[parameter] if other is not module]
            if others:
                raise PlanError(f"layer {layer.fqn} shares a parameter with {others[0]}, which would be cut off; exclude the layer")
    for switch in plan.switches:
        _check_switch(switch, modules)
    return found


def check_weights(layers: Mapping[str, Dense]) -> None:
    """See that every weight to project is there and finite.

    Raises:
        SurgeryError: weights on the meta device.
        ProjectionError: NaN or infinite entries; the message names the layer.
    """
    for fqn, module in layers.items():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                raise SurgeryError(f"layer {fqn} is on the meta device and has no weights to project; load the weights first")
            if not bool(torch.isfinite(parameter).all()):
                raise ProjectionError(f"layer {fqn}: its {name} has NaN or infinite entries; mend the checkpoint or exclude the layer")


def _checked_dense(layer: LayerPlan, module: nn.Module) -> Dense:
    where = f"layer {layer.fqn}"
    if layer.conv:
        if not (isinstance(module, CONVOLUTIONS) and is_plain_pointwise(module)):
            raise PlanError(f"{where}: expected a 1x1 convolution without stride, padding and groups, the model has {module}")
    elif not isinstance(module, nn.Linear):
        raise PlanError(f"{where}: expected an nn.Linear, the model has a {type(module).__name__}")
    if has_own_forward(module):
        raise PlanError(f"{where}: it is a {type(module).__name__} with a forward of its own, which factors would not repeat")
    if is_parametrized(module):
        raise PlanError(f"{where}: its weight is parametrized; remove the parametrization first")
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise PlanError(f"{where}: it has hooks, which a new module would lose; remove them first")
    shape = tuple(module.weight.shape[:2])
    if shape != (layer.out_features, layer.in_features):
        raise PlanError(f"{where}: the plan says {layer.size}, the model has {shape[0]}x{shape[1]}")
    if (module.bias is not None) != layer.bias:
        has, says = ("a", "none") if module.bias is not None else ("no", "one")
        raise PlanError(f"{where}: the model has {has} bias there, the plan says {says}")
    if module.weight.dtype not in DTYPES:
        raise PlanError(f"{where}: expected a weight in float16, bfloat16, float32 or float64, got {module.weight.dtype}")
    return module


def _check_switch(switch: Switch, modules: dict[str, nn.Module]) -> None:
    where = f"the plan sets {switch.module_fqn}.{switch.attribute}"
    module = modules.get(switch.module_fqn)
    if module is None or not hasattr(module, switch.attribute):
        raise PlanError(f"{where}, and the model has no such attribute; was the plan made for this model?")
    value = getattr(module, switch.attribute)
    if not isinstance(value, bool):
        raise PlanError(f"{where} to {switch.value}, and in the model that attribute is no switch but {value!r}")
