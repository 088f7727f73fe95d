"""From a model to a plan: which layers, which architectures, how the model is built again, and the plan's JSON and table."""

import copy
import json
from functools import partial
from typing import Any

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn

from flysurgery.errors import OptionError, PatternError, PlanError, Reason, SelectionError
from flysurgery.patterns import Architecture, low_rank, monarch, named
from flysurgery.surgery import ExampleInput, LayerPlan, Part, Plan, apply, densify, plan
from flysurgery.surgery.base import find_base
from flysurgery.walker import Switch, walk
from tests.support.composed import Composed
from tests.support.models import unchanged
from tests.surgery.conftest import TINY, Planned

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
    assert "plan for a_model: 2 of 3 linear layers to replace" in str(a_plan()) and "not-selected: not selected" in str(a_plan())
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


WRONG = [
    ("schema", 2, "schema 1, got schema 2"),
    ("layers", ..., "no entry 'layers'"),
    ("extra", 1, "unknown entry 'extra'"),
    ("base", 3, "'base' must be a text or null"),
    ("switches", [["block", "__class__", True]], "public attribute"),
    ("switches", [["block", "separate", True], ["block", "separate", False]], "stands twice"),
    ("example", [{"shape": [1 << 20, 1 << 20], "dtype": "float32"}], "at most"),
    ("example", [{"shape": [3], "dtype": "int64", "values": [1, 2]}], "has 3 values, got 2"),
    ("layers.2.aliases", ["block.qkv"], "block.qkv stands twice"),
    ("layers.0.role", "boss", "'role' must be one of"),
    ("layers.0.bias", 1, "'bias' must be true or false"),
    ("layers.0.rows", 1 << 63, "must lie between 0 and"),
    ("layers.0.in_features", 1 << 40, "sizes must lie between"),
    ("layers.0.in_features", 64, "the layer is 32x64"),
    ("layers.0.parts.2.stop", 128, "must tile the rows 0 to"),
    ("layers.0.parts.0.name", "forward", "different names"),
    ("layers.2.parts.0.name", "q", "no name"),
    ("layers.2.parts.0.architecture", None, "no part of it has an architecture"),
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


def places(value: Any, path: str = "") -> list[str]:
    """The paths of all entries inside a JSON value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in entries for place in (f"{path}{key}", *places(inner, f"{path}{key}."))]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**4000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, derandomize=True)
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


def layers(of: Plan) -> dict[str, LayerPlan]:
    return {layer.fqn: layer for layer in of.layers}


def names(of: Plan) -> set[str]:
    return {layer.fqn for layer in of.replaced}


def blocks(*of_block: str) -> set[str]:
    return {f"blocks.{i}.{name}" for i in (0, 1) for name in of_block}


def test_the_default_plan_of_a_timm_vit(vit: nn.Module) -> None:
    with unchanged(vit):
        made = plan(vit)
    found = layers(made)
    assert names(made) == blocks("attn.qkv", "mlp.fc1", "mlp.fc2")
    qkv, fc1 = found["blocks.0.attn.qkv"], found["blocks.1.mlp.fc1"]
    assert [(part.name, part.start, part.stop) for part in qkv.parts] == [("q", 0, 64), ("k", 64, 128), ("v", 128, 192)]
    assert {part.architecture for part in qkv.parts} == {monarch(64, 64, 4)}
    assert [(part.name, part.architecture) for part in fc1.parts] == [(None, monarch(256, 64, 4))]
    reasons = [found[fqn].reason for fqn in ("blocks.0.attn.proj", "head")]
    assert [reason and reason.code for reason in reasons] == ["not-selected", "head"]
    assert made.base == "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert (made.base_args["num_classes"], made.base_args["img_size"], made.base_args["depth"]) == (7, [32, 32], 2)
    with torch.device("meta"):
        empty = timm.create_model("vit_tiny_patch16_224", num_classes=7, **TINY)
    assert plan(empty) == made


def test_families_options_selection_and_default_roles(planned: Planned) -> None:
    assert layers(planned(nblocks=8))["blocks.0.mlp.fc1"].parts[0].architecture == monarch(256, 64, 8)
    assert layers(planned("lowrank", rank=5))["blocks.0.mlp.fc2"].parts[0].architecture == low_rank(64, 256, 5)
    assert names(planned(roles=("attn_out",))) == blocks("attn.proj")
    assert names(planned(include=r"blocks\.1", exclude="qkv")) == {"blocks.1.mlp.fc1", "blocks.1.mlp.fc2"}
    mixer, images = MlpMixer(img_size=32, patch_size=8, num_blocks=1, embed_dim=64, num_classes=3), torch.zeros(2, 3, 32, 32)
    mixing = partial(plan, mixer, example=images, targets=walk(mixer, images))
    assert mixing() == mixing(roles="ffn"), "those that the model has"
    with pytest.raises(SelectionError, match="'qkv'"):
        mixing(roles=("ffn", "qkv"))
    with pytest.raises(SelectionError, match=r"the roles found are head \(1\)"):
        plan(nn.Sequential(nn.Linear(32, 32), nn.Flatten()), example=torch.zeros(2, 32))


def test_explicit_patterns_and_square_architectures_go_where_they_fit(planned: Planned) -> None:
    made = planned(patterns=["(1,32,8,2),(2,8,32,1)", Architecture.parse("(1,128,32,2),(2,32,32,1)")])
    assert names(made) == blocks("attn.qkv", "mlp.fc1")
    assert layers(made)["blocks.0.attn.qkv"].parts[1].architecture == Architecture.of((1, 32, 8, 2), (2, 8, 32, 1))
    down = layers(made)["blocks.0.mlp.fc2"].reason
    assert down.code == "no-pattern" and "64x256" in down.text
    whole = "(1,96,16,2),(2,16,32,1)"  # of the fused matrix, which then is not taken apart
    assert [(part.name, str(part.architecture)) for part in layers(planned(patterns=whole))["blocks.0.attn.qkv"].parts] == [(None, whole)]
    for arch in ("dyadic", "kaleidoscope", "block"):
        found = layers(planned(arch))
        assert [part.architecture for part in found["blocks.0.attn.qkv"].parts] == 3 * [named(arch, 64, 64)]
        assert f"{arch} is for square matrices, got 256x64" in found["blocks.0.mlp.fc1"].reason.text
    deep = planned("deformable", nblocks=8)
    assert names(deep) == blocks("attn.qkv", "mlp.fc1", "mlp.fc2")
    assert {len(part.architecture) for layer in deep.replaced for part in layer.parts} == {4}


def test_layers_and_parts_get_the_architectures_that_are_named_for_them(planned: Planned) -> None:
    made = layers(planned(per_layer={"qkv.v$": "dense", "qkv.[qk]$": "monarch:8", "mlp": "lowrank:5", r"blocks\.1\.mlp\.fc1": "dense"}))
    q, k, v = made["blocks.0.attn.qkv"].parts
    assert (q.architecture, k.architecture, v.architecture) == (monarch(64, 64, 8), monarch(64, 64, 8), None)
    assert made["blocks.0.mlp.fc1"].parts[0].architecture == low_rank(256, 64, 5)
    kept = made["blocks.1.mlp.fc1"]
    assert not kept.is_replaced and "per_layer keeps it dense" in kept.reason.text
    assert not layers(planned(per_layer={r"blocks\.0\.attn\.qkv": "dense"}))["blocks.0.attn.qkv"].is_replaced
    whole = layers(planned(per_layer={"qkv": "lowrank:40"}))["blocks.0.attn.qkv"].parts  # which has no gain for parts
    assert [(part.name, part.architecture) for part in whole] == [(None, low_rank(192, 64, 40))]


SIZES = "describe a 100x64 matrix, and the selected layers and their parts are 64x64, 64x256, 192x64, 256x64"
CHOICES = "expected dense, or a family such as gonon, monarch:8 or lowrank:64, got "
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"include": "no_such_layer"}, SelectionError, "no_such_layer"),
    *(({"patterns": given}, PatternError, "expected patterns such as") for given in ("(1,2,3)", [(1, 32, 8, 2), (2, 8, 32, 1)])),
    ({"patterns": [monarch(256, 64), monarch(100, 64)]}, SelectionError, SIZES),
    ({"patterns": [monarch(64, 64)], "nblocks": 8}, OptionError, "patterns name the architecture, so nblocks"),
    ({"per_layer": {"mlp": "dense", "attn.proj": "dense"}}, SelectionError, "'attn.proj' matches no selected layer and no part of one"),
    ({"per_layer": "mlp"}, OptionError, "maps regular expressions to choices, .* got 'mlp'"),
    ({"roles": 5}, OptionError, "are texts, or lists of texts; got 5"),
    ({"min_size": "a"}, OptionError, "a whole number of features, got 'a'"),
    ({"per_layer": {"(": "dense"}}, SelectionError, "is no regular expression"),
    *(({"per_layer": {"mlp": choice}}, OptionError, f"{CHOICES}'{choice}'") for choice in ("monarchs", "gonon:8", "monarch:")),
    ({"nblocks": 48}, PlanError, r"nothing would be replaced: no-pattern \(\d layers\): .*"),
    ({"nblocks": 1, "roles": "attn_out"}, PlanError, "no-gain"),
    ({"arch": "butterfly"}, OptionError, "monarch, gonon, lowrank"),
    ({"nblocks": 0}, OptionError, "nblocks must be a positive integer, got 0"),
    ({"arch": "gonon", "nblocks": 8}, OptionError, "takes no nblocks"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_what_cannot_be_planned_says_why(planned: Planned, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        planned(**options)


def attend_unevenly(self: Any, x: Tensor) -> Tensor:
    """Eight query heads of width 4 that share one key and value head of width 6."""
    q, k, v = self.qkv(x).split((32, 4, 6), dim=-1)
    q = q.unflatten(-1, (8, 4)).transpose(1, 2)
    scores = q @ k.unsqueeze(1).transpose(-2, -1) / 2
    return (scores.softmax(-1) @ v.unsqueeze(1)).flatten(1)


def test_a_part_without_an_architecture_stays_dense() -> None:
    model = Composed(attend_unevenly, qkv=nn.Linear(32, 32 + 4 + 6))
    made = plan(model, nblocks=8, example=torch.randn(2, 5, 32))
    assert [(part.name, part.architecture) for part in made.layers[0].parts] == [("q", monarch(32, 32, 8)), ("k", None), ("v", None)]
    key = model.qkv.weight.detach()[32:36].clone()
    apply(made, model)
    assert torch.equal(model.qkv.k.weight, key)
    assert densify(model) == 1 and torch.equal(model.qkv.weight[32:36], key)


def test_what_is_given_goes_before_what_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", in_chans=1, num_classes=7, **TINY)
        other = timm.create_model("vit_tiny_patch16_224", act_layer=nn.ReLU, **TINY)
    base, base_args = find_base(model, None, {"num_classes": 9})
    assert (base, base_args["num_classes"], base_args["depth"]) == ("vit_tiny_patch16_224.augreg_in21k_ft_in1k", 9, 2)
    assert find_base(model, "vit_pytorch:ViT", {"depth": 1}) == ("vit_pytorch:ViT", {"depth": 1})
    assert find_base(other, None, None) == find_base(nn.Linear(2, 2), None, None) == (None, {}), "JSON has no functions"
    with pytest.raises(OptionError, match="base_args must be values that JSON has"):
        find_base(model, "vit_tiny_patch16_224", {"act_layer": nn.ReLU})
    monkeypatch.delattr(timm.models, "get_model_args", raising=False)  # as in earlier versions of timm
    assert find_base(model, None, None)[1] == {"img_size": [32, 32], "in_chans": 1, "num_classes": 7}
