"""Models for detection, segmentation, depth, video, and pairs of images and texts: a small random one of each is converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import flysurgery
from flysurgery.layers import ButterflyLinear
from flysurgery.surgery import Plan, apply, plan
from tests.surgery.conftest import make_exact

TRUNK: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 8}
IMAGES = TRUNK | {"image_size": 32}
TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 50}
DEPTH = {
    "num_hidden_layers": 4,
    "backbone_out_indices": [0, 1, 2, 3],
    "neck_hidden_sizes": [16] * 4,
    "reassemble_factors": [4, 2, 1, 0.5],
    "is_hybrid": False,
}
STAGES = {"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [16, 32], "num_attention_heads": [1, 2], "sr_ratios": [2, 1]}
STAGES |= {"patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [4, 4], "decoder_hidden_size": 32}
SWIN = {"model_type": "swin", "image_size": 64, "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 4}
SWIN |= {"out_features": ["stage1", "stage2", "stage3", "stage4"]}
MASKS: dict[str, Any] = {"backbone_config": SWIN, "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "num_queries": 5}
MASKS |= {"encoder_feedforward_dim": 64, "dim_feedforward": 64, "encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2}

MODELS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "YolosForObjectDetection": (TRUNK | {"image_size": [32, 32], "num_detection_tokens": 4}, (3, 32, 32)),
    "SegformerForSemanticSegmentation": (STAGES, (3, 64, 64)),
    "Mask2FormerForUniversalSegmentation": (MASKS, (3, 64, 64)),
    "DPTForDepthEstimation": (IMAGES | DEPTH | {"fusion_hidden_size": 16}, (3, 32, 32)),
    "VideoMAEForVideoClassification": (IMAGES | {"num_frames": 4}, (4, 3, 32, 32)),
    "CLIPModel": ({"vision_config": IMAGES, "text_config": TEXT, "projection_dim": 16}, (3, 32, 32)),
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    found = getattr(transformers, name)
    entries, _ = MODELS[name]
    return found(found.config_class(**entries)).eval()


def inputs_of(name: str) -> dict[str, Tensor]:
    images = torch.randn(2, *MODELS[name][1], generator=torch.Generator().manual_seed(1))
    return {"pixel_values": images} | ({"input_ids": torch.arange(14).view(2, 7)} if name == "CLIPModel" else {})


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        found = model(**{key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()})
    return [each for each in found.values() if isinstance(each, Tensor)]


def planned(name: str) -> tuple[Any, Plan]:
    model = build(name)
    return model, plan(model, roles=("ffn", "qkv", "attn_out"), example=inputs_of(name))


@pytest.mark.parametrize("name", MODELS)
def test_every_family_of_tasks_keeps_its_outputs_on_exact_products(name: str) -> None:
    model, made = planned(name)
    model.double()
    make_exact(made, model)
    dense = outputs(model, inputs_of(name))
    assert apply(made, model).verified
    assert {layer.role for layer in made.replaced} == {"qkv", "attn_out", "ffn_in", "ffn_out"}
    assert all(isinstance(part, ButterflyLinear) for layer in made.replaced for part in [model.get_submodule(layer.fqn)])
    converted = outputs(model, inputs_of(name))
    assert len(converted) == len(dense) >= 1
    for got, expected in zip(converted, dense, strict=True):
        assert float((got - expected).abs().max()) <= 1e-9 * float(expected.abs().max())


def test_a_folder_with_attention_of_torch_is_opened_by_both(tmp_path: Path) -> None:
    name = "Mask2FormerForUniversalSegmentation"
    model, made = planned(name)
    apply(made, model)
    attention = "model.transformer_module.decoder.layers.0.cross_attn"
    assert isinstance(model.get_submodule(f"{attention}.k"), ButterflyLinear)
    flysurgery.save(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    expected = outputs(model, inputs_of(name))
    for again in (flysurgery.load(tmp_path / "ours"), type(model).from_pretrained(tmp_path / "theirs")):
        assert all(torch.equal(got, right) for got, right in zip(outputs(again, inputs_of(name)), expected, strict=True))
