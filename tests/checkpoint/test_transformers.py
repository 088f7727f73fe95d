"""Folders of converted models of transformers: by transformers' own calls, by those of this project, and what is refused."""

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import flysurgery
from flysurgery.checkpoint.config import describe_images
from flysurgery.errors import SurgeryError
from flysurgery.layers import ButterflyLinear
from flysurgery.surgery import plan_of
from tests.checkpoint.conftest import refused, rewrite_config
from tests.support.models import TRUNK

IMAGES = TRUNK | {"image_size": 32}
STAGES = {"image_size": 64, "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}

MODELS: dict[str, dict[str, Any]] = {
    "ViTForImageClassification": IMAGES | {"id2label": {0: "cat", 1: "dog", 2: "fox"}},
    "Dinov2WithRegistersModel": IMAGES,
    "SwinForImageClassification": STAGES,
    "YolosForObjectDetection": TRUNK | {"image_size": [64, 64]},
    "ConvNextForImageClassification": {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 64]},
}


@cache
def converted(name: str) -> Any:
    """One of these, converted; not to be changed."""
    torch.manual_seed(0)
    model = getattr(transformers, name)
    model = model(model.config_class(**MODELS[name])).eval()
    flysurgery.convert(model)
    return model


def tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("name", MODELS)
def test_round_trips(name: str, tmp_path: Path) -> None:
    model = converted(name)
    x = torch.randn(plan_of(model).example[0].shape, generator=torch.Generator().manual_seed(1))
    wanted = tensors(model(x))
    model.save_pretrained(tmp_path / "theirs")
    flysurgery.save(model, tmp_path / "ours")
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        auto, problems = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
        assert not any(problems.values())
        for again in (auto, flysurgery.load(folder)):
            assert [layer for layer in again.modules() if isinstance(layer, ButterflyLinear)]
            assert all(map(torch.equal, tensors(again(x)), wanted))
            assert plan_of(again) == plan_of(model)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One converted model, as transformers saves it and as this project does."""
    where = tmp_path_factory.mktemp("folders")
    model = converted("ViTForImageClassification")
    model.save_pretrained(where / "theirs")
    flysurgery.save(model, where / "ours")
    return where


def test_an_opened_model_is_no_quantized_one(folders: Path, tmp_path: Path) -> None:
    for kind in ("ours", "theirs"):
        model = transformers.AutoModelForImageClassification.from_pretrained(folders / kind)
        assert model.config.id2label == flysurgery.load(folders / kind).config.id2label == {0: "cat", 1: "dog", 2: "fox"}
    assert model.half().dtype == torch.float16
    model.float().train()(torch.randn(2, 3, 32, 32), labels=torch.tensor([0, 1])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.config.problem_type == "single_label_classification"  # set by the forward
    model.config.output_hidden_states = True
    flysurgery.save(model, tmp_path / "saved")
    assert flysurgery.load(tmp_path / "saved").config.problem_type == "single_label_classification"
    flysurgery.densify(model)
    model.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    transformers.ViTForImageClassification.from_pretrained(tmp_path / "dense")


def test_models_that_share_a_configuration_are_converted_apart_and_it_is_as_before_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.ViTConfig(**IMAGES)
    first, second = transformers.ViTModel(config).eval(), transformers.ViTModel(config).eval()
    plan = flysurgery.plan(first)
    flysurgery.apply(plan, first)
    assert "quantization_config" in first.config.to_dict()
    assert "quantization_config" not in second.config.to_dict() and config is second.config
    monkeypatch.setattr(second, "forward", lambda *_: 1 / 0)
    with pytest.raises(SurgeryError, match="put back as it was"):
        flysurgery.apply(plan, second)
    assert "quantization_config" not in second.config.to_dict()


def test_a_trunk_opens_with_and_without_a_head(folders: Path, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 32, 32)
    whole, trunk = flysurgery.load(folders / "ours"), transformers.AutoModel.from_pretrained(folders / "ours")
    assert type(trunk) is transformers.ViTModel
    assert torch.equal(trunk(x).last_hidden_state, whole.vit(x).last_hidden_state)
    trunk.save_pretrained(tmp_path)
    again, problems = transformers.ViTForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert set(problems["missing_keys"]) == {"classifier.weight", "classifier.bias"}
    assert torch.equal(again.vit(x).last_hidden_state, whole.vit(x).last_hidden_state)
    assert torch.equal(flysurgery.load(tmp_path)(x).last_hidden_state, whole.vit(x).last_hidden_state)


def test_only_the_checked_file_is_read(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "theirs", tmp_path / "copy")
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "x", "target_modules": ["fc1"]}
    (tmp_path / "copy" / "adapter_config.json").write_text(json.dumps(adapter))
    (tmp_path / "copy" / "adapter_model.safetensors").write_bytes(b"no tensors")
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(flysurgery.load(tmp_path / "copy")(x).logits, flysurgery.load(folders / "theirs")(x).logits)


def test_transformers_names_the_method_that_it_lacks_and_learns_it_after_its_own_import(folders: Path) -> None:
    opened = f"AutoModelForImageClassification.from_pretrained({str(folders / 'ours')!r})"
    code = f"import transformers.quantizers; from transformers import AutoModelForImageClassification; {opened}; "
    code += f"import flysurgery; print(flysurgery.surgery.plan_of({opened}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Unknown quantization type, got flysurgery" in run.stderr
    assert "plan for transformers:ViTForImageClassification" in run.stdout


CHANGES: list[dict[str, Any]] = [
    {"hidden_size": 100_000},
    {"num_hidden_layers": 1 << 24},
    {"architectures": ["ViTMAEForPreTraining"]},
    {"attn_implementation": "somebody/kernels"},
    {"auto_map": {"AutoModel": "code.Model"}},
    {"transformers_weights": "other.safetensors"},
    {"quantization_config": {"plan": {"layers": {}}}},
    {"hidden_size": "much"},
]
DAMAGED: list[dict[str, Any]] = [{"id2label": 5}, {"dtype": "nonsense"}]
"""What is read of a folder that transformers wrote alone."""
PROCESSORS = ("[]", '{"image_std": [0.0]}', '{"image_mean": [1e999]}', '{"rescale_factor": 0}', "no JSON")


def merge(config: dict[str, Any], change: dict[str, Any]) -> None:
    for name, value in change.items():
        merge(config[name], value) if isinstance(value, dict) and value and name in config else config.update({name: value})


BOTH = [(kind, change) for kind in ("ours", "theirs") for change in (*CHANGES, *PROCESSORS)]


@pytest.mark.parametrize(("kind", "change"), [*BOTH, *(("theirs", each) for each in DAMAGED)])
def test_a_changed_configuration_and_a_damaged_processor_are_refused(kind: str, change: Any, folders: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders / kind, tmp_path / "changed"))
    if isinstance(change, str):
        (folder / "preprocessor_config.json").write_text(change)
        refused(folder, "preprocessor_config.json")
    else:
        rewrite_config(folder, lambda config: merge(config, change))
        refused(folder)


@pytest.mark.parametrize("settings", [{"do_rescale": False}, {"rescale_factor": 2 / 255}, {"do_normalize": False, "do_rescale": False}, {}])
def test_images_are_scaled_as_by_their_processor(settings: dict[str, Any]) -> None:
    """With the noted mean and deviation, pixels from 0 to 1 become what the processor of transformers makes of pixels to 255."""
    image = np.random.default_rng(0).integers(0, 256, (3, 8, 8), dtype=np.uint8)
    processor = transformers.ViTImageProcessor(do_resize=False, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4], **settings)
    expected = torch.as_tensor(np.asarray(processor(image, input_data_format="channels_first")["pixel_values"][0])).float()
    model = nn.Identity()
    describe_images(model, json.loads(processor.to_json_string()))
    mean, std = (torch.tensor(model.pretrained_cfg[name]).view(-1, 1, 1) for name in ("mean", "std"))
    torch.testing.assert_close((torch.from_numpy(image) / 255 - mean) / std, expected, atol=1e-5, rtol=1e-5)
