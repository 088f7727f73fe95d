"""The plan's data: what it counts, what it refuses, its JSON, and its table."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flysurgery.errors import PlanError
from flysurgery.patterns import Architecture
from flysurgery.surgery import ExampleInput, LayerPlan, Part, Plan, Reason
from flysurgery.walker import Switch

SQUARE = Architecture.of((1, 16, 4, 2), (2, 4, 16, 1))  # 32x32, 256 weights
UP = Architecture.of((1, 32, 8, 2), (2, 8, 16, 1))  # 64x32, 768 weights


def a_plan() -> Plan:
    split = (Part("q", 0, 32, SQUARE), Part("k", 32, 64, SQUARE), Part("v", 64, 96, None))
    layers = (
        LayerPlan("block.qkv", "qkv", 32, 96, True, 1, 8, "replace", parts=split),
        LayerPlan("block.out", "attn_out", 32, 32, False, 1, 8, "keep", Reason("not-selected", "not selected")),
        LayerPlan("block.up", "ffn_in", 32, 64, True, 2, 16, "replace", aliases=("again.up",), parts=(Part(None, 0, 64, UP),)),
    )
    return Plan(layers, (Switch("block", "separate", True),), "a_model", {"depth": 2}, (ExampleInput((2, 8, 32), "float32"),))


def test_counts_weights_biases_and_flops() -> None:
    qkv, out, up = a_plan().layers
    assert (qkv.params_before, qkv.params_after) == (96 * 32 + 96, 256 + 256 + 32 * 32 + 96)
    assert (qkv.flops_before, qkv.flops_after) == (2 * 96 * 32 * 8, 2 * (512 + 1024) * 8)
    assert (out.params_before, out.params_after, out.flops_after) == (1024, 1024, 2 * 1024 * 8)
    assert (up.params_after, up.flops_after) == (768 + 64, 2 * 768 * 16)
    assert (qkv.architecture, out.architecture, up.architecture) == (f"q,k {SQUARE}; v dense", None, str(UP))
    assert a_plan().replaced == (qkv, up)


def test_json_has_the_documented_layout_and_gives_the_same_plan() -> None:
    data = json.loads(json.dumps(a_plan().to_json()))
    assert Plan.from_json(data) == a_plan()
    assert {key: data[key] for key in data if key != "layers"} == {
        "schema": 1,
        "base": "a_model",
        "base_args": {"depth": 2},
        "example": [{"shape": [2, 8, 32], "dtype": "float32"}],
        "switches": [["block", "separate", True]],
    }
    assert data["layers"][1]["reason"] == {"code": "not-selected", "text": "not selected"}
    assert data["layers"][2]["parts"] == [{"name": None, "start": 0, "stop": 64, "architecture": [[1, 32, 8, 2], [2, 8, 16, 1]]}]
    assert "conv" not in data["layers"][0]
    assert Plan.from_json(change("layers.2.conv", True)).layers[2].conv
    assert Plan.from_json(change("example", ...)).example is None
    lists = Plan((), example=((ExampleInput((2,), "int64"), ExampleInput((3,), "int64")),))
    assert Plan.from_json(lists.to_json()) == lists


def change(path: str, value: Any) -> Any:
    """The plan's JSON with one entry set, or with it deleted where the value is ``...``."""
    data = copy.deepcopy(a_plan().to_json())
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    place: Any = data
    for step in steps:
        place = place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return data


TILE = "must tile the rows 0 to"
WRONG = [
    ("schema", 2, "schema 1, got schema 2"),
    ("schema", True, "schema 1, got schema True"),
    ("layers", ..., "no entry 'layers'"),
    ("layers", {}, "'layers' must be a list"),
    ("extra", 1, "unknown entry 'extra'"),
    ("base", 3, "'base' must be a text or null"),
    ("base_args", [], "'base_args' must be an object"),
    ("switches", [["block", "separate"]], "a switch is a list"),
    ("switches", [["block", "__class__", True]], "public attribute"),
    ("switches", [["block", "separate", True], ["block", "separate", False]], "stands twice"),
    ("example", [{"shape": [1 << 20, 1 << 20], "dtype": "float32"}], "at most"),
    ("example", [{"shape": [0, 3], "dtype": "float32"}], "positive sides"),
    ("example", [{"shape": [1.5], "dtype": "float32"}], "must be a whole number"),
    ("layers.0", 7, "'layers[0]' must be an object"),
    ("layers.0.fqn", ..., "no entry 'fqn'"),
    ("layers.0.fqn", "block.out", "block.out stands twice"),
    ("layers.2.aliases", ["block.qkv"], "block.qkv stands twice"),
    ("layers.2.aliases", [1], "'aliases[0]' must be a text"),
    ("layers.0.role", "boss", "'role' must be one of"),
    ("layers.0.bias", 1, "'bias' must be true or false"),
    ("layers.0.calls", -1, "must lie between 0 and"),
    ("layers.0.rows", 1 << 63, "must lie between 0 and"),
    ("layers.0.in_features", 1 << 40, "sizes must lie between"),
    ("layers.0.in_features", 64, "the layer is 32x64"),
    ("layers.0.reason", {"code": "x"}, "no entry 'text'"),
    ("layers.0.parts", [], TILE),
    ("layers.0.parts.0.stop", 31, TILE),
    ("layers.0.parts.2.stop", 128, TILE),
    ("layers.0.parts.0.name", "k", "different names"),
    ("layers.0.parts.0.name", "forward", "different names"),
    ("layers.2.parts.0.name", "q", "no name"),
    ("layers.2.parts.0.architecture", None, "no part of it has an architecture"),
    ("layers.2.parts.0.architecture", [[1, 2, 3]], "four integers"),
    ("layers.2.parts.0.architecture", [[1, 1 << 40, 8, 2], [2, 8, 16, 1]], "no side may exceed"),
    ("layers.2.parts.0.architecture", [[1, 64, 1 << 24, 1], [1, 1 << 24, 32, 1]], "more parameters than the dense"),
    ("layers.2.parts.0.architecture", [[10**4000, 10**4000, 8, 2], [2, 8, 16, 1]], "layer block.up: "),
    ("layers.1.parts", [{"name": None, "start": 0, "stop": 32, "architecture": None}], "kept dense and yet has parts"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG, ids=[f"{path}={str(value)[:30]}" for path, value, _ in WRONG])
def test_wrong_json_is_one_sentence(path: str, value: Any, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(change(path, value))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    if path.startswith("layers.") and "fqn" not in path and path.count(".") > 1 and "twice" not in message:
        assert a_plan().layers[int(path[7])].fqn in str(caught.value)


def places(value: Any, path: str = "") -> list[str]:
    """The paths of all entries inside a JSON value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in entries for place in (f"{path}{key}", *places(inner, f"{path}{key}."))]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**4000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(place=st.sampled_from(["", *places(a_plan().to_json())]), value=json_values)
def test_any_damage_is_a_plan_error_or_another_valid_plan(place: str, value: Any) -> None:
    try:
        plan = Plan.from_json(change(place, value) if place else value)
    except PlanError as error:
        assert "\n" not in str(error)
    else:
        assert Plan.from_json(plan.to_json()) == plan
        assert all(layer.params_after <= layer.params_before for layer in plan.layers)
        assert str(plan)


def test_the_table_shows_groups_totals_and_reasons() -> None:
    text = str(a_plan())
    assert "plan for a_model: 2 of 3 linear layers to replace" in text
    assert "weights in them: 5.12 k -> 2.3 k (45.0%)" in text  # 96*32 + 64*32 and 1536 + 768
    up = next(line for line in text.splitlines() if line.startswith("block.up"))
    assert up.split() == ["block.up", "1", "ffn_in", "64x32", "2.05", "k", "768", "37.5%", "other", str(UP)]
    assert "not-selected: not selected" in text
    names = ("layers.0.1.net.1", "layers.1.1.net.1", "layers.0.1.net.4")
    roles = ("ffn_in", "ffn_in", "ffn_out")
    part = (Part(None, 0, 64, UP),)
    layers = tuple(
        LayerPlan(name, role, 32, 64, True, 1, 8, "replace", parts=part)  # pyright: ignore[reportArgumentType]
        for name, role in zip(names, roles, strict=True)
    )
    lines = [line.split()[:3] for line in str(Plan(layers)).splitlines() if line.startswith("layers.")]
    assert lines == [["layers.*.1.net.1", "2", "ffn_in"], ["layers.0.1.net.4", "1", "ffn_out"]]
