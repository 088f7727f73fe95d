"""Change a model, or leave it as it was after an error; and what a converted model carries."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from flysurgery.errors import SurgeryError
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.surgery.base import ENTRY_POINT, is_of_timm, is_of_transformers, quantization_entry
from flysurgery.surgery.plan import Plan
from flysurgery.walker import SeparateAttention, Switch, separated

PLAN = "_flysurgery_plan"
SWITCHES_BEFORE = "_flysurgery_switches_before"
STANDS_FOR = "_flysurgery_stands_for"
"""On a fused module of an optimized model: the module in whose place it stands; on one on which a fused method was set, itself, and the
method's name."""


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that ``model`` was converted by, None for a model that is not converted. Copies and pickles keep it."""
    return getattr(model, PLAN, None)


def is_optimized(model: nn.Module) -> bool:
    """Whether fused modules stand in ``model``, or a fused method was set on one of its own."""
    return any(STANDS_FOR in vars(module) for module in model.modules())


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
    """Raise ``SurgeryError`` for a model whose fused modules refer to the layers that surgery would replace, and for what is no model."""
    if not isinstance(model, nn.Module):
        made = f"; build it first, as with timm.create_model('{model}')" if isinstance(model, str) else ""
        raise SurgeryError(f"expected a torch.nn.Module, got {type(model).__name__}{made}")
    classes = ((name, kind) for name, module in model.named_modules() for kind in type(module).__mro__)
    adapter = next((name for name, kind in classes if kind.__module__.startswith("peft.")), None)
    if adapter is not None:
        where = f"around {adapter}" if adapter else "around the model"
        raise SurgeryError(f"the model has adapters of peft ({where}); convert it first, or merge them: model.merge_and_unload()")
    if is_optimized(model):
        raise SurgeryError("the model is optimized for inference; put its own layers back first, with flysurgery.restore(model)")


@contextmanager
def changing(model: nn.Module, *, keep: bool = True) -> Iterator[Change]:
    """Give a ``Change`` of ``model``. An exception undoes all changes, the last one first. Without ``keep`` they are always undone."""
    with ExitStack() as undo:
        yield Change(model, undo)
        if keep:
            undo.pop_all()


class Change:
    """Swaps modules and sets attributes of a model, and notes how to take that back."""

    def __init__(self, model: nn.Module, undo: ExitStack) -> None:
        self._model, self._undo = model, undo

    def convert(self, plan: Plan, modules: Mapping[str, nn.Module]) -> None:
        """Prepare the model, put the new modules in place under all their names, and leave the plan on the model."""
        before = tuple(Switch(each.module_fqn, each.attribute, getattr(*self._place(each))) for each in plan.switches)
        attentions = self.prepare(plan)
        for layer in plan.layers:
            if layer.fqn in modules:
                self.swap(layer.names, modules[layer.fqn])
        for attention in attentions:
            attention.copy_views()
        self._set(self._model, SWITCHES_BEFORE, before)
        self._set(self._model, PLAN, plan)
        if is_of_transformers(self._model):
            self._own_config()
            self._set(self._model.config, "quantization_config", quantization_entry(plan))  # for ``save_pretrained``
        elif is_of_timm(self._model) and plan.base is not None:  # for timm's ``save_for_hf``
            self._name(ENTRY_POINT, {"base": plan.base, "base_args": dict(plan.base_args), "plan": plan.to_json()})

    def prepare(self, plan: Plan) -> set[SeparateAttention]:
        """Have the planned layers called, as modules: set the plan's switches, and put in the attentions that are returned."""
        attentions = separated(self._model, [layer.fqn for layer in plan.replaced])
        for fqn, attention in attentions.items():
            self.swap((fqn,), attention)
        self.switch(plan.switches)
        return {*attentions.values()}

    def unconvert(self) -> None:
        """Join separate attentions, set the switches back and take the plan off the model."""
        plan, modules = plan_of(self._model), dict(self._model.named_modules(remove_duplicate=False))
        attentions: dict[nn.Module, nn.Module] = {each: each.joined() for each in modules.values() if isinstance(each, SeparateAttention)}
        for fqn, module in modules.items():
            if module in attentions:
                self.swap((fqn,), attentions[module])
        self.switch(getattr(self._model, SWITCHES_BEFORE, ()))
        for name in (PLAN, SWITCHES_BEFORE):
            self._delete(self._model, name)
        if is_of_transformers(self._model):
            self._own_config()
            self._delete(self._model.config, "quantization_config")
        elif is_of_timm(self._model) and plan is not None and plan.base is not None:
            self._name(plan.base.partition(".")[0], dict(plan.base_args))

    def _name(self, architecture: str, arguments: dict[str, Any]) -> None:
        """Let a model of timm say that timm builds it under this name, with these arguments."""
        described: Any = self._model.pretrained_cfg
        for name in ("pretrained_cfg", "default_cfg"):
            self._set(self._model, name, {**described, "architecture": architecture})
        self._set(self._model, "_model_args", arguments)

    def _own_config(self) -> None:
        """Give the model a configuration of its own: transformers lets models share the one that they were built from."""
        self._set(self._model, "config", copy.copy(self._model.config))

    def swap(self, fqns: Iterable[str], new: nn.Module) -> None:
        """Put ``new`` in the place of the module of these names, in the same order among its siblings."""
        for fqn in fqns:
            parent, _, name = fqn.rpartition(".")
            # Straight into the registry: what a class does in __setattr__ could not be taken back.
            holder = self._model.get_submodule(parent)
            old = holder._modules[name]
            self._put(holder._modules, name, new)
            for listed in vars(holder).values():  # some classes call their children from a list of their own
                if isinstance(listed, list):
                    for index in [index for index, each in enumerate(listed) if each is old]:
                        self._put(listed, index, new)

    def _put(self, store: Any, key: str | int, value: nn.Module) -> None:
        self._undo.callback(store.__setitem__, key, store[key])
        store[key] = value

    def switch(self, switches: Iterable[Switch]) -> None:
        """Set the attributes of parents."""
        for each in switches:
            self._set(*self._place(each), each.value)

    def _place(self, switch: Switch) -> tuple[nn.Module, str]:
        return self._model.get_submodule(switch.module_fqn), switch.attribute

    def _set(self, owner: object, name: str, value: object) -> None:
        if hasattr(owner, name):
            self._undo.callback(setattr, owner, name, getattr(owner, name))
        else:
            self._undo.callback(delattr, owner, name)
        setattr(owner, name, value)

    def _delete(self, owner: object, name: str) -> None:
        if hasattr(owner, name):
            self._undo.callback(setattr, owner, name, getattr(owner, name))
            delattr(owner, name)
