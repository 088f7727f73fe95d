"""``bench model``: what is timed, and what the answer says."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flysurgery import plan as make_plan
from flysurgery.bench import Protocol, rows_of_case
from flysurgery.bench.model import ModelSettings, groups_of, layer_jobs, sentence, slower_layers, whole_case
from flysurgery.checkpoint import build_base
from flysurgery.surgery import Plan, layer_candidates

MODEL, SIZES = "vit_tiny_patch16_224", {"embed_dim": 48, "depth": 2, "num_heads": 2, "img_size": 32, "patch_size": 8, "num_classes": 10}
LOW_RANK = "(1,48,8,1),(1,8,192,1)"
PROTOCOL = Protocol(rounds=2, seconds=0.01)
SETTINGS = ModelSettings("tiny", torch.device("cpu"), batch=2, protocol=PROTOCOL)
QKV, FC1, FC2 = "blocks.*.attn.qkv", "blocks.*.mlp.fc1", "blocks.*.mlp.fc2"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(build_base(MODEL, SIZES, device="meta"), "monarch")


def test_layers_that_are_alike_are_timed_once_and_stand_for_all(plan: Plan) -> None:
    groups = groups_of(plan)
    assert {(group.name, len(group.fqns), group.rows) for group in groups} == {(QKV, 2, 17), (FC1, 2, 17), (FC2, 2, 17)}
    timed = {row["candidate"]: row for row in next(iter(layer_jobs(groups, SETTINGS)))[1]()}
    assert {row["rows"] for row in timed.values()} == {34}
    assert list(timed)[:3] == ["dense", "dense again", "converted"]
    searched = {str(architecture) for architecture in layer_candidates(groups[0].layer).values()}
    assert searched < timed.keys() and "(1,24,6,2),(2,6,24,1)" in searched
    assert all(row["error"] < 1e-6 and row["median_ms"] is not None for row in timed.values())


def test_whole_models_are_timed_with_and_without_the_slow_layers_and_optimized(plan: Plan) -> None:
    def rows(stay_dense: dict[str, str], **settings: Any) -> dict[str, dict[str, Any]]:
        make = lambda: whole_case(plan, lambda: build_base(MODEL, SIZES), replace(SETTINGS, **settings), stay_dense)  # noqa: E731
        return {row["candidate"]: row for row in rows_of_case({"layer": "(model)"}, make, "fp32", PROTOCOL)}

    by_name = rows({"blocks.0.mlp.fc1": "slower"}, optimized=True)
    flops = {name: row["flops"] for name, row in by_name.items()}
    assert flops["converted"] < flops["converted where faster"] < flops["dense"]
    for name in ("dense", "converted", "converted where faster"):
        assert by_name[name]["median_ms"] and by_name[f"{name}, optimized"]["median_ms"]
        assert flops[f"{name}, optimized"] == flops[name]
    assert "optimized without conversion" in sentence(list(by_name.values()), groups_of(plan))
    all_slower = rows({layer.fqn: "slower" for layer in plan.replaced})
    assert all_slower.keys() == {"dense", "dense again", "converted"}, "dense is not timed once more"


FUSED = {"converted, optimized": 0.5, "dense, optimized": 0.9}
FASTER = "takes 0.50 of the dense time, optimized without conversion 0.90"
WITHOUT = "and without converting them the model takes"


@pytest.mark.parametrize(
    ("models", "layers", "noisy", "words"),
    [
        (FUSED, {}, "", f"{FASTER}; every replaced layer is by itself faster than dense"),
        (FUSED | {"converted": 1.3}, {FC1: 1.1, FC2: 1.1}, FC1, f"{FASTER}; by itself faster dense: {FC1} (noisy), {FC2}"),
        (FUSED | {"converted where faster, optimized": 0.45}, {FC1: 1.1}, "", f"by itself faster dense: {FC1}, {WITHOUT} 0.45"),
        (FUSED | {"converted, optimized": 0.95}, {}, "(model)", "too noisy to say; by these numbers conversion is not worth it here"),
        ({"converted": 0.9, "converted where faster": 0.8}, {FC1: 1.5}, "", f"is worth it here: .* 0.90 .*{FC1}, {WITHOUT} 0.80"),
        ({"converted": 1.2}, {QKV: 1.0, FC1: 1.2, FC2: None}, "", "is not worth it here: .* 1.20 .*every replaced layer is faster dense"),
        ({}, {}, "", "the whole model could not be timed converted; its row says why"),
    ],
)
def test_the_answer_weighs_conversion_and_names_what_stays_dense(
    plan: Plan, models: dict[str, float], layers: dict[str, float | None], noisy: str, words: str
) -> None:
    """``layers`` are those that are not twice as fast as dense; None could not be timed."""
    groups, ratios = groups_of(plan), dict.fromkeys((QKV, FC1, FC2), 0.5) | layers
    times = [("(model)", name, ratio) for name, ratio in models.items()]
    for layer, ratio in ratios.items():
        times += [(layer, "dense", 1.0), (layer, "dense again", 1.0), (layer, LOW_RANK, 0.2), (layer, "converted", ratio)]
    records = [
        {"layer": layer, "candidate": name, "ratio_to_dense": str(ratio or ""), "status": "noisy: x" if layer == noisy else "ok"}
        for layer, name, ratio in times
    ]
    assert all(part in sentence(records, groups) for part in words.split(".*"))
    found = slower_layers(records, groups)
    assert found.keys() == {fqn for group in groups if group.name in layers for fqn in group.fqns}
    for group in groups:
        ratio = layers.get(group.name)
        assert all((f"{ratio:.2f}" if ratio else "could not be timed") in found[fqn] for fqn in group.fqns if fqn in found)
