"""The table of accuracies on generated images, with a tiny model: its rows are right, and a second call goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.recipes.conftest import RECIPES, RunRecipe


def test_rows_and_going_on(run_recipe: RunRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run_recipe("fractal_accuracy.py", "--folder", "f", "--targets", "gonon", "--methods", "svd", "magnitude")
    assert [(row["target"], row["method"], row["status"]) for row in first] == [
        ("dense", "dense", "ok"),
        ("gonon", "svd", "ok"),
        ("gonon", "magnitude", "ok"),
    ]
    dense, svd, magnitude = first
    assert float(dense["points"]) == 0 and dense["samples"] == "100" and float(dense["replaced_share"]) == 1
    assert svd["replaced_share"] == magnitude["replaced_share"] and svd["model_params"] == magnitude["model_params"]
    assert float(svd["model_params"]) < float(dense["model_params"])
    for row in first:
        for when in ("", "_finetuned"):
            points = 100 * (float(row[f"top1{when}"]) - float(dense["top1"]))
            assert float(row[f"points{when}"]) == pytest.approx(points, abs=0.01)
    capsys.readouterr()
    commit, kept = first[0]["commit"], tmp_path / "rows.json"
    kept.write_text(kept.read_text().replace(f'"{commit}"', '"an older one"'))
    second = run_recipe("fractal_accuracy.py", "--folder", "f", "--targets", "gonon", "--methods", "svd", "lowrank calibrated", "magnitude")
    new = second.pop(2)
    assert {row["commit"] for row in second} == {"an older one"} and new["commit"] == commit, "each keeps its own stamp"
    assert [row["top1"] for row in second] == [row["top1"] for row in first]
    assert new["method"] == "lowrank calibrated" and float(new["replaced_share"]) <= float(svd["replaced_share"])
    assert float(new["error_ffn_out"]) < float(svd["error_ffn_out"]), "it has seen what the layers are given"
    assert "trained on" not in capsys.readouterr().out, "the dense model is not trained again"


def test_output_errors_are_those_of_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    import accuracy_cases

    from flysurgery import surgery
    from flysurgery.checkpoint import build_base

    arguments = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    dense = build_base("vit_tiny_patch16_224", arguments).eval()
    case = accuracy_cases.Case("monarch", "svd")
    images = torch.randn(8, 3, 16, 16)
    plan = surgery.plan(dense, "monarch", base="vit_tiny_patch16_224", base_args=arguments)
    made = accuracy_cases.make(case, dense, plan, images)
    found = accuracy_cases.output_errors(dense, made.model, made.plan, images)
    block, new = dense.get_submodule("blocks.0"), made.model.get_submodule("blocks.0")
    with torch.no_grad():
        x = block.norm1(dense.pos_drop(dense._pos_embed(dense.patch_embed(images))))  # pyright: ignore
        wanted = block.attn.qkv(x)  # pyright: ignore
        lost = new.attn.qkv(x) - wanted  # pyright: ignore
    assert found["error_qkv"] == pytest.approx(float(lost.norm() / (wanted - block.attn.qkv.bias.detach()).norm()), rel=1e-4)  # pyright: ignore
    assert surgery.plan_of(dense) is None and found.keys() == {"error_qkv", "error_ffn_in", "error_ffn_out"}


def test_all_methods_keep_a_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    import accuracy_cases

    from flysurgery.checkpoint import build_base
    from flysurgery.evaluation import load_data

    arguments = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
    dense = build_base("vit_tiny_patch16_224", arguments).eval()
    calibration = torch.randn(16, 3, 16, 16)
    data = load_data("fractals", dense)
    workshop = accuracy_cases.Workshop(dense, "vit_tiny_patch16_224", arguments, calibration, data, None, 0.0, tmp_path)
    plan = workshop.plan("budget 0.4")
    monkeypatch.setattr("flysurgery.surgery.allocate", None)
    assert workshop.plan("budget 0.4") == plan, "it is kept, and not made again"
    shares = []
    for method in ("svd", "permuted", "lowrank", "magnitude"):
        shares.append(accuracy_cases.make(accuracy_cases.Case("budget 0.4", method), dense, plan, calibration).replaced_share)
    selected = [layer for layer in plan.layers if layer.role in accuracy_cases.ROLES]
    after, before = (sum(getattr(layer, name) for layer in selected) for name in ("params_after", "params_before"))
    assert shares[0] == shares[1] == shares[3] == after / before
    assert sum(layer.weights_after for layer in selected) <= 0.4 * sum(layer.weights_before for layer in selected)
    assert shares[2] <= shares[0]
