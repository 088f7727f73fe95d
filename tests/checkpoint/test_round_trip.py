"""What is loaded gives bit-equal outputs, whatever the model, the dtype and the way."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

from flysurgery.checkpoint import load, save
from flysurgery.checkpoint.meter import Limits
from flysurgery.checkpoint.shell import build_shell
from flysurgery.checkpoint.tensors import unstored_buffers
from flysurgery.errors import OptionError
from flysurgery.surgery import Report, plan_of
from tests.checkpoint.conftest import images, install_random, outputs, small_model
from tests.checkpoint.tamper import read_weights


def test_load_is_bit_equal(converted: tuple[nn.Module, Report], saved: Path) -> None:
    loaded = load(saved)
    assert torch.equal(outputs(loaded), outputs(converted[0]))
    assert not any(module.training for module in loaded.modules())
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert plan_of(loaded) == plan_of(converted[0])


def test_timm_loads_the_folder_bit_equal(converted: tuple[nn.Module, Report], saved: Path) -> None:
    loaded = timm.create_model(f"local-dir:{saved}", pretrained=True)
    assert loaded.training, "timm's models start in training mode"
    assert torch.equal(outputs(loaded.eval()), outputs(converted[0]))


def test_a_loaded_model_saves_to_the_same_files(saved: Path, tmp_path: Path) -> None:
    save(load(saved), tmp_path / "again")
    (tensors, metadata), (again, metadata_again) = read_weights(saved), read_weights(tmp_path / "again")
    assert metadata == metadata_again
    assert list(tensors) == list(again) and all(torch.equal(tensors[name], again[name]) for name in tensors)
    configs = [json.loads((each / "config.json").read_text()) for each in (tmp_path / "again", saved)]
    assert configs[0] == configs[1]


TIMM_MODELS: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": {"img_size": 32, "embed_dim": 32, "depth": 1, "num_heads": 2},  # a switch; tables outside the state_dict
    "eva02_tiny_patch14_224": {"img_size": 28, "embed_dim": 48, "depth": 1, "num_heads": 3},  # rotary tables
    "swin_tiny_patch4_window7_224": {
        "img_size": 56,
        "embed_dim": 16,
        "depths": [2],
        "num_heads": [2],
    },  # masks made on the parameters' device
    "deit_tiny_distilled_patch16_224": {"img_size": 32, "embed_dim": 32, "depth": 1, "num_heads": 2},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TIMM_MODELS)
def test_families_with_buffers_and_switches(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = install_random(timm.create_model(name, num_classes=5, **TIMM_MODELS[name])).to(dtype)
    save(model, tmp_path / "model")
    assert torch.equal(outputs(load(tmp_path / "model")), outputs(model))


VIT_PYTORCH = {"image_size": 16, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 1, "heads": 2, "mlp_dim": 64}


@pytest.mark.parametrize("base", ["vit_pytorch:ViT", "vit_pytorch:SimpleViT", "vit_pytorch.deepvit:DeepViT"])
def test_vit_pytorch(base: str, tmp_path: Path) -> None:
    import importlib

    module, _, name = base.partition(":")
    torch.manual_seed(0)
    dense = getattr(importlib.import_module(module), name)(**VIT_PYTORCH)
    model = install_random(dense, roles=("ffn",), base=base, base_args=VIT_PYTORCH)
    save(model, tmp_path / "model")
    assert torch.equal(outputs(load(tmp_path / "model")), outputs(model))
    assert torch.equal(outputs(timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()), outputs(model))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_equals_the_model_in_that_dtype(dtype: str, converted: tuple[nn.Module, Report], tmp_path: Path) -> None:
    save(converted[0], tmp_path / "half", dtype=dtype)
    expected = copy.deepcopy(converted[0]).to(getattr(torch, dtype))
    loaded = load(tmp_path / "half")
    assert {tensor.dtype for tensor in loaded.state_dict().values()} == {getattr(torch, dtype)}
    assert torch.equal(outputs(loaded), outputs(expected))
    widened = load(tmp_path / "half", dtype="float32")
    assert torch.equal(outputs(widened), outputs(copy.deepcopy(expected).float()))
    assert torch.equal(outputs(load(tmp_path / "half", dtype=torch.float64)), outputs(copy.deepcopy(expected).double()))


def test_mixed_dtypes_are_kept(tmp_path: Path) -> None:
    model = small_model()
    model.blocks.half()
    install_random(model.float())
    model.blocks[0].norm1.double()
    save(model, tmp_path / "model")
    assert {name: t.dtype for name, t in load(tmp_path / "model").state_dict().items()} == {
        n: t.dtype for n, t in model.state_dict().items()
    }


def test_shared_tensors_are_stored_once_and_stay_shared(tmp_path: Path) -> None:
    model = install_random(small_model())
    model.blocks[1].norm1 = model.blocks[0].norm1
    model.blocks[1].attn.proj.weight = model.blocks[0].attn.proj.weight
    save(model, tmp_path / "model")
    tensors, metadata = read_weights(tmp_path / "model")
    aliases = json.loads(metadata["aliases"])
    assert aliases == {f"blocks.1.{name}": f"blocks.0.{name}" for name in ("norm1.weight", "norm1.bias", "attn.proj.weight")}
    assert not aliases.keys() & tensors.keys()
    loaded = load(tmp_path / "model")
    assert loaded.blocks[1].attn.proj.weight is loaded.blocks[0].attn.proj.weight
    assert loaded.blocks[1].norm1.bias is loaded.blocks[0].norm1.bias
    assert torch.equal(outputs(loaded), outputs(model))


def test_views_are_stored_without_their_neighbours(tmp_path: Path) -> None:
    model = install_random(small_model())
    wide = torch.randn(3, 7, 32)
    model.head.weight = nn.Parameter(wide[1])
    model.norm.weight = nn.Parameter(wide[0, 0])
    model.norm.bias = nn.Parameter(wide[2].T[:, 1])
    save(model, tmp_path / "model")
    assert torch.equal(outputs(load(tmp_path / "model")), outputs(model))


def test_buffers_that_construction_would_not_give_are_stored(tmp_path: Path) -> None:
    model = install_random(timm.create_model("eva02_tiny_patch14_224", **TIMM_MODELS["eva02_tiny_patch14_224"]))
    save(model, tmp_path / "plain")
    assert "rope.pos_embed" not in read_weights(tmp_path / "plain")[0]
    table = unstored_buffers(model)["rope.pos_embed"]
    table[0, 0] = torch.nextafter(table[0, 0], torch.tensor(9.0))
    save(model, tmp_path / "changed")
    assert "rope.pos_embed" in read_weights(tmp_path / "changed")[0]
    assert torch.equal(unstored_buffers(load(tmp_path / "changed"))["rope.pos_embed"], table)
    assert torch.equal(outputs(load(tmp_path / "changed")), outputs(model))


def test_a_new_head_and_input_size_are_followed(tmp_path: Path) -> None:
    model = install_random(small_model())
    model.reset_classifier(4)
    model.set_input_size(img_size=(24, 16))
    save(model, tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert outputs(loaded).shape == (3, 4) and torch.equal(outputs(loaded), outputs(model))
    plan = plan_of(loaded)
    assert plan is not None and plan.base_args["num_classes"] == 4 and plan.base_args["img_size"] == [24, 16]


def test_a_tag_that_timm_does_not_publish_is_left_out(tmp_path: Path) -> None:
    dense = small_model()
    dense.pretrained_cfg["tag"] = "our_own"
    model = install_random(dense)
    assert plan_of(model).base == "vit_tiny_patch16_224.our_own"
    save(model, tmp_path / "model")
    assert plan_of(load(tmp_path / "model")).base == "vit_tiny_patch16_224"


def test_data_description_survives(tmp_path: Path) -> None:
    dense = small_model()
    dense.pretrained_cfg = {
        **dense.pretrained_cfg,
        "mean": (0.1, 0.2, 0.3),
        "crop_pct": 0.75,
        "label_names": tuple("abcdefg"),
        "num_classes": 7,
    }
    save(install_random(dense), tmp_path / "model")
    for loaded in (load(tmp_path / "model"), timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True)):
        found = loaded.pretrained_cfg
        assert (found["mean"], found["crop_pct"], found["label_names"]) == ((0.1, 0.2, 0.3), 0.75, tuple("abcdefg"))
        assert (found["num_classes"], found["input_size"]) == (7, (3, 16, 16))
        assert not {"url", "hf_hub_id", "file"} & {name for name, value in found.items() if value}


@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "swin_tiny_patch4_window7_224"])
def test_saving_and_loading_draw_no_random_numbers(name: str, tmp_path: Path) -> None:
    model = install_random(timm.create_model(name, **TIMM_MODELS[name]))
    before = torch.get_rng_state()
    save(model, tmp_path / "model")
    load(tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), before)


def test_parameters_wait_on_meta_inside_building_only(saved: Path) -> None:
    plan = plan_of(load(saved))
    assert plan is not None
    shell = build_shell(plan, Limits.of_stored([(1 << 20,)], 100))
    assert all(parameter.is_meta for parameter in shell.parameters())
    assert not nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize(("option", "value"), [("dtype", "int8"), ("dtype", torch.int64), ("device", "nowhere"), ("device", "cuda:77")])
def test_options_that_there_are_not(option: str, value: object, saved: Path) -> None:
    with pytest.raises(OptionError, match=str(value)):
        load(saved, **{option: value})


def test_images_differ() -> None:
    assert not torch.equal(images(small_model())[0], images(small_model())[1])
