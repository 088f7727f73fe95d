"""Dataclasses as JSON values, and back. The reader trusts nothing: it checks all data against the types of the fields."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from flysurgery.errors import PlanError, shown
from flysurgery.patterns import Architecture

T = TypeVar("T")

_hints = cache(get_type_hints)

JSON_NAMES = {dict: "an object", list: "a list", str: "a text", int: "a whole number", bool: "true or false", NoneType: "null"}

MAX_COUNT = (1 << 63) - 1
"""Largest accepted number, that of a signed 64-bit integer."""

LATER = {"later": True}
"""The metadata of fields that earlier versions did not write: they may be missing, and are left out where they have their default."""


def as_json(value: Any) -> Any:
    """The value as JSON has it: dataclasses and mappings are objects, tuples are lists, and numbers that are not finite are None."""
    if isinstance(value, Architecture):
        return value.to_json()
    if is_dataclass(value):
        written = [each for each in fields(value) if each.metadata != LATER or getattr(value, each.name) != each.default]
        return {each.name: as_json(getattr(value, each.name)) for each in written}
    if isinstance(value, Mapping):
        return {name: as_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_json(kind: type[T], data: object, where: str) -> T:
    """The dataclass ``kind`` from what ``as_json`` gave; ``where`` names it in messages. Nothing is allocated.

    Fields are texts, true or false, whole numbers from zero to ``MAX_COUNT``, literals, architectures, objects (``Mapping``), other
    dataclasses, tuples of these, and unions of different kinds in JSON.

    Raises:
        PlanError: the data is no object, or an entry is missing, of another type or unknown; the message names it.
    """
    if not isinstance(data, dict):
        raise PlanError(f"{where} must be a JSON object, got {shown(data)}")
    if isinstance(data.get("fqn"), str):
        where = f"layer {data['fqn']}"
    hints = _hints(kind)
    values = {}
    for each in fields(kind):  # pyright: ignore[reportArgumentType]
        if each.name in data:
            values[each.name] = _value(hints[each.name], data[each.name], where, each.name)
        elif each.metadata != LATER:
            raise PlanError(f"{where} has no entry '{each.name}'")
    unknown = next((key for key in data if key not in hints), None)
    if unknown is not None:
        raise PlanError(f"{where} has an unknown entry {shown(unknown)}")
    return kind(**values)


def _value(kind: Any, value: Any, where: str, key: str) -> Any:
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    found = next((each for each in kinds if _json_type(each) is type(value)), None)
    if found is None:
        expected = " or ".join(JSON_NAMES[_json_type(each)] for each in kinds)
        raise PlanError(f"{where}: '{key}' must be {expected}, got {shown(value)}")
    if found is int and not 0 <= value <= MAX_COUNT:
        raise PlanError(f"{where}: '{key}' must lie between 0 and {MAX_COUNT}, got {shown(value)}")
    if get_origin(found) is Literal and value not in get_args(found):
        raise PlanError(f"{where}: '{key}' must be one of {', '.join(get_args(found))}, got {shown(value)}")
    if get_origin(found) is tuple:
        return tuple(_value(get_args(found)[0], inner, where, f"{key}[{number}]") for number, inner in enumerate(value))
    if found is Architecture:
        try:
            return Architecture.from_json(value)
        except ValueError as error:  # PatternError, and what Python raises for numbers too long to be written
            raise PlanError(f"{where}: {error}") from error
    return from_json(found, value, f"{where}: '{key}'") if is_dataclass(found) else value


def _json_type(kind: Any) -> type:
    origin = get_origin(kind)
    if origin is tuple or kind is Architecture:
        return list
    if origin is Literal:
        return str
    return dict if origin is Mapping or is_dataclass(kind) else kind
