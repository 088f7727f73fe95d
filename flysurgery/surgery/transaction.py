"""Changes to a model that are all taken back unless everything went well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from types import TracebackType

from torch import nn

from flysurgery.surgery.attached_plan import PLAN, SWITCHES_BEFORE
from flysurgery.surgery.plan import Plan
from flysurgery.walker import Switch


class Change:
    """Swap modules and set attributes inside a ``with`` block; if it ends in an exception, undo all, last change first."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._undo = ExitStack()

    def __enter__(self) -> Change:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._undo.pop_all()
        else:
            self._undo.__exit__(kind, error, trace)

    def convert(self, plan: Plan, modules: Mapping[str, nn.Module]) -> None:
        """Put the new modules in place under all their names, set the plan's switches, and leave the plan on the model."""
        for layer in plan.layers:
            if layer.fqn in modules:
                self.swap(layer.names, modules[layer.fqn])
        before = tuple(Switch(each.module_fqn, each.attribute, self._value(each)) for each in plan.switches)
        self.switch(plan.switches)
        self._set(self._model, SWITCHES_BEFORE, before)
        self._set(self._model, PLAN, plan)

    def swap(self, fqns: Iterable[str], new: nn.Module) -> None:
        """Put ``new`` in the place of the module of these names, in the same order among its siblings."""
        for fqn in fqns:
            parent, _, name = fqn.rpartition(".")
            # Straight into the registry: what a class does in __setattr__ could not be taken back.
            children = self._model.get_submodule(parent)._modules
            old = children[name]
            self._undo.callback(children.__setitem__, name, old)
            children[name] = new

    def switch(self, switches: Iterable[Switch]) -> None:
        """Set the attributes of parents."""
        for each in switches:
            self._set(self._model.get_submodule(each.module_fqn), each.attribute, each.value)

    def unmark(self) -> None:
        """Take the plan off the model."""
        for name in (PLAN, SWITCHES_BEFORE):
            if hasattr(self._model, name):
                self._undo.callback(setattr, self._model, name, getattr(self._model, name))
                delattr(self._model, name)

    def _value(self, switch: Switch) -> bool:
        return getattr(self._model.get_submodule(switch.module_fqn), switch.attribute)

    def _set(self, module: nn.Module, name: str, value: object) -> None:
        if hasattr(module, name):
            self._undo.callback(setattr, module, name, getattr(module, name))
        else:
            self._undo.callback(delattr, module, name)
        setattr(module, name, value)


class Trial(Change):
    """A change that is taken back however the block ends: a model that is converted for a while, to be run."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._undo.__exit__(kind, error, trace)
