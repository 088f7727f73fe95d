"""Saving: a folder appears complete or not at all, only a checkpoint is replaced, and the card claims no more than is known."""

import errno
import importlib
import json
import math
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError
from torch import nn

from flysurgery.checkpoint import build_base, check_folder, load, save, save_dense, vouch_for_weights
from flysurgery.checkpoint.config import PROCESSOR
from flysurgery.checkpoint.files import FILES, new_folder
from flysurgery.errors import CheckpointError
from flysurgery.fidelity import Fidelity
from flysurgery.surgery import convert
from tests.checkpoint.conftest import VIT_PYTORCH, Converted, install_random, read_weights, sha256, snapshot
from tests.support.models import VIT, VIT_ARGUMENTS, vit
from tests.support.processes import kills, run_apart

# The package has a function of the module's name, so the module is asked for by its full name.
SAVE = importlib.import_module("flysurgery.checkpoint.save")


def test_what_is_written(converted: Converted, saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == {*FILES} - {PROCESSOR} and [*saved.parent.iterdir()] == [saved]
    assert len({stat.S_IMODE(path.stat().st_mode) for path in saved.iterdir()}) == 1, "safetensors alone would make its file private"
    tensors, metadata = read_weights(saved)
    assert metadata["format"] == "pt" and metadata["flysurgery.schema"] == "1"
    assert tensors.keys() == converted[0].state_dict().keys()


def test_missing_parents_are_made_an_empty_folder_is_filled_and_a_link_followed(converted: Converted, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty", target_is_directory=True)
    for name in ("a/b/model", "empty", "link"):
        save(converted[0], tmp_path / name, force=name == "link")
        load(tmp_path / name)
    assert (tmp_path / "link").is_symlink()


NO_CHECKPOINT, EXISTS = "no flysurgery checkpoint", "exists; give force=True"


@pytest.mark.parametrize(
    ("name", "force", "fact"),
    [
        *((name, True, "the folder that this runs in") for name in (".", "", "..")),
        *(("model", False, EXISTS), ("mine", True, r"also holds thesis\.tex")),
        *((name, True, NO_CHECKPOINT) for name in ("notes", "only", "both")),
        *(("file", True, "is a file"), ("file/model", True, "could not be written"), ("/", True, "a name of its own")),
        *((name, True, "could not be written: .*; choose another folder") for name in ("~nobody of that name/m", "a\0b", "a\udcffb")),
    ],
)
def test_what_is_no_checkpoint_stays_and_a_checkpoint_needs_force(
    name: str, force: bool, fact: str, converted: Converted, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "a" / "home"
    for copy in ("model", "mine"):
        shutil.copytree(saved, home / copy)
    for file in ("file", "mine/thesis.tex", "notes/notes.txt", "only/config.json", "both/config.json", "both/model.safetensors"):
        (home / file).parent.mkdir(exist_ok=True)
        (home / file).write_text("{}")
    monkeypatch.chdir(home)
    inside, before = home.stat().st_ino, snapshot(tmp_path)
    with pytest.raises(CheckpointError, match=fact):
        save(converted[0], name, force=force)
    assert home.stat().st_ino == inside and snapshot(tmp_path) == before


def test_force_replaces_a_checkpoint_though_it_is_damaged(folder: Path) -> None:
    other = install_random(vit())
    with pytest.raises(CheckpointError, match=EXISTS):
        check_folder(folder)
    assert check_folder(folder, force=True) == folder.resolve()
    (folder / "model.safetensors").write_bytes(b"cut")
    save(other, folder, force=True)
    assert list(folder.parent.iterdir()) == [folder]
    assert load(folder).state_dict()["head.bias"].equal(other.state_dict()["head.bias"])


FULL, REFUSED = OSError(errno.ENOSPC, "No space left on device"), PermissionError(errno.EACCES, "Permission denied")
FAILURES: list[tuple[Any, str, int, BaseException, str | None]] = [
    (SAVE, "save_file", 1, FULL, "No space left on device"),
    (SAVE, "save_file", 1, SafetensorError("I/O error: No space left on device (os error 28)"), "No space left"),
    (SAVE, "save_file", 1, KeyboardInterrupt(), None),
    (os, "fsync", 1, OSError(errno.EIO, "Input/output error"), "Input/output error"),
    (Path, "rename", 1, REFUSED, "Permission denied; nothing was changed"),
    (Path, "rename", 2, REFUSED, "Permission denied; nothing was changed"),  # which only replacing takes
]
"""What fails, at which call, and how."""


@pytest.mark.parametrize(("force", "failure"), [(force, each) for force in (False, True) for each in FAILURES if force or each[2] == 1])
def test_a_failure_leaves_all_as_it_was(
    force: bool, failure: Any, converted: Converted, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, call, error, fact = failure
    calls, real = count(1), getattr(owner, name)

    def fails(*given: Any, **options: Any) -> Any:
        if next(calls) == call:
            raise error
        return real(*given, **options)

    target = folder if force else folder.parent / "new" / "deeper" / "model"
    before, siblings = snapshot(folder), sorted(folder.parent.iterdir())
    monkeypatch.setattr(owner, name, fails)
    with pytest.raises(CheckpointError if isinstance(error, Exception) else type(error), match=fact):
        save(converted[0], target, force=force)
    assert snapshot(folder) == before
    assert sorted(folder.parent.iterdir()) == siblings, "something was left behind"


def test_too_little_space_or_permission_is_seen_before(converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=r"needs 1\.\d MB and .* has 0\.0 MB left"):
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        save(converted[0], tmp_path / "a" / "model")
    if os.name != "nt" and os.geteuid():  # an administrator may write everywhere
        tmp_path.chmod(0o500)
        with pytest.raises(CheckpointError, match="Permission denied"):
            save(converted[0], tmp_path / "model")
        tmp_path.chmod(0o700)
    assert not any(tmp_path.iterdir())


def test_of_two_that_write_one_folder_the_later_is_refused(folder: Path) -> None:
    before = snapshot(folder)
    other = folder.with_name("other")
    with pytest.raises(CheckpointError, match="written by another process meanwhile"), new_folder(other, force=False) as fresh:
        (fresh / "config.json").write_text("later")
        folder.rename(other)
    assert snapshot(other) == before and list(folder.parent.iterdir()) == [other]


def test_what_a_killed_save_left_goes_with_the_next_one(tmp_path: Path) -> None:
    target, left, neighbour = (tmp_path / name for name in ("model[1]", ".model[1].00000000.new", ".model[1]x.00000000.new"))
    left.mkdir()
    neighbour.mkdir()
    with new_folder(target, force=False) as fresh:
        (fresh / "file").write_text("whole")
    assert sorted(tmp_path.iterdir()) == [neighbour, target] and (target / "file").read_text() == "whole"


def changed(change: Callable[[Any], object], model: nn.Module | None = None) -> nn.Module:
    model = model or install_random(vit())
    change(model)
    return model


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (vit, ["not converted"]),
        (lambda: install_random(vit()).to("meta"), ["meta device"]),
        (lambda: install_random(changed(lambda model: setattr(model, "pretrained_cfg", {}), vit())), ["base=", "base_args="]),
        (lambda: install_random(vit(), base=VIT, base_args={}), ["the plan says 96x32, the model has 576x192", "base_args="]),
        (lambda: install_random(vit(), base=VIT, base_args=VIT_ARGUMENTS | {"depth": 3}), ["missing: blocks.2"]),
        (lambda: install_random(vit(), base="vit_pytorch:ViT", base_args={}), ["vit_pytorch:ViT cannot be built"]),
        (lambda: changed(lambda model: model.norm.register_buffer("scale", torch.ones(2), persistent=False)), ["buffers", "norm.scale"]),
        (lambda: changed(lambda model: setattr(model, "norm", nn.LayerNorm(32, elementwise_affine=False))), ["norm.weight"]),
        (lambda: changed(lambda model: nn.init.constant_(model.head.weight, 1e6)), ["head.weight", "float16"]),
    ],
)
def test_what_could_not_be_loaded_again_is_not_saved(make: Callable[[], nn.Module], facts: list[str], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        save(make(), tmp_path / "model", dtype="float16")
    message = str(caught.value)
    assert not any(tmp_path.iterdir()) and "\n" not in message and len(message) < 800, message
    assert all(fact in message for fact in facts), message


def content(folder: Path) -> str:
    """The hash of all files; of the weights' header no order, in which safetensors writes its entries at random."""
    files = snapshot(folder)
    weights = files.pop("model.safetensors", b"")
    end = 8 + int.from_bytes(weights[:8], "little")
    return sha256(repr((sorted(files.items()), json.dumps(json.loads(weights[8:end]), sort_keys=True), weights[end:])))


def write_and_be_killed(home: Path, replaces: bool) -> None:
    """A model is there as a whole or not at all; the old one stays until the new one is whole, and between two renames is beside."""
    target = home / "deep" / "model"
    old_model, new_model = (install_random(vit(depth=1, num_classes=classes)) for classes in (7, 8))
    contents = []
    for model in (new_model, old_model):
        save(model, target, force=True)
        contents.append(content(target))
    new, old = contents
    if not replaces:
        shutil.rmtree(target.parent)
    ends = []
    for _ in kills(lambda: save(new_model, target, force=replaces)):
        ends.append([old, new].index(content(target)) if target.exists() else 2)
        if replaces and ends[-1] == 2:
            assert old in [content(path) for path in target.parent.iterdir()]
        save(old_model, target, force=True)  # which removes what a killed one left
        assert content(target) == old and [*target.parent.iterdir()] == [target] and [*home.iterdir()] == [target.parent]
        if not replaces:
            shutil.rmtree(target.parent)
    assert {*ends} == ({0, 1, 2} if replaces else {1, 2})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
@pytest.mark.parametrize("replaces", [True, False])
def test_killed_at_any_moment(replaces: bool, tmp_path: Path) -> None:
    run_apart(write_and_be_killed, tmp_path, replaces)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"report": "x"}, "expected the report that apply or convert returned, got str"),
        ({"report": {"rows": 3}}, "is not as a folder's report.json has them"),
        ({"report": {"x": math.nan}}, "is not as a folder's report.json has them"),
        ({"accuracy": {}}, "is not as a folder's report.json has them"),
    ],
)
def test_a_report_of_another_kind_is_refused(given: dict[str, Any], words: str, converted: Converted, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        save(converted[0], tmp_path / "model", **given)
    with pytest.raises(CheckpointError, match="the report is of another model"):
        save(converted[0], tmp_path / "model", report=replace(converted[1], rows=converted[1].rows[1:]))
    assert not [*tmp_path.iterdir()]


TAGGED = f"{VIT}.augreg_in21k_ft_in1k"
FOUND = Fidelity(102, 0.97112, 0.954, 0.25, 0.5, ())
UNKNOWN = "Its fidelity is unknown"


def card_of(folder: Path, model: nn.Module, report: Any) -> str:
    save(model, folder, report=report, force=True)
    return (folder / "README.md").read_text()


def described(base: str = VIT, **changes: Any) -> Converted:
    arguments = {**(VIT_ARGUMENTS if ":" not in base else VIT_PYTORCH), **changes}
    model = build_base(base, arguments).eval()
    return model, convert(model, base=base, base_args=arguments)


def test_the_fidelity_is_what_was_measured_last_or_unknown(converted: Converted, tmp_path: Path) -> None:
    model, report = converted
    assert UNKNOWN in card_of(tmp_path / "m", model, report)
    facts = replace(report, fidelity=replace(FOUND, output_cosine=float("nan"))).to_json()
    facts["rows"] = [row | {"calibration": {"output_error": error}} for row, error in zip(facts["rows"], count(0.1, 0.1), strict=False)]
    card = card_of(tmp_path / "m", model, facts)
    assert "on held-out samples: 0.100 to 0.900" in card, "of the nine layers"
    assert "on 102 held-out samples" in card and "output cosine no number, token cosine 0.954" in card and UNKNOWN not in card
    run = {"data": "photos", "teacher": "dense", "scratch": False, "images": 6400, "updates": 100, "before": None, "after": None}
    assert UNKNOWN in card_of(tmp_path / "m", model, facts | {"finetune": run})
    run["fidelity_after"] = replace(FOUND, output_cosine=0.99, samples=40).to_json()
    card = card_of(tmp_path / "m", model, facts | {"finetune": run})
    assert "fidelity to the teacher on 40 held-out images: output cosine 0.990" in card and UNKNOWN not in card


def test_the_task_and_the_library_are_named(tmp_path: Path) -> None:
    for classes, task in ((7, "image-classification"), (0, "image-feature-extraction")):
        card = card_of(tmp_path / "m", *described(num_classes=classes))
        assert card.startswith(f"---\nlibrary_name: timm\npipeline_tag: {task}\ntags:\n- {task}\n- timm\n- flysurgery\n---\n")
    assert "\nvit_pytorch:ViT, with " in card_of(tmp_path / "v", *described("vit_pytorch:ViT"))
    model = transformers.ViTModel(transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32))
    assert 'transformers.ViTModel.from_pretrained("DIR")' in card_of(tmp_path / "t", install_random(model), None)


def test_only_weights_that_are_known_to_be_published_claim_a_tag_and_a_licence_and_keep_them(tmp_path: Path) -> None:
    model, report = described(TAGGED)
    card = card_of(tmp_path / "m", model, report)
    assert "augreg" not in card and "apache" not in card and f"\n{VIT}, with " in card
    save_dense(vit(), tmp_path / "dense", VIT, VIT_ARGUMENTS, force=False)
    for name in ("m", "dense"):
        data = json.loads((tmp_path / name / "config.json").read_text())["pretrained_cfg"]
        assert not {"tag", "license", "url", "hf_hub_id"} & set(data) and data["mean"] == [0.5, 0.5, 0.5]
    model = build_base(TAGGED, VIT_ARGUMENTS).eval()
    vouch_for_weights(model)
    line = f"- Converted from the weights `{TAGGED}`, licence apache-2.0\n"
    assert line in card_of(tmp_path / "m", model, convert(model, base=TAGGED, base_args=VIT_ARGUMENTS))
    assert line in card_of(tmp_path / "again", load(tmp_path / "m"), None)
