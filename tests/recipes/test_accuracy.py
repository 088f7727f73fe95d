"""The tables of accuracies: rows of the demo model and of a tiny one on generated images, and what each case keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flysurgery import surgery
from flysurgery.checkpoint import build_base
from tests.recipes.conftest import RunRecipe

BASE = "vit_tiny_patch16_224"


def test_calibration_keeps_the_digits(run_recipe: RunRecipe) -> None:
    dense, svd, calibrated = run_recipe("accuracy.py digits")
    assert dense["top1"] == "0.985" and float(svd["top1"]) < 0.97 < float(calibrated["top1"])
    for role in ("qkv", "ffn_in", "ffn_out"):
        assert float(calibrated[f"error_{role}"]) <= 0.7 * float(svd[f"error_{role}"])


def test_fractals_go_on_where_they_stopped(run_recipe: RunRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    first = run_recipe("accuracy.py fractals", "--folder", "f", "--targets", "gonon", "--methods", "svd", "magnitude")
    assert [(row["target"], row["method"]) for row in first] == [("dense", "dense"), ("gonon", "svd"), ("gonon", "magnitude")]
    dense, svd, magnitude = first
    assert dense["samples"] == "250" and float(dense["replaced_share"]) == 1
    assert svd["replaced_share"] == magnitude["replaced_share"] and svd["model_params"] == magnitude["model_params"]
    assert float(svd["model_params"]) < float(dense["model_params"])
    assert "the dense model is trained on 960 images" in capsys.readouterr().out
    *before, new = run_recipe("accuracy.py fractals", "--folder", "f", "--targets", "gonon", "--methods", "lowrank calibrated")
    assert before == first and new["method"] == "lowrank calibrated"
    assert float(new["replaced_share"]) <= float(svd["replaced_share"])
    assert float(new["error_ffn_out"]) < float(svd["error_ffn_out"]), "it has seen what the layers are given"
    assert "is trained on" not in capsys.readouterr().out, "the dense model is not trained again"


def test_output_errors_are_those_of_the_layers() -> None:
    import accuracy

    arguments = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    dense, model = (build_base(BASE, arguments).eval() for _ in range(2))
    model.load_state_dict(dense.state_dict())
    images = torch.randn(8, 3, 16, 16)
    plan, _ = accuracy.convert(model, surgery.plan(dense, "monarch", base=BASE, base_args=arguments), "svd", images)
    found = accuracy.output_errors(dense, model, plan, images)
    block, new = dense.get_submodule("blocks.0"), model.get_submodule("blocks.0")
    with torch.no_grad():
        x = block.norm1(dense.pos_drop(dense._pos_embed(dense.patch_embed(images))))  # pyright: ignore
        wanted = block.attn.qkv(x)  # pyright: ignore
        lost = new.attn.qkv(x) - wanted  # pyright: ignore
    assert found["qkv"] == pytest.approx(float(lost.norm() / (wanted - block.attn.qkv.bias.detach()).norm()), rel=1e-4)  # pyright: ignore
    assert found.keys() == {"qkv", "ffn_in", "ffn_out"}


def test_all_methods_keep_a_budget(tmp_path: Path) -> None:
    import accuracy

    arguments = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
    calibration = torch.randn(16, 3, 16, 16)
    dense = build_base(BASE, arguments).eval()
    plan = surgery.plan(dense, base=BASE, base_args=arguments, **accuracy.TARGETS["budget 0.4"])
    plan, _ = surgery.allocate(plan, dense, budget=accuracy.BUDGETS["budget 0.4"], calibrate=calibration)
    shares = []
    for method in ("svd", "permuted", "magnitude", "lowrank"):
        shares.append(accuracy.convert(build_base(BASE, arguments).eval(), plan, method, calibration)[1])
    selected = [layer for layer in plan.layers if layer.role in ("qkv", "ffn_in", "ffn_out")]
    after, before = (sum(getattr(layer, name) for layer in selected) for name in ("params_after", "params_before"))
    assert shares[0] == shares[1] == shares[2] == after / before >= shares[3]
    assert sum(layer.weights_after for layer in selected) <= 0.4 * sum(layer.weights_before for layer in selected)
