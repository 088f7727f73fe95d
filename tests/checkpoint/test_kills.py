"""A save that is killed: the folder is the old one, the new one, or not there, and the next save clears up."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from flysurgery.checkpoint import load, save
from tests.checkpoint.conftest import install_random, small_model, snapshot
from tests.support.kills import kills, run_apart

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")


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


@pytest.mark.parametrize("run", [replace_a_model, save_a_model], ids=lambda run: run.__name__)
def test_killed_at_any_moment(run: object, tmp_path: Path) -> None:
    run_apart(__name__, run.__name__, tmp_path)  # pyright: ignore
