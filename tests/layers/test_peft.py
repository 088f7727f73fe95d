"""Adapters of peft on converted layers, by peft's own calls; and that readers of converted models register once."""

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

import flysurgery
from flysurgery import registration
from flysurgery.errors import SurgeryError
from flysurgery.layers import ButterflyConv, ButterflyLinear, SplitLinear
from flysurgery.patterns import Architecture
from flysurgery.peft import LoraButterfly, lora_config

SETTINGS = [
    {"target_modules": "all-linear"},
    {"target_modules": ["fc1", "qkv"]},
    {"target_modules": ["fc1", "q"], "use_dora": True},
    {"target_modules": "all-linear", "use_rslora": True, "modules_to_save": ["head"]},
]


@pytest.fixture(scope="module")
def converted() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10).eval()
    flysurgery.apply(flysurgery.plan(model, arch="monarch"), model)
    return model


def adapted(model: nn.Module, **settings: Any) -> PeftModel:
    model = copy.deepcopy(model)
    return get_peft_model(model, lora_config(model, LoraConfig(r=4, **settings)))


def trained(model: PeftModel, x: torch.Tensor) -> PeftModel:
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    model.train()
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_trained_saved_opened_merged(converted: nn.Module, settings: dict[str, Any], tmp_path: Path) -> None:
    x = torch.randn(2, 3, 64, 64)
    before = converted(x)
    model = adapted(converted, **settings)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)  # an adapter begins at zero
    if settings["target_modules"] == "all-linear":
        assert sum(isinstance(module, LoraButterfly) for module in model.modules()) == 2 * 5, "each part of q, k and v has its own"
    after = trained(model, x)(x)
    assert (after - before).abs().max() > 0.1

    model.save_pretrained(tmp_path)
    other = copy.deepcopy(converted)
    opened = PeftModel.from_pretrained(other, tmp_path, config=lora_config(other, LoraConfig.from_pretrained(tmp_path)))
    torch.testing.assert_close(opened.eval()(x), after)

    model.merge_adapter(safe_merge=True)
    assert not any(isinstance(module, ButterflyLinear) for module in model.modules() if isinstance(module, LoraButterfly))
    torch.testing.assert_close(model(x), after, rtol=1e-3, atol=1e-4)
    model.unmerge_adapter()
    torch.testing.assert_close(model(x), after, rtol=1e-4, atol=1e-5)
    if "modules_to_save" not in settings:
        with model.disable_adapter():
            torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
    dense = model.merge_and_unload()
    torch.testing.assert_close(dense(x), after, rtol=1e-3, atol=1e-4)
    assert type(dense.blocks[0].mlp.fc1) is nn.Linear
    if settings["target_modules"] == "all-linear":
        assert flysurgery.densify(dense) == 2  # the layers that hold q, k and v apart
        assert flysurgery.surgery.plan_of(dense) is None


def test_a_merge_can_be_taken_back_fail_and_be_moved(converted: nn.Module) -> None:
    model = adapted(converted, target_modules=["qkv", "fc1"])
    block = model.base_model.model.blocks[0]
    model.merge_adapter()
    assert isinstance(block.attn.qkv.base_layer, nn.Linear)
    model.double().unmerge_adapter()
    assert isinstance(block.attn.qkv.base_layer, SplitLinear) and isinstance(block.mlp.fc1.base_layer, ButterflyLinear)
    assert model(torch.randn(2, 3, 64, 64, dtype=torch.float64)).dtype == torch.float64
    torch.nn.init.constant_(block.mlp.fc1.lora_B["default"].weight, float("nan"))
    with pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter(safe_merge=True)
    assert isinstance(block.mlp.fc1.base_layer, ButterflyLinear) and not block.mlp.fc1.merged


def test_what_does_not_go_with_adapters_is_one_sentence(converted: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10).eval()
    get_peft_model(dense, LoraConfig(r=4, target_modules=["fc1"]))
    with pytest.raises(SurgeryError, match=r"adapters of peft \(around blocks.0.mlp.fc1\).*merge_and_unload"):
        flysurgery.plan(dense)
    with pytest.raises(SurgeryError, match=r"adapters of peft \(around blocks.0.mlp.fc1\)"):
        flysurgery.densify(adapted(converted, target_modules=["fc1"]).base_model.model)
    convolution = nn.Sequential(ButterflyConv(Architecture.of((1, 8, 6, 2), (2, 6, 4, 1))))
    with pytest.raises(SurgeryError, match="1x1 convolution; leave it out"):
        get_peft_model(convolution, lora_config(convolution, LoraConfig(target_modules=["0"])))
    monkeypatch.setattr("flysurgery.peft.is_optimized", lambda model: True)
    with pytest.raises(SurgeryError, match=r"undo it first: flysurgery\.restore"):
        lora_config(converted, LoraConfig(target_modules=["fc1"]))


def test_a_package_that_is_imported_twice_has_one_finder_of_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, "flysurgery.registration")
    importlib.import_module("flysurgery.registration").register()
    assert sum(type(finder).__module__ == registration.__name__ for finder in sys.meta_path) == 1
