"""The model card says what is known of a model, and claims nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from flysurgery.checkpoint import build_base, load, save, save_dense, vouch_for_weights
from flysurgery.fidelity import Fidelity
from flysurgery.inference import convert
from flysurgery.surgery import Report
from tests.checkpoint.conftest import ARGUMENTS, BASE, VIT_PYTORCH, Converted, install_random, small_model

TAGGED = f"{BASE}.augreg_in21k_ft_in1k"
FOUND = Fidelity(102, 0.97112, 0.954, 0.25, 0.5, (("blocks.0", 0.11), ("blocks.1", 0.222)))
UNKNOWN = "Its fidelity is unknown"


def card_of(folder: Path, model: nn.Module, report: Any) -> str:
    save(model, folder, report=report, force=True)
    return (folder / "README.md").read_text()


def described(base: str = BASE, **changes: Any) -> tuple[nn.Module, Report]:
    arguments = {**(ARGUMENTS if ":" not in base else VIT_PYTORCH), **changes}
    model = build_base(base, arguments).eval()
    return model, convert(model, base=base, base_args=arguments)


@pytest.fixture(scope="module")
def calibrated() -> Converted:
    model = small_model()
    data = torch.randn(12, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return model, convert(model, base=BASE, base_args=ARGUMENTS, calibrate=data)


def test_the_fidelity_is_what_was_measured_last_or_unknown(converted: Converted, calibrated: Converted, tmp_path: Path) -> None:
    card = card_of(tmp_path / "m", *converted)
    assert UNKNOWN in card and "Fidelity to the dense model" not in card and "output errors" not in card
    model, report = calibrated
    facts = replace(report, fidelity=FOUND).to_json()
    card = card_of(tmp_path / "m", model, facts)
    numbers = "output cosine 0.971, token cosine 0.954, relative error 0.250, same top class 50.00%"
    assert f"- Fidelity to the dense model on 102 held-out samples of calibration data: {numbers}\n" in card and UNKNOWN not in card
    errors = [row.calibration.output_error for row in report.replaced if row.calibration is not None]
    assert f"- Relative output errors of the layers as calibrated, on held-out samples: {min(errors):.3f} to {max(errors):.3f}\n" in card
    card = card_of(tmp_path / "m", model, replace(report, fidelity=replace(FOUND, output_cosine=float("nan"))))
    assert "output cosine no number, token cosine 0.954" in card, "JSON has no NaN"
    run = {"data": "photos", "teacher": "dense", "scratch": False, "images": 6400, "updates": 100, "before": None, "after": None}
    card = card_of(tmp_path / "m", model, facts | {"finetune": run})
    assert UNKNOWN in card and "samples of calibration data, before any fine-tuning: output cosine 0.971" in card
    end = {"fidelity_after": replace(FOUND, output_cosine=0.99, samples=40).to_json()}
    card = card_of(tmp_path / "m", model, facts | {"finetune": run | end})
    line = "- Fine-tuned on 6,400 images of photos in 100 updates, with dense as teacher; fidelity to the teacher on 40 held-out images: "
    assert UNKNOWN not in card and f"{line}output cosine 0.990, token cosine 0.954" in card


def test_the_task_and_the_library_are_named(tmp_path: Path) -> None:
    for classes, task in ((7, "image-classification"), (0, "image-feature-extraction")):
        card = card_of(tmp_path / "m", *described(num_classes=classes))
        assert card.startswith(f"---\nlibrary_name: timm\npipeline_tag: {task}\ntags:\n- {task}\n- timm\n- flysurgery\n---\n")
    assert "\nvit_pytorch:ViT, with " in card_of(tmp_path / "v", *described("vit_pytorch:ViT"))
    model = transformers.ViTModel(transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32))
    card = card_of(tmp_path / "t", install_random(model), None)
    assert "library_name: transformers" in card and 'transformers.ViTModel.from_pretrained("DIR")' in card


def test_weights_from_elsewhere_claim_no_tag_and_no_licence(tmp_path: Path) -> None:
    card = card_of(tmp_path / "m", *described(TAGGED))
    assert "augreg" not in card and "apache" not in card and f"\n{BASE}, with " in card
    save_dense(small_model(), tmp_path / "dense", BASE, ARGUMENTS, force=False)
    for name in ("m", "dense"):
        data = json.loads((tmp_path / name / "config.json").read_text())["pretrained_cfg"]
        assert not {"tag", "license", "url", "hf_hub_id"} & set(data) and data["mean"] == [0.5, 0.5, 0.5]


def test_weights_that_are_known_to_be_published_are_named_and_stay_so(tmp_path: Path) -> None:
    model = build_base(TAGGED, ARGUMENTS).eval()
    vouch_for_weights(model)
    line = f"- Converted from the weights `{TAGGED}`, licence apache-2.0\n"
    assert line in card_of(tmp_path / "m", model, convert(model, base=TAGGED, base_args=ARGUMENTS))
    assert line in card_of(tmp_path / "again", load(tmp_path / "m"), None)
