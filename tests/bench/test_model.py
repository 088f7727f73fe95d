"""``bench model``: what is timed, and what the answer says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flysurgery import plan as make_plan
from flysurgery.bench import Protocol, rows_of_case
from flysurgery.bench.model import (
    ModelSettings,
    architectures_for,
    groups_of,
    layer_jobs,
    sentence,
    slower_layers,
    whole_case,
)
from flysurgery.checkpoint import build_base
from flysurgery.surgery import Plan

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
    timed = {row["candidate"]: row for row in next(iter(layer_jobs(plan, SETTINGS)))[1]()}
    assert {row["rows"] for row in timed.values()} == {34}
    assert list(timed)[:3] == ["dense", "dense again", "converted"]
    searched = {str(architecture) for architecture in architectures_for(groups[0].layer)}
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


def record(layer: str, candidate: str, ms: float, ratio: float, status: str = "ok") -> dict[str, Any]:
    return {"layer": layer, "candidate": candidate, "median_ms": str(ms), "ratio_to_dense": str(ratio), "status": status}


def whole(candidate: str, ratio: float, status: str = "ok") -> dict[str, Any]:
    return record("(model)", candidate, 1.0, ratio, status)


@pytest.mark.parametrize(
    ("converted", "dense", "answer"),
    [
        (0.5, 0.9, "conversion is worth it here: converted and optimized the model takes 0.50 of the dense time"),
        (0.95, 0.9, "conversion is not worth it here: converted and optimized the model takes 0.95 of the dense time"),
    ],
)
def test_the_answer_weighs_conversion_against_fusion_alone(plan: Plan, converted: float, dense: float, answer: str) -> None:
    words = sentence([whole("converted, optimized", converted), whole("dense, optimized", dense)], groups_of(plan))
    assert words.startswith(f"{answer}, optimized without conversion 0.90")


def test_the_answer_about_optimized_models_names_what_stays_dense(plan: Plan) -> None:
    groups = groups_of(plan)
    noisy = record(FC1, "converted", 1, 1.1, "noisy: dense timed twice differs by 11%")
    models = [whole("converted, optimized", 0.5), whole("dense, optimized", 0.9), whole("converted where faster", 0.6)]
    rows = [*models, record(QKV, "converted", 1, 0.4), noisy, record(FC2, "converted", 1, 1.1)]
    assert sentence(rows, groups).endswith(f"conversion 0.90; by itself faster dense: {FC1} (noisy), {FC2}")
    assert sentence([*rows, whole("converted where faster, optimized", 0.45)], groups).endswith("the model takes 0.45")
    none = [whole("converted", 1.2), *(record(name, "converted", 1, 1.2) for name in (QKV, FC1, FC2))]
    assert sentence(none, groups).endswith("takes 1.20 of the dense time; every replaced layer is faster dense")


def test_the_answer_names_what_stays_dense(plan: Plan) -> None:
    groups = groups_of(plan)
    records = [
        *(record(QKV, name, ms, ms / 4) for name, ms in (("dense", 4.0), ("dense again", 4.1), ("converted", 2.0))),
        *(record(FC1, name, ms, ms / 2) for name, ms in (("dense", 2.0), ("converted", 3.0))),
        *(record(FC2, name, ms, ms / 2) for name, ms in (("dense", 2.0), ("converted", 1.0), (LOW_RANK, 0.5))),
        whole("converted", 0.9),
        whole("converted where faster", 0.8),
    ]
    reason = "converted it takes 1.50 of the dense time"
    assert slower_layers(records, groups) == dict.fromkeys(("blocks.0.mlp.fc1", "blocks.1.mlp.fc1"), reason)
    words = sentence(records, groups)
    assert words.startswith(f"conversion is worth it here: the converted model takes 0.90 of the dense time; faster dense: {FC1},")
    assert words.endswith("takes 0.80")
    assert sentence([*records[:-2], whole("converted", 1.2, "noisy: x")], groups).startswith("this machine is too noisy")
