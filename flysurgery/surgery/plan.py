"""What surgery will do to a whole model: pure data that can be printed, saved and read back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from flysurgery.errors import PlanError
from flysurgery.surgery.fields import Fields
from flysurgery.surgery.layer_json import layer_from_json, layer_to_json
from flysurgery.surgery.layer_plan import LayerPlan, Reason
from flysurgery.surgery.plan_table import plan_table
from flysurgery.walker import Switch

SCHEMA = 1
"""The number that plans carry as ``schema``; plans of another number are refused."""

MAX_EXAMPLE_ENTRIES = 1 << 28
"""Largest accepted example input. Plans come from files, so sizes are bounded before anything is allocated."""


@dataclass(frozen=True)
class ExampleInput:
    """Shape and dtype of one argument of the forward that the plan was made with."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if min(self.shape, default=1) < 1 or prod(self.shape) > MAX_EXAMPLE_ENTRIES:
            raise PlanError(f"an example input needs positive sides and at most {MAX_EXAMPLE_ENTRIES} entries, got shape {self.shape}")


@dataclass(frozen=True)
class Plan:
    """Which layers surgery replaces and by what, for the model that it was made for; ``print(plan)`` is a table.

    ``switches`` are the attributes that parents need so that they call the replaced modules. ``base`` and
    ``base_args`` say how the dense model is built again, None where that is not known. ``example`` describes the
    arguments that one forward takes, tensors or lists of tensors, None where the walk's example was something else.

    Raises:
        PlanError: a layer or a switch stands twice.
    """

    layers: tuple[LayerPlan, ...]
    switches: tuple[Switch, ...] = ()
    base: str | None = None
    base_args: Mapping[str, Any] = field(default_factory=dict)
    example: tuple[ExampleInput | tuple[ExampleInput, ...], ...] | None = None

    def __post_init__(self) -> None:
        for what, names in (
            ("layer", [name for layer in self.layers for name in layer.names]),
            ("switch", [f"{switch.module_fqn}.{switch.attribute}" for switch in self.switches]),
        ):
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise PlanError(f"{what} {twice[0]} stands twice in the plan; it may stand once")

    def __str__(self) -> str:
        return plan_table(self.layers, self.base)

    @property
    def replaced(self) -> tuple[LayerPlan, ...]:
        """The layers that surgery replaces, in the model's order."""
        return tuple(layer for layer in self.layers if layer.is_replaced)

    def keeping(self, reasons: Mapping[str, Reason]) -> Plan:
        """The plan with some of its replaced layers, by name, left dense for these reasons; switches that nothing needs then go too."""
        layers = tuple(
            replace(layer, status="keep", reason=reasons[layer.fqn], parts=()) if layer.fqn in reasons and layer.is_replaced else layer
            for layer in self.layers
        )
        names = [name for layer in layers if layer.is_replaced for name in layer.names]
        switches = tuple(each for each in self.switches if any(name.startswith(f"{each.module_fqn}.") for name in names))
        return replace(self, layers=layers, switches=switches)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values, with the schema's number."""
        return {
            "schema": SCHEMA,
            "base": self.base,
            "base_args": dict(self.base_args),
            "example": None if self.example is None else [_example_to_json(each) for each in self.example],
            "switches": [[switch.module_fqn, switch.attribute, switch.value] for switch in self.switches],
            "layers": [layer_to_json(layer) for layer in self.layers],
        }

    @classmethod
    def from_json(cls, data: object) -> Plan:
        """Read what ``to_json`` gave. The data may come from anywhere: all of it is checked, nothing is allocated.

        Raises:
            PlanError: one sentence with the first thing that is wrong.
        """
        fields = Fields(data, "the plan")
        schema = fields.take("schema", int)
        if schema != SCHEMA:
            raise PlanError(f"this version reads plans of schema {SCHEMA}, got schema {schema}; use the version that wrote the plan")
        base = fields.take("base", str, None)
        base_args = fields.take("base_args", dict)
        example = fields.take("example", list, None, optional=True)
        plan = cls(
            layers=tuple(layer_from_json(row) for row in fields.take("layers", list)),
            switches=tuple(_switch_from_json(row) for row in fields.take("switches", list)),
            base=base,
            base_args=base_args,
            example=None if example is None else tuple(_example_from_json(row) for row in example),
        )
        fields.done()
        return plan


def _switch_from_json(row: object) -> Switch:
    if not (isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) and isinstance(row[1], str)):
        raise PlanError(f"a switch is a list [module, attribute, value], got {row!r}")
    module, attribute, value = row
    if not re.fullmatch(r"[A-Za-z]\w*", attribute) or not isinstance(value, bool):
        raise PlanError(f"a switch sets a public attribute to true or false, got {row!r}")
    return Switch(module, attribute, value)


def _example_to_json(example: ExampleInput | tuple[ExampleInput, ...]) -> dict[str, Any] | list[Any]:
    if isinstance(example, tuple):
        return [_example_to_json(each) for each in example]
    return {"shape": list(example.shape), "dtype": example.dtype}


def _example_from_json(row: object) -> ExampleInput | tuple[ExampleInput, ...]:
    return tuple(_input_from_json(each) for each in row) if isinstance(row, list) else _input_from_json(row)


def _input_from_json(row: object) -> ExampleInput:
    fields = Fields(row, "an example input of the plan")
    shape, dtype = fields.take("shape", list), fields.take("dtype", str)
    fields.done()
    if not all(type(side) is int for side in shape):
        raise PlanError(f"the sides of an example input must be whole numbers, got {shape}")
    return ExampleInput(tuple(shape), dtype)
