"""``convert --reconstruct`` in two processes, as ``torchrun`` starts them: one folder, one voice, and nothing where one fails."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flysurgery.checkpoint import load
from flysurgery.cli.processes import device_of_process
from flysurgery.errors import OptionError
from tests.cli.conftest import TINY
from tests.support.processes import launch

PROGRAM = """
import os, signal, sys
from flysurgery.cli import main
from flysurgery.errors import DataError
from flysurgery.fidelity import reconstruction
how, measure, calls = sys.argv[1], reconstruction.measure_fidelity, []
def fails(*arguments):
    calls.append(arguments)
    if len(calls) == 3 and os.environ["RANK"] == "1":
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise DataError("this process has bad luck")
    return measure(*arguments)
reconstruction._affordable = lambda *_: 12
if how != "well":
    reconstruction.measure_fidelity = fails
sys.exit(main(sys.argv[2:]))
"""

FIT = ("convert", *TINY, "--no-pretrained", "--calibrate", "images", "--reconstruct", "--minutes", 60, "--device", "cpu", "--out", "o")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    pixels = np.random.default_rng(0)
    for index in range(20):
        Image.fromarray(pixels.integers(0, 255, (8, 8, 3), np.uint8)).resize((40, 40)).save(tmp_path / "images" / f"{index:02}.png")
    (tmp_path / "images" / "broken.png").write_text("no image")
    return tmp_path


def told(stderr: str) -> list[str]:
    """What the command itself said there; the launcher has much to say of a process that failed."""
    return [line for line in stderr.splitlines() if line.startswith("flysurgery: ")]


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_two_processes_make_one_folder_and_one_report(folder: Path) -> None:
    done = launch(folder, PROGRAM, "well", *FIT, "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)["reconstruction"]
    assert found["updates"] == 12 and found["batch"] == 16
    assert found["after"]["relative_error"] <= found["before"]["relative_error"]
    assert told(done.stderr) == ["flysurgery: 1 images in images cannot be read and are left out: broken.png"]
    assert left(folder) == ["images", "o", "program.py"]
    load(folder / "o")


def test_an_error_of_one_ends_both_in_one_sentence_and_nothing_is_written(folder: Path) -> None:
    (folder / "images" / "broken.png").unlink()
    done = launch(folder, PROGRAM, "unlucky", *FIT)
    assert done.returncode == 1 and done.stdout == ""
    assert told(done.stderr) == ["flysurgery: this process has bad luck"]
    assert left(folder) == ["images", "program.py"]


def test_a_kill_of_one_ends_both_and_nothing_is_written(folder: Path) -> None:
    (folder / "images" / "broken.png").unlink()
    done = launch(folder, PROGRAM, "killed", *FIT)
    assert done.returncode == 1 and done.stdout == ""
    # The launcher ends the other process too, before it says why it cannot go on, or after.
    assert len(told(done.stderr)) <= 1 and all("another process of this run has ended" in line for line in told(done.stderr))
    assert left(folder) == ["images", "program.py"]


def test_an_error_of_both_is_told_once(folder: Path) -> None:
    without = [option for option in FIT if option not in ("--reconstruct", "--minutes", 60)]
    done = launch(folder, PROGRAM, "well", *without)
    assert done.returncode == 1 and left(folder) == ["images", "program.py"]
    assert told(done.stderr) == [
        "flysurgery: several processes share the work of --reconstruct only, without --measure, --fidelity and --dry-run; "
        "start convert in one process"
    ]


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr("flysurgery.cli.processes._are_several", lambda: True)
    monkeypatch.setattr("flysurgery.cli.options.device_of", lambda text: torch.device(text or "cuda"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device_of_process(None) == device_of_process("cuda") == torch.device("cuda", 1) and taken == [1, 1]
    assert device_of_process("cpu") == torch.device("cpu")
    with pytest.raises(OptionError, match="a GPU of its own, got --device cuda:0"):
        device_of_process("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(OptionError, match="this machine has 2; start no more processes than that"):
        device_of_process(None)
