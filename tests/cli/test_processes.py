"""Several processes of the command line: ``convert --reconstruct`` as ``torchrun`` starts them, and converts into one folder."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from flysurgery.checkpoint import load
from flysurgery.cli.processes import device_of_process
from flysurgery.errors import OptionError
from tests.cli.conftest import RANDOM, Refused
from tests.support.processes import two_processes

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
reconstruction.affordable = lambda *_: 4
if how != "well":
    reconstruction.measure_fidelity = fails
sys.exit(main(sys.argv[2:]))
"""

FIT = ("convert", *RANDOM, "--device", "cpu", "--out", "o", "--calibrate", "images", "--minutes", 60, "--reconstruct")


def told(stderr: str) -> list[str]:
    """What the command itself said there."""
    return [line for line in stderr.splitlines() if line.startswith("flysurgery: ")]


def test_two_processes_make_one_folder_and_one_report(images: Path, tmp_path: Path) -> None:
    (images / "broken.png").write_text("no image")
    first, second = two_processes(tmp_path, PROGRAM, "well", *FIT, "--json")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    found = json.loads(first.stdout)["reconstruction"]
    assert found["updates"] == 4 and found["after"]["relative_error"] <= found["before"]["relative_error"]
    assert second.stdout == ""
    assert told(first.stderr + second.stderr) == ["flysurgery: 1 images in images cannot be read and are left out: broken.png"]
    assert {path.name for path in tmp_path.iterdir()} == {"images", "o", "program.py"}
    load(tmp_path / "o")


@pytest.mark.usefixtures("images")
@pytest.mark.parametrize("how", ["unlucky", "killed"])
def test_where_one_fails_both_end_and_nothing_is_written(how: str, tmp_path: Path) -> None:
    first, second = two_processes(tmp_path, PROGRAM, how, *FIT)
    assert first.stdout == second.stdout == "" and {path.name for path in tmp_path.iterdir()} == {"images", "program.py"}
    said = told(first.stderr + second.stderr)
    assert first.returncode == 1 and len(said) == 1, said
    if how == "killed":
        assert second.returncode == -signal.SIGKILL and "another process of this run has ended" in said[0]
    else:
        assert second.returncode == 1 and said[0].startswith("flysurgery: this process has bad luck")


def test_each_process_has_a_gpu_of_its_own_and_work_to_share(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr("flysurgery.cli.processes._are_several", lambda: True)
    work = "several processes share the work of --reconstruct only"
    refused("convert", *RANDOM, "--device", "cpu", "--out", "o", words=(work,), code=2)
    monkeypatch.setattr("flysurgery.cli.options.device_of", lambda text: torch.device(text or "cuda"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device_of_process(None) == device_of_process("cuda") == torch.device("cuda", 1) and taken == [1, 1]
    assert device_of_process("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "2")
    for device, words in (("cuda:0", "a GPU of its own, got --device cuda:0"), (None, "has 2; start no more processes than that")):
        with pytest.raises(OptionError, match=words):
            device_of_process(device)
