"""One layer of a plan as JSON values, and back."""

from __future__ import annotations

from typing import Any, get_args

from flysurgery.errors import PlanError
from flysurgery.patterns import Architecture
from flysurgery.surgery.fields import Fields
from flysurgery.surgery.layer_plan import LayerPlan, Part, Reason
from flysurgery.walker import Role


def layer_to_json(layer: LayerPlan) -> dict[str, Any]:
    """The layer as JSON values."""
    return {
        "fqn": layer.fqn,
        "role": layer.role,
        "in_features": layer.in_features,
        "out_features": layer.out_features,
        "bias": layer.bias,
        "calls": layer.calls,
        "rows": layer.rows,
        "status": layer.status,
        "reason": layer.reason and {"code": layer.reason.code, "text": layer.reason.text},
        "aliases": list(layer.aliases),
        "parts": [
            {
                "name": part.name,
                "start": part.start,
                "stop": part.stop,
                "architecture": part.architecture and part.architecture.to_json(),
            }
            for part in layer.parts
        ],
    } | ({"conv": True} if layer.conv else {})


def layer_from_json(row: object) -> LayerPlan:
    """The inverse of ``layer_to_json``.

    Raises:
        PlanError: one sentence with the first thing that is wrong and the layer's name.
    """
    fqn = Fields(row, "a layer of the plan").take("fqn", str)
    where = f"layer {fqn}"
    fields = Fields(row, where)
    layer = LayerPlan(
        fqn=fields.take("fqn", str),
        role=_one_of(fields, "role", get_args(Role), where),
        in_features=fields.count("in_features"),
        out_features=fields.count("out_features"),
        bias=fields.take("bias", bool),
        calls=fields.count("calls"),
        rows=fields.count("rows"),
        status=_one_of(fields, "status", ("replace", "keep"), where),
        reason=_reason(fields.take("reason", dict, None), where),
        aliases=fields.texts("aliases"),
        parts=tuple(_part(part, where) for part in fields.take("parts", list)),
        conv=bool(fields.take("conv", bool, optional=True)),
    )
    fields.done()
    return layer


def _one_of(fields: Fields, key: str, values: tuple[str, ...], where: str) -> str:
    value = fields.take(key, str)
    if value not in values:
        raise PlanError(f"{where}: '{key}' must be one of {', '.join(values)}, got '{value}'")
    return value


def _reason(data: object, where: str) -> Reason | None:
    if data is None:
        return None
    fields = Fields(data, f"{where}: its reason")
    reason = Reason(fields.take("code", str), fields.take("text", str))
    fields.done()
    return reason


def _part(data: object, where: str) -> Part:
    fields = Fields(data, f"{where}: a part")
    rows = fields.take("architecture", list, None)
    try:
        architecture = None if rows is None else Architecture.from_json(rows)
    except ValueError as error:  # PatternError, and what Python raises for numbers too long to be written
        raise PlanError(f"{where}: {error}") from error
    part = Part(fields.take("name", str, None), fields.count("start"), fields.count("stop"), architecture)
    fields.done()
    return part
