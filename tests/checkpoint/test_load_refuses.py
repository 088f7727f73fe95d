"""Damaged and forged folders: one sentence each, with what was expected and what came, and nothing is run or allocated."""

from __future__ import annotations

import importlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from flysurgery.checkpoint import is_converted, load
from flysurgery.errors import CheckpointError
from tests.checkpoint.tamper import forge, read_weights, rewrite, rewrite_config, rewrite_listed

FC1 = "blocks.0.mlp.fc1.factors.0"


def change_schema(folder: Path) -> None:
    rewrite(folder, lambda _, metadata: metadata.update({"flysurgery.schema": "2", "version": "9.1"}))


def drop_metadata(folder: Path) -> None:
    rewrite(folder, lambda _, metadata: metadata.clear())


def drop_hash(folder: Path) -> None:
    rewrite(folder, lambda _, metadata: metadata.pop("plan_sha256"))


def change_plan(folder: Path) -> None:
    rewrite(folder, lambda _, metadata: metadata.update(plan=metadata["plan"].replace("ffn_in", "ffn_to")))


def change_base(folder: Path) -> None:
    rewrite(folder, lambda _, metadata: metadata.update(base="vit_small_patch16_224"))


def change_base_hash(folder: Path) -> None:
    rewrite(folder, lambda _, metadata: metadata.update(base_sha256="0" * 64))


def break_aliases(folder: Path) -> None:
    rewrite_listed(folder, lambda _, metadata: metadata.update(aliases="{"))


def list_aliases(folder: Path) -> None:
    rewrite_listed(folder, lambda _, metadata: metadata.update(aliases='["norm.weight"]'))


def alias_to_nothing(folder: Path) -> None:
    def change(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        del tensors["norm.weight"]
        metadata["aliases"] = '{"norm.weight": "nowhere"}'

    rewrite_listed(folder, change)


def drop_tensors(folder: Path) -> None:
    rewrite(folder, lambda tensors, _: (tensors.pop(FC1), tensors.pop("head.bias")))


def add_tensors(folder: Path) -> None:
    rewrite(folder, lambda tensors, _: tensors.update({f"stranger{n}": torch.zeros(1) for n in range(5)}))


def add_dense_weight(folder: Path) -> None:
    rewrite(folder, lambda tensors, _: tensors.update({"blocks.0.mlp.fc1.weight": torch.zeros(128, 32)}))


def reshape_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors, _: tensors.update({FC1: torch.zeros(1, 2, 3, 4)}))


def flatten_factor(folder: Path) -> None:
    rewrite(folder, lambda tensors, _: tensors.update({FC1: tensors[FC1].flatten()}))


def integer_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors, _: tensors.update({FC1: tensors[FC1].to(torch.int32)}))


def float8_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors, _: tensors.update({FC1: tensors[FC1].to(torch.float8_e4m3fn)}))


def cut_short(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])


def cut_header(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:100])


def empty_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def endless_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")


def torch_file(folder: Path) -> None:
    torch.save(read_weights(folder)[0], folder / "model.safetensors")


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("import flysurgery; flysurgery.went_off = True",))


def bare_pickle(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb()))


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"architecture": ')


def binary_config(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")


def nested_config(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)


def list_config(folder: Path) -> None:
    (folder / "config.json").write_text("[1, 2]")


def dense_config(folder: Path) -> None:
    rewrite_config(folder, lambda config: config.update(architecture="vit_tiny_patch16_224"))


def other_plan_in_config(folder: Path) -> None:
    rewrite_config(folder, lambda config: config["model_args"]["plan"]["layers"].pop())


def text_for_pretrained_cfg(folder: Path) -> None:
    rewrite_config(folder, lambda config: config.update(pretrained_cfg="timm/vit"))


@pytest.mark.parametrize(
    ("damage", "facts"),
    [
        (change_schema, ["schema 2", "schema 1", "flysurgery 9.1"]),
        (drop_metadata, ["no flysurgery checkpoint", "flysurgery.schema"]),
        (drop_hash, ["damaged", "no plan_sha256"]),
        (change_plan, ["plan_sha256 does not match"]),
        (change_base, ["base or base_sha256 does not match"]),
        (change_base_hash, ["base or base_sha256 does not match"]),
        (break_aliases, ["aliases are no JSON"]),
        (list_aliases, ["aliases do not map names to names"]),
        (alias_to_nothing, ["norm.weight a second name of nowhere"]),
        (drop_tensors, ["does not fit its plan", f"2 missing: {FC1}, head.bias"]),
        (add_tensors, ["5 unknown: stranger0, stranger1, stranger2, ..."]),
        (add_dense_weight, ["1 unknown: blocks.0.mlp.fc1.weight"]),
        (reshape_tensor, [f"1 of another shape: {FC1} is [1, 2, 3, 4] instead of [1, 32, 8, 4]"]),
        (flatten_factor, ["is [1024] instead of [1, 32, 8, 4]"]),
        (integer_tensor, [FC1, "torch.int32 instead of torch.float32"]),
        (float8_tensor, [FC1, "F8_E4M3"]),
        (cut_short, ["no safetensors file", "cut short"]),
        (cut_header, ["no safetensors file", "100 bytes"]),
        (empty_file, ["no safetensors file", "0 bytes"]),
        (endless_header, ["no safetensors file", "header too large"]),
        (torch_file, ["holds a pickle", "never opened"]),
        (bare_pickle, ["holds a pickle", "never opened"]),
        (remove_weights, ["there is no", "model.safetensors"]),
        (remove_config, ["no checkpoint", "no config.json"]),
        (break_config, ["config.json cannot be read as JSON"]),
        (binary_config, ["config.json cannot be read as JSON"]),
        (nested_config, ["config.json cannot be read as JSON", "nested too deeply"]),
        (list_config, ["names no architecture"]),
        (dense_config, ["vit_tiny_patch16_224", "expected 'flysurgery_structured'"]),
        (other_plan_in_config, ["does not match model.safetensors", "plan differ"]),
        (text_for_pretrained_cfg, ["'pretrained_cfg' must be an object"]),
    ],
)
def test_damage(damage: Callable[[Path], None], facts: list[str], folder: Path) -> None:
    damage(folder)
    message = refused(folder)
    assert all(fact in message for fact in facts), message


def set_entry(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda plan: plan.update({name: value})


def set_argument(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda plan: plan["base_args"].update({name: value})


def set_layer(**entries: Any) -> Callable[[dict[str, Any]], None]:
    return lambda plan: next(layer for layer in plan["layers"] if layer["fqn"] == "blocks.0.mlp.fc1").update(entries)


def huge_factor(plan: dict[str, Any]) -> None:
    layer = next(layer for layer in plan["layers"] if layer["fqn"] == "blocks.0.mlp.fc1")
    layer["parts"][0]["architecture"] = [[1, 1 << 40, 8, 4], [4, 8, 8, 1]]


@pytest.mark.parametrize(
    ("forgery", "facts"),
    [
        (set_entry("base", "os:system"), ["vit_pytorch:CLASS", "'os:system'"]),
        (set_entry("base", "vit_pytorch.vit:rearrange"), ["vit_pytorch.vit has no model class 'rearrange'"]),
        (set_entry("base", "vit_pytorch.vit:nn"), ["no model class 'nn'"]),
        (set_entry("base", "vit_pytorch.vit:Rearrange"), ["no model class 'Rearrange'"]),
        (set_entry("base", "vit_pytorch.nowhere:ViT"), ["vit_pytorch.nowhere cannot be imported"]),
        (set_entry("base", "vit_pytorch.vit.__builtins__:ViT"), ["vit_pytorch:CLASS"]),
        (set_entry("base", "../evil"), ["no model '"]),
        (set_entry("base", "hf-hub:someone/model"), ["vit_pytorch:CLASS"]),
        (set_entry("base", "flysurgery_structured"), ["no model 'flysurgery_structured'"]),
        (set_entry("base", "resnet9999"), ["no model 'resnet9999'"]),
        (set_entry("base", "vit_tiny_patch16_224.nonesuch"), ["no weights 'nonesuch'"]),
        (set_entry("base", "deit_tiny_distilled_patch16_224"), ["does not fit its plan", "missing: dist_token"]),
        (set_argument("pretrained", True), ["may not set pretrained"]),
        (set_argument("checkpoint_path", "/etc/passwd"), ["may not set checkpoint_path"]),
        (set_argument("pretrained_cfg", {"url": "http://localhost"}), ["may not set pretrained_cfg"]),
        (set_argument("embed_dim", 10**30), ["embed_dim must be a number of at most"]),
        (set_argument("depth", "two"), ["vit_tiny_patch16_224", "cannot be built"]),
        (set_argument("depth", 3), ["missing: blocks.2"]),
        (set_argument("nonsense", 3), ["cannot be built", "nonsense"]),
        (set_layer(in_features=10**12), ["blocks.0.mlp.fc1", "sizes must lie between"]),
        (set_layer(in_features=64), ["blocks.0.mlp.fc1"]),
        (set_layer(fqn="blocks.7.mlp.fc1"), ["blocks.7.mlp.fc1", "no module of that name"]),
        (set_layer(fqn="norm"), ["norm", "expected an nn.Linear"]),
        (set_layer(parts=[]), ["blocks.0.mlp.fc1", "parts must tile"]),
        (huge_factor, ["no side may exceed"]),
        (set_entry("switches", [["blocks.0", "__class__", "x"]]), ["switch"]),
        (set_entry("schema", 7), ["schema 7"]),
        (set_entry("layers", 3), ["layers"]),
    ],
)
def test_forged_plan_with_matching_hashes(forgery: Callable[[dict[str, Any]], None], facts: list[str], folder: Path) -> None:
    forge(folder, forgery)
    message = refused(folder)
    assert all(fact in message for fact in facts), message


def test_absurd_base_is_refused_before_memory_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A width of 2^24 would take terabytes; on meta it takes nothing, and no other building begins."""

    def build(plan: object) -> None:
        raise AssertionError("the model was built for real")

    # The room's face has a function of the module's name, so the module is asked for by its full name.
    monkeypatch.setattr(importlib.import_module("flysurgery.checkpoint.load"), "build_shell", build)
    forge(folder, set_argument("embed_dim", 1 << 24))
    assert "blocks.0" in refused(folder)


def test_a_pickle_is_not_run(folder: Path) -> None:
    import flysurgery

    bare_pickle(folder)
    refused(folder)
    assert not hasattr(flysurgery, "went_off")


def test_unknown_settings_of_the_data_do_no_harm(folder: Path) -> None:
    """``pretrained_cfg`` describes images; what else it says, where weights lie for example, is not followed."""
    rewrite_config(folder, lambda config: config["pretrained_cfg"].update(url="http://localhost/x", strange=[1], custom_load=True))
    found = load(folder).pretrained_cfg
    assert "strange" not in found and not found.get("url") and not found.get("custom_load")


@pytest.mark.parametrize("missing", ["nowhere", "nowhere/deeper"])
def test_no_folder(missing: str, tmp_path: Path) -> None:
    assert f"there is no folder {tmp_path / missing}" in refused(tmp_path / missing)


def test_timm_gives_the_same_refusals(folder: Path) -> None:
    drop_tensors(folder)
    with pytest.raises(CheckpointError, match="2 missing"):
        timm.create_model(f"local-dir:{folder}", pretrained=True)


def test_is_converted(folder: Path, tmp_path: Path) -> None:
    assert is_converted(folder)
    cut_short(folder)
    assert is_converted(folder), "a damaged checkpoint is one"
    dense_config(folder)
    assert not is_converted(folder)
    assert not is_converted(tmp_path) and not is_converted(tmp_path / "nowhere") and not is_converted(folder / "config.json")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224"}))
    assert not is_converted(tmp_path)


def refused(folder: Path) -> str:
    """The one sentence with which loading is refused."""
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600, message
    return message
