"""What is loaded gives bit-equal outputs, whatever the model, the dtype and the way, of which timm's own calls and the hub are some."""

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import timm.models._hub
import torch
from torch import nn
from vit_pytorch import ViT

from flysurgery.checkpoint import build_base, load, load_dense, push_to_hub, save
from flysurgery.checkpoint.files import FILES
from flysurgery.checkpoint.tensors import unstored_buffers
from flysurgery.errors import CheckpointError, OptionError
from flysurgery.surgery import densify, plan_of
from tests.checkpoint.conftest import (
    TIMM_MODELS,
    VIT_PYTORCH,
    Converted,
    images,
    install_random,
    outputs,
    read_weights,
    refused,
    rewrite_config,
)
from tests.support.models import VIT, vit

EVA = "eva02_tiny_patch14_224"
MODELS: dict[str, dict[str, Any]] = TIMM_MODELS | dict.fromkeys(("vit_pytorch:ViT", "vit_pytorch.deepvit:DeepViT"), VIT_PYTORCH)
TORCHVISION: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_layers": 1, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
MODELS["torchvision:VisionTransformer"] = TORCHVISION


def test_load_is_bit_equal_and_saves_to_the_same_files(converted: Converted, saved: Path, tmp_path: Path) -> None:
    loaded = load(saved)
    assert torch.equal(outputs(loaded), outputs(converted[0])) and plan_of(loaded) == plan_of(converted[0])
    assert not any(module.training for module in loaded.modules()) and all(each.requires_grad for each in loaded.parameters())
    save(loaded, tmp_path / "again")
    (tensors, metadata), (again, metadata_again) = read_weights(saved), read_weights(tmp_path / "again")
    assert metadata == metadata_again and list(tensors) == list(again)
    assert (tmp_path / "again" / "config.json").read_text() == (saved / "config.json").read_text()


def create(folder: Path, **arguments: Any) -> Any:
    """The model as timm opens it, in eval mode."""
    return timm.create_model(f"local-dir:{folder}", **{"pretrained": True, **arguments}).eval()


def check_round_trip(model: nn.Module, folder: Path) -> nn.Module:
    """Save and load the model, which gives the same outputs bit by bit."""
    save(model, folder / "model")
    loaded = load(folder / "model")
    assert torch.equal(outputs(loaded), outputs(model))
    return loaded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_families_with_buffers_and_switches_by_load_and_by_timm(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    arguments = MODELS[name]
    options = {} if name in TIMM_MODELS else {"base": name, "base_args": arguments}
    model = install_random(build_base(name, arguments), roles="ffn" if options else None, **options).to(dtype)
    before = torch.get_rng_state()
    check_round_trip(model, tmp_path)
    assert torch.equal(torch.get_rng_state(), before), "no random numbers are drawn"
    assert torch.equal(outputs(create(tmp_path / "model")), outputs(model))


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
    model, wide = install_random(vit()), torch.randn(3, 7, 32)
    model.head.weight = nn.Parameter(wide[1])
    model.norm.weight = nn.Parameter(wide[0, 0])
    model.norm.bias = nn.Parameter(wide[2].T[:, 1])
    check_round_trip(model, tmp_path)
    model.blocks[0].norm1.double()
    save(model, tmp_path / "mixed")
    found = load(tmp_path / "mixed").state_dict()
    assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in model.state_dict().items()}


def test_what_the_constructor_ties_stays_tied_and_what_was_tied_later_keeps_its_values(tmp_path: Path) -> None:
    model = install_random(vit())
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
    dense = vit()
    dense.pretrained_cfg["tag"] = "our_own"
    model = install_random(dense)
    assert plan_of(model).base == f"{VIT}.our_own"
    model.reset_classifier(4)
    model.set_input_size(img_size=(24, 16))
    loaded = check_round_trip(model, tmp_path)
    plan = plan_of(loaded)
    assert outputs(loaded).shape == (3, 4) and plan.base_args["num_classes"] == 4 and plan.base_args["img_size"] == [24, 16]
    assert plan.base == VIT, "a tag that timm does not publish is left out"


def test_data_description_survives(tmp_path: Path) -> None:
    dense = vit()
    own = {"mean": (0.1, 0.2, 0.3), "crop_pct": 0.75, "label_names": tuple("abcdefg"), "num_classes": 7}
    dense.pretrained_cfg = {**dense.pretrained_cfg, **own}
    save(install_random(dense), tmp_path / "model")
    for found in (load(tmp_path / "model").pretrained_cfg, create(tmp_path / "model").pretrained_cfg):
        assert {name: found[name] for name in own} == own and found["input_size"] == (3, 16, 16)
        assert not any(found.get(name) for name in ("url", "hf_hub_id", "file"))


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"dtype": torch.int64}, {"device": "nowhere"}, {"device": "cuda:77"}])
def test_options_that_there_are_not(options: dict[str, Any], converted: Converted, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=str(*options.values())):
        load(saved, **options)
    if "dtype" in options:
        with pytest.raises(OptionError, match=f"float16, bfloat16, float32, float64, got {options['dtype']}"):
            save(converted[0], tmp_path / "model", **options)


def test_timm_opens_it_with_other_arguments_input_sizes_and_heads(saved: Path, converted: Converted, tmp_path: Path) -> None:
    """A dense entry of the name of the head would get random layers throughout, and only a warning."""
    model = timm.create_model(f"local-dir:{saved}", pretrained=True)
    assert model.training, "timm's models start in training mode"
    dropping = create(saved, drop_path_rate=0.5, proj_drop_rate=0.25)
    assert dropping.blocks[1].drop_path1.drop_prob == 0.5 and dropping.blocks[0].mlp.drop1.p == 0.25
    for same in (model.eval(), dropping, create(saved, num_classes=7, img_size=(16, 16))):
        assert torch.equal(outputs(same), outputs(converted[0]))
    larger, model = create(saved, img_size=32), create(saved, num_classes=3)
    assert larger.patch_embed.img_size == (32, 32) and outputs(larger).shape == (3, 7)
    assert outputs(model).shape == (3, 3) and outputs(create(saved, num_classes=0)).shape == (3, 32)
    with torch.no_grad():
        assert torch.equal(*(each.forward_features(images(each)) for each in (model, converted[0])))
    save(model, tmp_path / "tuned", dtype="bfloat16")
    assert torch.equal(outputs(load(tmp_path / "tuned")), outputs(model.bfloat16()))
    assert outputs(create(tmp_path / "tuned", num_classes=4)).dtype == torch.bfloat16


FIT: list[tuple[dict[str, Any], str]] = [
    ({"embed_dim": 64}, "with {'embed_dim': 64}: .*the plan says 96x32, the model has 192x64"),
    ({"in_chans": 1}, r"cannot be loaded with {'in_chans': 1}: .*patch_embed.proj.weight is \[32, 3, 8, 8\] instead of \[32, 1"),
    ({"features_only": True, "out_indices": (0, 9)}, "cannot be built"),
]
"""Arguments that do not go with the weights."""

NEVER: list[tuple[dict[str, Any], str]] = [
    ({"nonsense": 1}, "nonsense"),
    ({"num_classes": -1}, "num_classes must be a whole number from 0"),
    ({"img_size": (0, 16)}, "img_size must be a positive whole number or two"),
    ({"img_size": 2.5}, "img_size=2.5 cannot be given"),
    ({"features_only": True, "out_indices": "abc"}, "cannot be"),
    ({"pretrained_cfg_overlay": {"mean": "red"}}, "pretrained_cfg of config.json cannot be used"),
]
"""Arguments that nothing can take, with weights or without."""


@pytest.mark.parametrize(("pretrained", "arguments", "fact"), [(True, *each) for each in FIT + NEVER] + [(False, *each) for each in NEVER])
def test_arguments_that_are_refused(pretrained: bool, arguments: dict[str, Any], fact: str, saved: Path) -> None:
    message = refused(saved, open_it=lambda folder: create(folder, pretrained=pretrained, **arguments))
    assert re.search(fact, message), message


def test_features_alone_and_a_model_without_weights(saved: Path, converted: Converted) -> None:
    wrapped, model = create(saved, features_only=True, out_indices=(0, 1)), converted[0]
    assert wrapped.feature_info.channels() == [32, 32]
    assert all(map(torch.equal, wrapped(images(model)), model.forward_intermediates(images(model), intermediates_only=True)))
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        drawn.append(create(saved, pretrained=False))
    assert drawn[0].state_dict().keys() == model.state_dict().keys()
    assert torch.equal(*map(outputs, drawn)) and bool(outputs(drawn[0]).isfinite().all())
    assert not torch.equal(drawn[0].blocks[0].mlp.fc1.factors[0], model.blocks[0].mlp.fc1.factors[0])


def test_what_timm_saves_is_opened(converted: Converted, tmp_path: Path) -> None:
    """Such a folder has no header: its plan is in ``config.json``."""
    model = copy.deepcopy(converted[0])
    model.reset_classifier(3)
    timm.models.save_for_hf(model, str(tmp_path / "timm"), safe_serialization=True)
    assert torch.equal(outputs(load(tmp_path / "timm")), outputs(model)) and torch.equal(outputs(create(tmp_path / "timm")), outputs(model))
    assert create(tmp_path / "timm", pretrained=False).num_classes == 3
    save(load(tmp_path / "timm"), tmp_path / "again")
    assert torch.equal(outputs(load(tmp_path / "again")), outputs(model))
    rewrite_config(tmp_path / "timm", lambda config: config["model_args"]["plan"].update(schema=7))
    refused(tmp_path / "timm", "this version reads plans of schema 1, got schema 7")
    timm.models.save_for_hf(model, str(tmp_path / "pickle"), safe_serialization=False)
    refused(tmp_path / "pickle", "pytorch_model.bin, a pickle, ", "save them with safe_serialization=True")
    densify(model)
    timm.models.save_for_hf(model, str(tmp_path / "dense"), safe_serialization=True)
    assert torch.equal(outputs(load_dense(tmp_path / "dense")[0]), outputs(model))
    with pytest.raises(CheckpointError, match="local-dir:DIR"):
        timm.create_model("flysurgery_structured", pretrained=True)


def test_from_the_hub_and_to_it(saved: Path, converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the hub's own transfers are replaced: a folder that was uploaded is opened by its repository's name."""
    asked: dict[str, Any] = {}

    def snapshot_download(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        return str(shutil.copytree(saved, tmp_path / "snapshot", dirs_exist_ok=True))

    def upload_folder(_: object, *, repo_id: str, folder_path: Path, commit_message: str) -> str:
        shutil.copytree(folder_path, tmp_path / "uploaded")
        return f"https://huggingface.co/{repo_id}/commit/1"

    def create_repo(api: huggingface_hub.HfApi, name: str, **options: Any) -> Any:
        assert api.token == "secret" and options == {"private": True, "exist_ok": True}
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{name}")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("401 Client Error.\nand a long story")

    expected, hub = outputs(converted[0]), huggingface_hub.HfApi
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(timm.models._hub, "download_from_hf", lambda *_, **__: saved / "config.json")
    assert torch.equal(outputs(timm.create_model("hf-hub:someone/vit@v2", pretrained=True).eval()), expected)
    assert (asked["repository"], asked["revision"], asked["allow_patterns"]) == ("someone/vit", "v2", list(FILES))
    assert torch.equal(outputs(load("hf-hub:someone/vit")), expected) and asked["revision"] is None
    for name, stand_in in (("create_repo", create_repo), ("upload_folder", upload_folder)):
        monkeypatch.setattr(hub, name, stand_in)
    address = push_to_hub(converted[0], "hf-hub:someone/vit", private=True, token="secret", dtype="float16")
    assert address == "https://huggingface.co/someone/vit/commit/1"
    assert torch.equal(outputs(load(tmp_path / "uploaded")), outputs(copy.deepcopy(converted[0]).half()))
    for owner, name in ((huggingface_hub, "snapshot_download"), (hub, "create_repo")):
        monkeypatch.setattr(owner, name, refuse)
    for call in (lambda: load("hf-hub:someone/vit@v2"), lambda: push_to_hub(converted[0], "someone/vit")):
        with pytest.raises(CheckpointError, match=r"someone/vit.*: 401 Client Error$"):
            call()


def test_vit_pytorch_keeps_head_and_size(tmp_path: Path) -> None:
    save(install_random(ViT(**VIT_PYTORCH), base="vit_pytorch:ViT", base_args=VIT_PYTORCH), tmp_path / "model")
    create(tmp_path / "model", num_classes=5)
    for arguments in ({"num_classes": 4}, {"img_size": 32}, {"features_only": True}):
        with pytest.raises(CheckpointError, match=next(iter(arguments))):
            create(tmp_path / "model", **arguments)
