"""Saving: a folder appears complete or not at all, only a checkpoint is replaced, and what could not be loaded is refused before."""

from __future__ import annotations

import errno
import importlib
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from flysurgery.checkpoint import check_folder, load, save
from flysurgery.checkpoint.folder import FILES, new_folder
from flysurgery.checkpoint.transformers_folder import PROCESSOR
from flysurgery.errors import CheckpointError
from tests.checkpoint.conftest import ARGUMENTS, BASE, Converted, install_random, read_weights, small_model, snapshot
from tests.support.processes import kills, run_apart

# The package has a function of the module's name, so the module is asked for by its full name.
SAVE = importlib.import_module("flysurgery.checkpoint.save")


def test_what_is_written(converted: Converted, saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == {*FILES} - {PROCESSOR}
    assert sorted(path.name for path in saved.parent.iterdir()) == ["model"]
    modes = {stat.S_IMODE(path.stat().st_mode) for path in saved.iterdir()}
    assert len(modes) == 1, "safetensors alone would make its file private"
    tensors, metadata = read_weights(saved)
    assert set(metadata) == {"format", "flysurgery.schema", "version", "plan_sha256", "tensors", "tensors_sha256"}
    assert metadata["format"] == "pt" and metadata["flysurgery.schema"] == "1"
    assert tensors.keys() == converted[0].state_dict().keys()
    assert tensors["blocks.0.attn.qkv.q.factors.0"].shape == (1, 8, 8, 4)


def test_missing_parents_are_made_an_empty_folder_is_filled_and_a_link_followed(converted: Converted, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty", target_is_directory=True)
    for name in ("a/b/model", "empty", "link"):
        save(converted[0], tmp_path / name, force=name == "link")
        load(tmp_path / name)
    assert (tmp_path / "link").is_symlink()


def test_existing_checkpoint_needs_force(folder: Path) -> None:
    before, other = snapshot(folder), install_random(small_model())
    with pytest.raises(CheckpointError, match="exists; give force=True"):
        save(other, folder)
    with pytest.raises(CheckpointError, match="exists; give force=True"):
        check_folder(folder)
    assert snapshot(folder) == before and check_folder(folder, force=True) == folder.resolve()
    (folder / "model.safetensors").write_bytes(b"cut")  # a damaged one is one
    save(other, folder, force=True)
    assert list(folder.parent.iterdir()) == [folder]
    assert load(folder).state_dict()["head.bias"].equal(other.state_dict()["head.bias"])


@pytest.mark.parametrize(
    ("names", "fact"),
    [
        (["notes.txt"], "no flysurgery checkpoint"),
        (["config.json"], "no flysurgery checkpoint"),
        (["model.safetensors", "config.json"], "no flysurgery checkpoint"),
        (["thesis.tex"], r"also holds thesis\.tex"),
    ],
)
def test_force_replaces_nothing_but_checkpoints(names: list[str], fact: str, converted: Converted, folder: Path) -> None:
    home = folder if "thesis.tex" in names else folder.with_name("home")
    home.mkdir(exist_ok=True)
    for name in names:
        (home / name).write_text("{}")
    before = snapshot(home)
    with pytest.raises(CheckpointError, match=fact):
        save(converted[0], home, force=True)
    assert snapshot(home) == before


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("name", "error", "fact"),
    [
        ("save_file", FULL, "No space left on device"),
        ("save_file", SafetensorError("I/O error: No space left on device (os error 28)"), "No space left"),
        ("model_card", FULL, None),
        ("fsync", OSError(errno.EIO, "Input/output error"), "Input/output error"),
        ("save_file", KeyboardInterrupt(), None),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_failure_while_writing(
    name: str, error: BaseException, fact: str | None, force: bool, converted: Converted, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    target = folder if force else folder.parent / "new" / "deeper" / "model"
    before, siblings = snapshot(folder), sorted(folder.parent.iterdir())
    monkeypatch.setattr(os if name == "fsync" else SAVE, name, fail)
    with pytest.raises(CheckpointError if isinstance(error, Exception) else type(error), match=fact):
        save(converted[0], target, force=force)
    assert snapshot(folder) == before
    assert sorted(folder.parent.iterdir()) == siblings, "something was left behind"


@pytest.mark.parametrize("failing", [1, 2])
def test_failure_while_renaming(failing: int, converted: Converted, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacing takes two renames; whichever fails, the old checkpoint is where it was."""
    before, calls, rename = snapshot(folder), [], Path.rename

    def flaky(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == failing:
            raise PermissionError(errno.EACCES, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", flaky)
    with pytest.raises(CheckpointError, match="Permission denied; nothing was changed"):
        save(converted[0], folder, force=True)
    assert snapshot(folder) == before and list(folder.parent.iterdir()) == [folder]


def test_too_little_space_or_permission_is_seen_before_writing(
    converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage: Any = type("Usage", (), {"free": 1000})
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(CheckpointError, match=r"needs 1\.\d MB and .* has 0\.0 MB left"):
            save(converted[0], tmp_path / "a" / "model")
    if os.name != "nt" and os.geteuid():  # an administrator may write everywhere
        tmp_path.chmod(0o500)
        with pytest.raises(CheckpointError, match="Permission denied"):
            save(converted[0], tmp_path / "model")
        tmp_path.chmod(0o700)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        *((name, "the folder that this runs in") for name in (".", "", "..")),
        ("file", "is a file"),
        ("file/model", "could not be written"),
        ("/", "a name of its own"),
    ],
)
def test_files_and_the_folder_that_the_caller_is_in_stay(
    name: str, fact: str, converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "a" / "home"
    home.mkdir(parents=True)
    (home / "file").write_text("x")
    monkeypatch.chdir(home)
    inside = Path().stat().st_ino
    with pytest.raises(CheckpointError, match=fact):
        save(converted[0], name, force=True)
    assert home.stat().st_ino == inside and [each.read_text() for each in home.iterdir()] == ["x"]


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


def of_base(base: str, **arguments: Any) -> nn.Module:
    return install_random(small_model(), base=base, base_args=arguments)


def changed(what: str) -> nn.Module:
    dense = small_model()
    if what == "no base":
        dense.pretrained_cfg = {}
    model = install_random(dense)
    if what == "buffer":
        model.blocks[0].register_buffer("scale", torch.ones(2), persistent=False)
    if what == "norm":
        model.norm = nn.LayerNorm(32, elementwise_affine=False)
    if what == "numbers":
        nn.init.constant_(model.head.weight, 1e6)
    return model


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (small_model, ["not converted"]),
        (lambda: changed("device").to("meta"), ["meta device"]),
        (lambda: changed("no base"), ["base=", "base_args="]),
        (lambda: of_base(BASE), ["the plan says 96x32, the model has 576x192", "base_args="]),
        (lambda: of_base(BASE, **{**ARGUMENTS, "depth": 3}), ["missing: blocks.2"]),
        (lambda: of_base(BASE, **{**ARGUMENTS, "depth": 1}), ["no module of that name", "blocks.1"]),
        (lambda: of_base("vit_pytorch:ViT"), ["vit_pytorch:ViT cannot be built"]),
        (lambda: changed("buffer"), ["buffers", "blocks.0.scale"]),
        (lambda: changed("norm"), ["norm.weight"]),
        (lambda: changed("numbers"), ["head.weight", "float16"]),
    ],
)
def test_what_could_not_be_loaded_again_is_not_saved(make: Callable[[], nn.Module], facts: list[str], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        save(make(), tmp_path / "model", dtype="float16")
    message = str(caught.value)
    assert not any(tmp_path.iterdir()) and "\n" not in message and len(message) < 800, message
    assert all(fact in message for fact in facts), message


def content(folder: Path) -> object:
    """All files; of the weights' header no order, in which safetensors writes its entries at random."""
    files = snapshot(folder)
    weights = files.pop("model.safetensors", b"")
    end = 8 + int.from_bytes(weights[:8], "little")
    return files, json.loads(weights[8:end]), weights[end:]


def replace_a_model(home: Path) -> None:
    """The old model stays until the new one is whole; between two renames it is beside."""
    target, kept = home / "home" / "model", home / "kept"
    model, other = (install_random(small_model(depth=1, num_classes=classes)) for classes in (7, 8))
    save(other, target)
    new = content(target)
    save(model, target, force=True)
    old, ends = content(target), []
    shutil.copytree(target, kept)
    for _ in kills(lambda: save(other, target, force=True)):
        left = [path for path in target.parent.iterdir() if path != target]
        if target.exists():
            ends.append([old, new].index(content(target)))
            load(target)
        else:
            ends.append(2)
            assert old in map(content, left)
        if left:
            save(model, target, force=True)
        elif ends[-1] == 1:
            shutil.rmtree(target)
            shutil.copytree(kept, target)
        assert content(target) == old and [*target.parent.iterdir()] == [target]
    assert {*ends} == {0, 1, 2}


def save_a_model(home: Path) -> None:
    """Where there was none, a model is there as a whole or not at all."""
    target, model, ends = home / "deep" / "model", install_random(small_model(depth=1)), []
    save(model, target)
    whole = content(target)
    shutil.rmtree(home / "deep")
    for _ in kills(lambda: save(model, target)):
        ends.append(target.exists())
        if target.parent.exists() and not target.exists():
            save(model, target)
        if target.parent.exists():
            assert content(target) == whole and [*target.parent.iterdir()] == [target]
            shutil.rmtree(target.parent)
        assert not any(home.iterdir())
    assert {*ends} == {True, False}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
@pytest.mark.parametrize("run", [replace_a_model, save_a_model], ids=lambda run: run.__name__)
def test_killed_at_any_moment(run: Callable[[Path], None], tmp_path: Path) -> None:
    run_apart(run, tmp_path)
