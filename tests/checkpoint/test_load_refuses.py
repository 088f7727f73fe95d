"""Damaged and forged folders: one sentence each, with what was expected and what came, and nothing is run or allocated."""

import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import flysurgery
from flysurgery.checkpoint import is_converted, load
from flysurgery.checkpoint.files import FILES
from tests.checkpoint.conftest import CONFIG_FILE, WEIGHTS_FILE, forge, outputs, refused, rewrite, rewrite_config, sha256

FC1_LAYER = "blocks.0.mlp.fc1"
FC1 = f"{FC1_LAYER}.factors.0"
NORM = "blocks.0.norm1.weight"


def relist(header: dict[str, str], tensors: str) -> None:
    header.update(tensors=tensors, tensors_sha256=sha256(tensors))


def put(name: str, tensor: torch.Tensor | None = None, dtype: torch.dtype | None = None) -> Any:
    """Put a tensor into the file under a name, or give the one that is there another dtype."""
    return lambda tensors, _: tensors.update({name: tensors[name].to(dtype) if tensor is None else tensor})


WEIGHTS: list[tuple[Any, list[str]]] = [
    (lambda _, header: header.update({"flysurgery.schema": "2", "version": "9.1"}), ["schema 2", "schema 1", "flysurgery 9.1"]),
    (lambda _, header: [header.pop(name) for name in ("plan_sha256", "tensors_sha256")], ["damaged", "no plan_sha256, tensors_sha256"]),
    (lambda _, header: header.update(plan_sha256="0" * 64), ["config.json does not match model.safetensors"]),
    (lambda _, header: header.update(tensors=header["tensors"].replace('"F32"', '"F16"', 1)), ["tensors_sha256 does not match"]),
    (lambda _, header: relist(header, "{"), ["its tensors are no JSON"]),
    (lambda _, header: relist(header, '{"a": ["F32", 3]}'), ["its tensors do not map names to dtypes and hashes"]),
    (put(NORM, dtype=torch.float16), [f"its header lists {NORM} as torch.float32, and it is torch.float16"]),
    (lambda tensors, _: tensors[NORM].view(torch.uint8)[5].bitwise_xor_(1), [f"the data of {NORM} do not match", "verify=False"]),
    (lambda tensors, _: (tensors.pop(FC1), tensors.pop("head.bias")), ["does not fit its plan", f"2 missing: {FC1}, head.bias"]),
    (lambda tensors, _: tensors.update({f"odd{n}": torch.zeros(1) for n in range(5)}), ["5 unknown: odd0, odd1, odd2, ..."]),
    (put(FC1, torch.zeros(1, 2, 3, 4)), [f"1 of another shape: {FC1} is [1, 2, 3, 4] instead of [1, 32, 8, 4]"]),
    (put(FC1, dtype=torch.int32), [FC1, "torch.int32 instead of torch.float32"]),
    (put(FC1, dtype=torch.float8_e4m3fn), [FC1, "F8_E4M3"]),
    (lambda _, header: header.pop("flysurgery.schema"), ["no flysurgery checkpoint", "flysurgery.schema"]),  # not taken for one of timm's
    (lambda _, header: relist(header, header["tensors"].replace(NORM, "stranger")), [f"its header lists {NORM} as None"]),
]


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("import flysurgery; flysurgery.went_off = True",))


FILES_DAMAGED: list[tuple[str, Any, list[str]]] = [
    (WEIGHTS_FILE, lambda whole: whole[:-100], ["no safetensors file", "cut short"]),
    (WEIGHTS_FILE, lambda _: (1 << 60).to_bytes(8, "little") + b"{}", ["no safetensors file", "header too large"]),
    (WEIGHTS_FILE, lambda _: pickle.dumps(Bomb()), ["holds a pickle", "never opened"]),
    (WEIGHTS_FILE, None, ["there is no", "model.safetensors"]),
    (CONFIG_FILE, None, ["no checkpoint", "no config.json"]),
    (CONFIG_FILE, lambda _: b"[" * 100_000, ["config.json cannot be read as JSON", "nested too deeply"]),
    (CONFIG_FILE, lambda _: b"[1, 2]", ["names no architecture"]),
]


@pytest.mark.parametrize(("name", "content", "facts"), FILES_DAMAGED)
def test_damaged_files(name: str, content: Callable[[bytes], bytes] | None, facts: list[str], folder: Path) -> None:
    file = folder / name
    file.unlink() if content is None else file.write_bytes(content(file.read_bytes()))
    refused(folder, *facts)
    assert is_converted(folder), "a damaged checkpoint is one"
    assert not hasattr(flysurgery, "went_off")


FORGERIES: list[tuple[Any, list[str]]] = [
    (lambda plan: plan.update(base="deit_tiny_distilled_patch16_224"), ["does not fit its plan", "missing: dist_token"]),
    (lambda plan: plan["base_args"].update(checkpoint_path="/etc/passwd"), ["may not set checkpoint_path"]),
    (lambda plan: [each.update(fqn="norm") for each in plan["layers"] if each["fqn"] == FC1_LAYER], ["norm", "expected an nn.Linear"]),
    (lambda plan: plan.update(layers=3), ["layers"]),
]
"""Changes of the plan, with a hash that matches."""

CONFIGS: list[tuple[Any, list[str]]] = [
    (lambda config: config["model_args"].update(num_classes=3), ["does not match model.safetensors"]),
    (lambda config: config["model_args"].update(plan=3), ["a plan that cannot be used"]),
    (lambda config: config["pretrained_cfg"].update(mean="red"), ["pretrained_cfg of config.json cannot be used"]),
]


CHANGES = [(edit, *case) for edit, cases in ((rewrite, WEIGHTS), (forge, FORGERIES), (rewrite_config, CONFIGS)) for case in cases]


@pytest.mark.parametrize(("edit", "change", "facts"), CHANGES)
@pytest.mark.parametrize("open_it", [load, lambda folder: timm.create_model(f"local-dir:{folder}", pretrained=True)])
def test_what_was_changed_is_named(edit: Any, change: Any, facts: list[str], open_it: Any, folder: Path) -> None:
    edit(folder, change)
    message = refused(folder, *facts, open_it=open_it)
    if "verify=False" in message:
        load(folder, verify=False)


def test_is_converted(folder: Path, tmp_path: Path) -> None:
    assert is_converted(folder) and not is_converted("no\0name")
    refused(tmp_path / "nowhere", f"there is no folder {tmp_path / 'nowhere'}")
    assert not is_converted(tmp_path) and not is_converted(tmp_path / "nowhere") and not is_converted(folder / "config.json")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224"}))
    assert not is_converted(tmp_path)


def endless(start: bytes) -> Callable[[Path], object]:
    return lambda file: (file.write_bytes(start), os.truncate(file, 3 << 30))


SPECIAL: list[tuple[Callable[[Path], object], str, str]] = [
    *((os.mkfifo, name, "is a pipe, expected a regular file") for name in (CONFIG_FILE, WEIGHTS_FILE)),
    (lambda file: file.symlink_to("/dev/zero"), WEIGHTS_FILE, "is a device, expected a regular file"),
    (Path.mkdir, WEIGHTS_FILE, "is a folder, expected a regular file"),
    (endless(b""), CONFIG_FILE, "has 3,221,225,472 bytes, and at most 4,194,304 are read"),
    (endless((90 << 20).to_bytes(8, "little") + b'{"a'), WEIGHTS_FILE, "a header of 94,371,840 bytes, and at most 4,194,304 are read"),
    (lambda file: file.symlink_to(file), CONFIG_FILE, "config.json cannot be read: Too many levels of symbolic links"),
]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
@pytest.mark.parametrize(("make", "name", "fact"), SPECIAL)
def test_special_files_are_never_read(make: Callable[[Path], object], name: str, fact: str, folder: Path) -> None:
    """Pipes, devices, folders and endless files in the place of one file, and of both."""
    (folder / name).unlink()
    make(folder / name)
    start = time.perf_counter()
    refused(folder, fact, name)
    assert is_converted(folder), "the other file says so"
    other = folder / (CONFIG_FILE if name == WEIGHTS_FILE else WEIGHTS_FILE)
    other.unlink()
    make(other)
    assert not is_converted(folder)
    assert time.perf_counter() - start < 1


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pipes")
def test_links_are_followed_and_what_loading_does_not_need_is_not_read(folder: Path, tmp_path: Path) -> None:
    """The hub's cache keeps its files as links; ``pretrained_cfg`` describes images, and where weights lie is not followed."""
    expected = outputs(load(folder))
    rewrite_config(folder, lambda config: config["pretrained_cfg"].update(url="http://localhost/x", strange=[1], custom_load=True))
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in FILES:
        if name in ("config.json", "model.safetensors"):
            (linked / name).symlink_to(folder / name)
        else:
            os.mkfifo(linked / name)
    found = load(linked)
    assert torch.equal(outputs(found), expected) and "strange" not in found.pretrained_cfg
    assert not found.pretrained_cfg.get("url") and not found.pretrained_cfg.get("custom_load")
