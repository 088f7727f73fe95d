"""What surgery will do to a model: pure data, checked against itself, that can be printed, saved and read back."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any, Literal

from flysurgery.errors import PatternError, PlanError, Reason, shown
from flysurgery.layers import SplitLinear
from flysurgery.patterns import MAX_FEATURES, Architecture, check_fits, family_of
from flysurgery.surgery.serial import LATER, as_json, from_json
from flysurgery.tables import blocks_of_text, changes_table, kept_table, layer_totals, replaced_table
from flysurgery.walker import Role, Switch

SCHEMA = 1
"""The number that plans carry as ``schema``; plans of another number are refused."""

MAX_EXAMPLE_ENTRIES = 1 << 28
"""Largest accepted example input. Plans come from files, so sizes are bounded before anything is allocated."""


@dataclass(frozen=True)
class Part:
    """Rows ``start`` to ``stop`` of a layer's weight; ``architecture`` None keeps them dense.

    ``name`` is None where the layer is replaced as one matrix, else the name of the part, such as "q".
    """

    name: str | None
    start: int
    stop: int
    architecture: Architecture | None


@dataclass(frozen=True)
class LayerPlan:
    """One linear layer: its sizes, whether it is replaced, and by what.

    ``conv``: it is a 1x1 convolution, whose channels are the features. ``calls`` and ``rows`` (rows of x, summed over the
    calls) are those of one forward of one sample, and so are flops (two a weight and row). Parameters are counted with the bias, weights
    and flops without, for the dense layer (before) and after surgery.

    Raises:
        PlanError: the parts do not tile the rows, do not fit the sizes, or contradict the status.
    """

    fqn: str
    role: Role
    in_features: int
    out_features: int
    bias: bool
    calls: int
    rows: int
    status: Literal["replace", "keep"]
    reason: Reason | None = None
    aliases: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    conv: bool = field(default=False, metadata=LATER)

    def __post_init__(self) -> None:
        if not all(0 < size <= MAX_FEATURES for size in (self.out_features, self.in_features)):
            raise PlanError(f"layer {self.fqn}: sizes must lie between 1 and {MAX_FEATURES}, got {self.size}")
        if self.status == "replace":
            self._check_parts()
        elif self.parts:
            raise PlanError(f"layer {self.fqn} is kept dense and yet has parts; take one of the two out")

    def _check_parts(self) -> None:
        parts, where = self.parts, f"layer {self.fqn}"
        bounds = [0, *(part.stop for part in parts)]
        if [part.start for part in parts] != bounds[:-1] or bounds[-1] != self.out_features or any(a >= b for a, b in pairwise(bounds)):
            spans = ", ".join(f"{part.start} to {part.stop}" for part in parts)
            raise PlanError(f"{where}: its parts must tile the rows 0 to {self.out_features} in order, got {spans or 'none'}")
        if not any(part.architecture for part in parts):
            raise PlanError(f"{where} is replaced and yet no part of it has an architecture")
        names = [part.name for part in parts]
        if len(parts) == 1 and names != [None]:
            raise PlanError(f"{where} is one matrix, so its only part has no name; got {names[0]!r}")
        can_be_taken = all(name and name.isidentifier() and not hasattr(SplitLinear, name) for name in names)
        if len(parts) > 1 and not (can_be_taken and len(set(names)) == len(parts)):
            raise PlanError(f"{where}: its parts need different names that a module can take, got {names}")
        for part in parts:
            if part.architecture is None:
                continue
            try:
                check_fits(part.architecture, part.stop - part.start, self.in_features)
            except PatternError as error:
                raise PlanError(f"{where}: {error}") from error
            if part.architecture.density > 1:
                raise PlanError(f"{where}: architecture {part.architecture} has more parameters than the dense {self.size} matrix")

    @property
    def is_replaced(self) -> bool:
        return self.status == "replace"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.fqn, *self.aliases)

    @property
    def size(self) -> str:
        """The weight's shape as text, ``out x in``."""
        return f"{self.out_features}x{self.in_features}"

    @property
    def weights_before(self) -> int:
        return self.out_features * self.in_features

    @property
    def weights_after(self) -> int:
        dense = (self.out_features - sum(part.stop - part.start for part in self.parts if part.architecture is not None)) * self.in_features
        return dense + sum(part.architecture.num_parameters for part in self.parts if part.architecture is not None)

    @property
    def params_before(self) -> int:
        return self.weights_before + self.bias * self.out_features

    @property
    def params_after(self) -> int:
        return self.weights_after + self.bias * self.out_features

    @property
    def flops_before(self) -> int:
        return 2 * self.weights_before * self.rows

    @property
    def flops_after(self) -> int:
        return 2 * self.weights_after * self.rows

    @property
    def architecture(self) -> str | None:
        """The architectures of the parts as text; None where the layer stays dense."""
        names: dict[str, list[str]] = {}
        for part in self.parts:
            names.setdefault("dense" if part.architecture is None else str(part.architecture), []).append(part.name or "")
        return "; ".join(f"{','.join(of)} {text}".strip() for text, of in names.items()) or None

    @property
    def family(self) -> str | None:
        """The families of the parts' architectures; None where the layer stays dense."""
        families = dict.fromkeys("dense" if part.architecture is None else family_of(part.architecture) for part in self.parts)
        return " and ".join(families) or None


@dataclass(frozen=True)
class ExampleInput:
    """Shape and dtype of one argument of the forward that the plan was made with; of a small integer one also its ``values``, flat."""

    shape: tuple[int, ...]
    dtype: str
    values: tuple[int, ...] = field(default=(), metadata=LATER)

    def __post_init__(self) -> None:
        if min(self.shape, default=1) < 1 or prod(self.shape) > MAX_EXAMPLE_ENTRIES:
            raise PlanError(f"an example input needs positive sides and at most {MAX_EXAMPLE_ENTRIES} entries, got shape {self.shape}")
        if self.values and len(self.values) != prod(self.shape):
            raise PlanError(f"an example input of shape {self.shape} has {prod(self.shape)} values, got {len(self.values)}")


@dataclass(frozen=True)
class Plan:
    """Which layers surgery replaces and by what, for the model that it was made for; ``print(plan)`` is a table.

    ``switches`` are the attributes that parents need so that they call the replaced modules. ``base`` and ``base_args`` say how the dense
    model is built again, None where that is not known. ``example`` describes the arguments that one forward takes by position: tensors,
    lists of tensors or None; None where the walk's example was something else.

    Raises:
        PlanError: a layer or a switch stands twice.
    """

    layers: tuple[LayerPlan, ...]
    switches: tuple[Switch, ...] = ()
    base: str | None = None
    base_args: Mapping[str, Any] = field(default_factory=dict)
    example: tuple[ExampleInput | tuple[ExampleInput, ...] | None, ...] | None = None

    def __post_init__(self) -> None:
        for what, names in (
            ("layer", [name for layer in self.layers for name in layer.names]),
            ("switch", [f"{switch.module_fqn}.{switch.attribute}" for switch in self.switches]),
        ):
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise PlanError(f"{what} {twice[0]} stands twice in the plan; it may stand once")

    def __str__(self) -> str:
        return blocks_of_text(
            f"plan for {self.base or 'a model without a name'}: {len(self.replaced)} of {len(self.layers)} linear layers to replace",
            replaced_table("replace", self.layers, {"out x in": lambda layers: layers[0].size}),
            kept_table(self.layers),
            changes_table("total", layer_totals(self.layers)),
        )

    @property
    def replaced(self) -> tuple[LayerPlan, ...]:
        """The layers that surgery replaces, in the model's order."""
        return tuple(layer for layer in self.layers if layer.is_replaced)

    @property
    def only_input(self) -> ExampleInput | None:
        """The forward's argument, None where the plan does not say that there is one, and that it is a tensor."""
        first = self.example[0] if self.example is not None and len(self.example) == 1 else None
        return first if isinstance(first, ExampleInput) else None

    def with_arguments(self, changed: Mapping[str, Any]) -> "Plan":
        """The plan whose dense model is built with these arguments, over those that it has."""
        return replace(self, base_args={**self.base_args, **changed})

    def keeping(self, reasons: Mapping[str, Reason]) -> "Plan":
        """The plan with these layers left dense for these reasons, by name, and without switches that no layer needs any more."""
        layers = tuple(
            replace(layer, status="keep", reason=reasons[layer.fqn], parts=()) if layer.fqn in reasons and layer.is_replaced else layer
            for layer in self.layers
        )
        names = [f".{name}" for layer in layers if layer.is_replaced for name in layer.names]
        switches = tuple(each for each in self.switches if any(name.startswith(f".{each.module_fqn}".rstrip(".") + ".") for name in names))
        return replace(self, layers=layers, switches=switches)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values, with the schema's number."""
        switches = [[switch.module_fqn, switch.attribute, switch.value] for switch in self.switches]
        return {"schema": SCHEMA} | as_json(self) | {"switches": switches}

    @classmethod
    def from_json(cls, data: object) -> "Plan":
        """Read what ``to_json`` gave. The data may come from anywhere: all of it is checked, nothing is allocated.

        Raises:
            PlanError: one sentence with the first thing that is wrong.
        """
        if isinstance(data, dict):
            schema = data.get("schema")
            if type(schema) is not int or schema != SCHEMA:
                raise PlanError(
                    f"this version reads plans of schema {SCHEMA}, got schema {shown(schema)}; use the version that wrote the plan"
                )
            data = {"example": None} | {key: value for key, value in data.items() if key != "schema"}
            switches = data.get("switches")
            if isinstance(switches, list):
                data["switches"] = [_switch_entries(row) for row in switches]
        return from_json(cls, data, "the plan")


def _switch_entries(row: object) -> dict[str, Any]:
    if not (isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) and isinstance(row[1], str)):
        raise PlanError(f"a switch is a list [module, attribute, value], got {shown(row)}")
    module, attribute, value = row
    if not re.fullmatch(r"[A-Za-z]\w*", attribute) or not isinstance(value, bool):
        raise PlanError(f"a switch sets a public attribute to true or false, got {shown(row)}")
    return {"module_fqn": module, "attribute": attribute, "value": value}
