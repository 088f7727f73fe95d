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

from flysurgery.checkpoint import build_base, load, save
from flysurgery.checkpoint.tensors import unstored_buffers
from flysurgery.errors import OptionError
from flysurgery.surgery import plan_of
from tests.checkpoint.conftest import BASE, TIMM_MODELS, VIT_PYTORCH, Converted, install_random, outputs, read_weights, small_model

EVA = "eva02_tiny_patch14_224"


def test_load_is_bit_equal_and_saves_to_the_same_files(converted: Converted, saved: Path, tmp_path: Path) -> None:
    loaded = load(saved)
    assert torch.equal(outputs(loaded), outputs(converted[0]))
    assert not any(module.training for module in loaded.modules())
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert plan_of(loaded) == plan_of(converted[0])
    save(loaded, tmp_path / "again")
    (tensors, metadata), (again, metadata_again) = read_weights(saved), read_weights(tmp_path / "again")
    assert metadata == metadata_again
    assert list(tensors) == list(again) and all(torch.equal(tensors[name], again[name]) for name in tensors)
    configs = [json.loads((each / "config.json").read_text()) for each in (tmp_path / "again", saved)]
    assert configs[0] == configs[1]


def check_round_trip(model: nn.Module, folder: Path) -> nn.Module:
    """Save and load the model, which gives the same outputs bit by bit."""
    save(model, folder / "model")
    loaded = load(folder / "model")
    assert torch.equal(outputs(loaded), outputs(model))
    return loaded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*TIMM_MODELS, "vit_pytorch:ViT", "vit_pytorch.deepvit:DeepViT"])
def test_families_with_buffers_and_switches_by_load_and_by_timm(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    arguments = TIMM_MODELS.get(name, VIT_PYTORCH)
    options = {} if name in TIMM_MODELS else {"base": name, "base_args": arguments}
    model = install_random(build_base(name, arguments), roles="ffn" if options else None, **options).to(dtype)
    before = torch.get_rng_state()
    check_round_trip(model, tmp_path)
    assert torch.equal(torch.get_rng_state(), before), "no random numbers are drawn"
    assert torch.equal(outputs(timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()), outputs(model))


@pytest.mark.parametrize(("dtype", "listed"), [("float16", "F16"), ("bfloat16", "BF16"), ("float64", "F64")])
def test_another_dtype_equals_the_model_in_that_dtype(dtype: str, listed: str, converted: Converted, tmp_path: Path) -> None:
    save(converted[0], tmp_path / "model", dtype=dtype)
    expected = copy.deepcopy(converted[0]).to(getattr(torch, dtype))
    loaded = load(tmp_path / "model")
    assert {tensor.dtype for tensor in loaded.state_dict().values()} == {getattr(torch, dtype)}
    assert {entry[0] for entry in json.loads(read_weights(tmp_path / "model")[1]["tensors"]).values()} == {listed}
    assert torch.equal(outputs(loaded), outputs(expected))
    assert torch.equal(outputs(load(tmp_path / "model", dtype="float32")), outputs(expected.float()))


def test_mixed_dtypes_and_views_are_kept_without_their_neighbours(tmp_path: Path) -> None:
    model, wide = install_random(small_model()), torch.randn(3, 7, 32)
    model.head.weight = nn.Parameter(wide[1])
    model.norm.weight = nn.Parameter(wide[0, 0])
    model.norm.bias = nn.Parameter(wide[2].T[:, 1])
    check_round_trip(model, tmp_path)
    model.blocks[0].norm1.double()
    save(model, tmp_path / "mixed")
    found = load(tmp_path / "mixed").state_dict()
    assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in model.state_dict().items()}


def test_what_the_constructor_ties_stays_tied_and_what_was_tied_later_keeps_its_values(tmp_path: Path) -> None:
    model = install_random(small_model())
    model.blocks[1].norm1 = model.blocks[0].norm1
    loaded = check_round_trip(model, tmp_path)
    assert loaded.blocks[1].norm1.bias is not loaded.blocks[0].norm1.bias
    shape: dict[str, Any] = {"img_size": 32, "embed_dims": [16] * 4, "serial_depths": [1] * 4, "parallel_depth": 1, "num_heads": 8}
    coat = install_random(timm.create_model("coat_tiny", **shape))
    save(coat, tmp_path / "coat")
    loaded = load(tmp_path / "coat")
    assert all(map(torch.equal, loaded.state_dict().values(), coat.state_dict().values()))
    assert loaded.parallel_blocks[0].mlp2.fc1 is loaded.parallel_blocks[0].mlp4.fc1


def test_buffers_that_construction_would_not_give_are_stored(tmp_path: Path) -> None:
    model = install_random(timm.create_model(EVA, **TIMM_MODELS[EVA]))
    save(model, tmp_path / "plain")
    assert "rope.pos_embed" not in read_weights(tmp_path / "plain")[0]
    table = unstored_buffers(model)["rope.pos_embed"]
    table[0, 0] = torch.nextafter(table[0, 0], torch.tensor(9.0))
    assert torch.equal(unstored_buffers(check_round_trip(model, tmp_path))["rope.pos_embed"], table)


def test_what_was_changed_after_construction_is_followed(tmp_path: Path) -> None:
    dense = small_model()
    dense.pretrained_cfg["tag"] = "our_own"
    model = install_random(dense)
    assert plan_of(model).base == f"{BASE}.our_own"
    model.reset_classifier(4)
    model.set_input_size(img_size=(24, 16))
    loaded = check_round_trip(model, tmp_path)
    plan = plan_of(loaded)
    assert outputs(loaded).shape == (3, 4) and plan.base_args["num_classes"] == 4 and plan.base_args["img_size"] == [24, 16]
    assert plan.base == BASE, "a tag that timm does not publish is left out"


def test_data_description_survives(tmp_path: Path) -> None:
    dense = small_model()
    own = {"mean": (0.1, 0.2, 0.3), "crop_pct": 0.75, "label_names": tuple("abcdefg"), "num_classes": 7}
    dense.pretrained_cfg = {**dense.pretrained_cfg, **own}
    save(install_random(dense), tmp_path / "model")
    for loaded in (load(tmp_path / "model"), timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True)):
        found = loaded.pretrained_cfg
        assert {name: found[name] for name in own} == own and found["input_size"] == (3, 16, 16)
        assert not {"url", "hf_hub_id", "file"} & {name for name, value in found.items() if value}


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"dtype": torch.int64}, {"device": "nowhere"}, {"device": "cuda:77"}])
def test_options_that_there_are_not(options: dict[str, Any], converted: Converted, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=str(*options.values())):
        load(saved, **options)
    if "dtype" in options:
        with pytest.raises(OptionError, match=f"float16, bfloat16, float32, float64, got {options['dtype']}"):
            save(converted[0], tmp_path / "model", **options)
