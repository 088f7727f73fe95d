"""Whether a plan and a model belong together: before the first change by what both say, after it by one forward."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from flysurgery.calibration import unchanged_state
from flysurgery.errors import PlanError, ProjectionError, SurgeryError, raised_as
from flysurgery.surgery.change import Dense, refuse_converted
from flysurgery.surgery.plan import ExampleInput, LayerPlan, Plan
from flysurgery.walker import CONVOLUTIONS, Switch, module_obstacles, modules_with_separated

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
    modules = modules_with_separated(model, [layer.fqn for layer in plan.replaced])
    names: dict[nn.Module, list[str]] = {}
    for fqn, module in modules.items():
        names.setdefault(module, []).append(fqn)
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in names:
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
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


def check_runs(plan: Plan, model: nn.Module) -> None:
    """Run the model once, in eval mode, on an input as the plan was made with; modes, buffers and random state stay.

    Raises:
        SurgeryError: the forward failed, or replaced modules were not called; the message names them.
    """
    inputs = example_of(plan, model)
    if inputs is None:
        raise SurgeryError(
            "the plan describes no example input to verify the model with; plan with tensors as example, or pass verify=False"
        )
    ran: set[nn.Module] = set()

    def note(module: nn.Module, *_: object) -> None:
        ran.add(module)

    modules = {layer.fqn: model.get_submodule(layer.fqn) for layer in plan.replaced}
    devices = sorted({parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda})
    with ExitStack() as hooks:
        for module in modules.values():
            hooks.enter_context(module.register_forward_hook(note))
        hooks.enter_context(raised_as(SurgeryError, "the converted model failed in its first forward, so it was put back as it was"))
        with torch.no_grad(), torch.random.fork_rng(devices), unchanged_state(model):
            model(*inputs)
    silent = [fqn for fqn, module in modules.items() if module not in ran]
    if silent:
        raise SurgeryError(
            f"{len(silent)} replaced layers were not called in a forward, so the model was put back as it was; "
            f"exclude them: {', '.join(silent[:5])}{', ...' if len(silent) > 5 else ''}"
        )


def example_of(plan: Plan, model: nn.Module) -> tuple[Any, ...] | None:
    """Arguments for one forward, as the plan describes them, on the model's device; None where it describes none."""
    if plan.example is None:
        return None
    return tuple(
        [_input(one, model) for one in each] if isinstance(each, tuple) else None if each is None else _input(each, model)
        for each in plan.example
    )


def _input(example: ExampleInput, model: nn.Module) -> Tensor:
    dtype = getattr(torch, example.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise SurgeryError(f"the plan's example input has the unknown dtype '{example.dtype}'")
    weight = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    if example.values:
        return torch.tensor(example.values, dtype=dtype, device=weight.device).view(example.shape)
    if not dtype.is_floating_point:
        return torch.zeros(example.shape, dtype=dtype, device=weight.device)
    # The model's dtype and not the plan's: a plan made on a float32 skeleton serves a half-precision model.
    return torch.randn(example.shape, generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)


def _checked_dense(layer: LayerPlan, module: nn.Module) -> Dense:
    where = f"layer {layer.fqn}"
    if layer.conv:
        if not isinstance(module, CONVOLUTIONS):
            raise PlanError(f"{where}: expected a 1x1 convolution, the model has a {type(module).__name__}")
    elif not isinstance(module, nn.Linear):
        raise PlanError(f"{where}: expected an nn.Linear, the model has a {type(module).__name__}")
    for obstacle in module_obstacles(module):
        raise PlanError(f"{where}: {obstacle.text}; change that first, or exclude the layer")
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
