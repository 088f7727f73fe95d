"""Change a model, or leave it as it was after an error: what a converted model carries, and the modules that take each other's places."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from flysurgery.errors import SurgeryError
from flysurgery.factors import factors_to_dense
from flysurgery.inference import is_optimized
from flysurgery.layers import ButterflyConv, ButterflyLinear, SplitLinear
from flysurgery.surgery.base import ENTRY_POINT, is_of_timm, is_of_transformers, quantization_entry
from flysurgery.surgery.plan import LayerPlan, Part, Plan
from flysurgery.walker import SeparateAttention, Switch, separated

Dense: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
"""What can be replaced: linears, and convolutions with a kernel of one."""

PLAN = "_flysurgery_plan"
SWITCHES_BEFORE = "_flysurgery_switches_before"


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


def refuse_optimized(model: nn.Module) -> None:
    """Raise ``SurgeryError`` for a model that something else refers to or wraps: fused modules, peft, torch.compile; and for no model."""
    if not isinstance(model, nn.Module):
        made = f"; build it first, as with timm.create_model('{model}')" if isinstance(model, str) else ""
        raise SurgeryError(f"expected a torch.nn.Module, got {type(model).__name__}{made}")
    if "_orig_mod" in model._modules:
        raise SurgeryError("the model is wrapped by torch.compile; give the model in it, model._orig_mod, and compile it again afterwards")
    classes = ((name, kind) for name, module in model.named_modules() for kind in type(module).__mro__)
    adapter = next((name for name, kind in classes if kind.__module__.startswith("peft.")), None)
    if adapter is not None:
        where = f"around {adapter}" if adapter else "around the model"
        raise SurgeryError(f"the model has adapters of peft ({where}); convert it first, or merge them: model.merge_and_unload()")
    if is_optimized(model):
        raise SurgeryError("the model is optimized for inference; put its own layers back first, with flysurgery.restore(model)")


@contextmanager
def changing(model: nn.Module, *, keep: bool = True) -> Iterator[None]:
    """Inside, modules and attributes of ``model`` may be changed. An exception puts all back; without ``keep`` they are always put back."""
    stores: list[Any] = [store for module in model.modules() for store in (vars(module), module._modules, *_lists(module))]
    before = [(store, copy.copy(store)) for store in stores]
    is_kept = False
    try:
        yield
        is_kept = keep
    finally:
        for store, content in () if is_kept else before:
            if isinstance(store, list):
                store[:] = content
            else:
                for name in store.keys() - content.keys():
                    del store[name]
                store.update(content)


def _lists(module: nn.Module) -> list[list[Any]]:
    """The lists that a module has: some classes call their children from one of their own."""
    return [value for value in vars(module).values() if isinstance(value, list)]


def convert(model: nn.Module, plan: Plan, modules: Mapping[str, nn.Module]) -> None:
    """Prepare the model, put the new modules in place under all their names, and leave the plan on the model."""
    before = tuple(replace(each, value=getattr(model.get_submodule(each.module_fqn), each.attribute)) for each in plan.switches)
    attentions = prepare(model, plan)
    for layer in plan.layers:
        if layer.fqn in modules:
            swap(model, layer.names, modules[layer.fqn])
    for attention in attentions:
        attention.copy_views()
    setattr(model, SWITCHES_BEFORE, before)
    setattr(model, PLAN, plan)
    described: Any = model
    if is_of_transformers(model):
        described.config = copy.copy(described.config)  # transformers lets models share the one that they were built from
        described.config.quantization_config = quantization_entry(plan)  # for ``save_pretrained``
    elif is_of_timm(model) and plan.base is not None:  # for timm's ``save_for_hf``
        _describe(model, ENTRY_POINT, {"base": plan.base, "base_args": dict(plan.base_args), "plan": plan.to_json()})


def prepare(model: nn.Module, plan: Plan) -> set[SeparateAttention]:
    """Have the planned layers called, as modules: set the plan's switches, and put in the attentions that are returned."""
    attentions = separated(model, [layer.fqn for layer in plan.replaced])
    for fqn, attention in attentions.items():
        swap(model, (fqn,), attention)
    _switch(model, plan.switches)
    return {*attentions.values()}


def unconvert(model: nn.Module) -> None:
    """Join separate attentions, set the switches back and take the plan off the model."""
    plan = plan_of(model)
    for attention in [each for each in model.modules() if isinstance(each, SeparateAttention)]:
        fqns = [fqn for fqn, each in model.named_modules(remove_duplicate=False) if each is attention]
        swap(model, fqns, attention.joined())
    _switch(model, vars(model).pop(SWITCHES_BEFORE, ()))
    vars(model).pop(PLAN, None)
    described: Any = model
    if is_of_transformers(model):
        described.config = copy.copy(described.config)
        vars(described.config).pop("quantization_config", None)
    elif is_of_timm(model) and plan is not None and plan.base is not None:
        _describe(model, plan.base.partition(".")[0], dict(plan.base_args))


def _describe(model: Any, architecture: str, arguments: dict[str, Any]) -> None:
    """Let a model of timm say that timm builds it under this name, with these arguments."""
    model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, "architecture": architecture}
    model._model_args = arguments


def swap(model: nn.Module, fqns: Iterable[str], new: nn.Module) -> None:
    """Put ``new`` in the place of the module of these names, in the same order among its siblings."""
    for fqn in fqns:
        parent, _, name = fqn.rpartition(".")
        # Straight into the registry: what a class does in __setattr__ could not be taken back.
        holder = model.get_submodule(parent)
        old = holder._modules[name]
        holder._modules[name] = new
        for listed in _lists(holder):
            listed[:] = [new if each is old else each for each in listed]


def _switch(model: nn.Module, switches: Iterable[Switch]) -> None:
    for each in switches:
        setattr(model.get_submodule(each.module_fqn), each.attribute, each.value)


def draw_anew(model: nn.Module) -> None:
    """Draw the weights of every linear and converted layer of ``model``, which ``install`` leaves without values."""
    for module in model.modules():
        if isinstance(module, ButterflyLinear | nn.Linear):
            module.reset_parameters()


def matrix_of(dense: Dense, part: Part) -> Tensor:
    """The rows of the weight that are one part; shape (rows, in_features), without a copy."""
    return dense.weight.detach()[part.start : part.stop].flatten(1)


def build(layer: LayerPlan, dense: Dense, weights: Sequence[Sequence[Tensor]]) -> nn.Module:
    """The module for ``layer``, with the device, dtype, mode and ``requires_grad`` of ``dense``.

    ``weights`` are the factors of each part, or its one dense weight where it has no architecture. Bias entries are copied. No random
    numbers are drawn.
    """
    modules = {part.name: _part(part, dense, of_part) for part, of_part in zip(layer.parts, weights, strict=True)}
    new = modules[None] if None in modules else SplitLinear({name: module for name, module in modules.items() if name is not None})
    return new.train(dense.training)


def build_empty(layer: LayerPlan, dense: Dense) -> nn.Module:
    """The module for ``layer`` with weights of the right shapes that hold nothing yet."""
    weights = []
    for part in layer.parts:
        shapes = [each.factor_shape for each in part.architecture] if part.architecture else [matrix_of(dense, part).shape]
        weights.append([torch.empty(shape, dtype=dense.weight.dtype, device=dense.weight.device) for shape in shapes])
    return build(layer, dense, weights)


def dense_layer(layer: ButterflyLinear | SplitLinear) -> nn.Module:
    """The ``nn.Linear`` or 1x1 convolution with the product of the factors, summed in float64 and rounded once to their dtype.

    Device, mode and ``requires_grad`` stay; the parts of a split layer become one matrix again.
    """
    parts: list[ButterflyLinear | nn.Linear] = list(layer.children()) if isinstance(layer, SplitLinear) else [layer]  # pyright: ignore
    biases = [part.bias for part in parts if part.bias is not None]
    axes = layer.axes if isinstance(layer, ButterflyConv) else 0
    kind, kernel = (nn.Linear, ()) if axes == 0 else ((nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1], (1,))
    new = kind(layer.in_features, layer.out_features, *kernel, bias=bool(biases), device="meta")
    trains = any(parameter.requires_grad for part in parts for name, parameter in part.named_parameters() if name != "bias")
    new.weight = nn.Parameter(torch.cat([_product(part) for part in parts])[(..., *(None,) * axes)], requires_grad=trains)
    if biases:
        rows = [biases[0].new_zeros(part.out_features) if part.bias is None else part.bias.detach() for part in parts]
        new.bias = nn.Parameter(torch.cat(rows), requires_grad=any(bias.requires_grad for bias in biases))
    return new.train(layer.training)


def _part(part: Part, dense: Dense, weights: Sequence[Tensor]) -> ButterflyLinear | nn.Linear:
    parameters = [nn.Parameter(weight, requires_grad=dense.weight.requires_grad) for weight in weights]
    has_bias = dense.bias is not None
    if part.architecture is None:  # of a convolution, all rows are one part
        new: ButterflyLinear | nn.Linear = nn.Linear(dense.weight.shape[1], part.stop - part.start, bias=has_bias, device="meta")
        new.weight = parameters[0]
    else:
        kind = ButterflyLinear if isinstance(dense, nn.Linear) else partial(ButterflyConv, axes=len(dense.kernel_size))
        new = kind(part.architecture, bias=has_bias, device="meta")
        new.factors = nn.ParameterList(parameters)
    if dense.bias is not None:
        new.bias = nn.Parameter(dense.bias.detach()[part.start : part.stop].clone(), requires_grad=dense.bias.requires_grad)
    return new


def _product(part: ButterflyLinear | nn.Linear) -> Tensor:
    if isinstance(part, nn.Linear):
        return part.weight.detach()
    factors = [factor.detach() for factor in part.factors]
    wide = torch.float32 if factors[0].device.type == "mps" else torch.float64
    return factors_to_dense([factor.to(wide) for factor in factors]).to(factors[0].dtype)
