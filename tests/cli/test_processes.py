"""Several processes of the command line: ``convert --reconstruct`` as ``torchrun`` starts them, and converts into one folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flysurgery.checkpoint import load
from flysurgery.cli.processes import device_of_process
from flysurgery.errors import OptionError
from tests.cli.conftest import RANDOM
from tests.support.processes import ROOT, launch

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
reconstruction._affordable = lambda *_: 4
if how != "well":
    reconstruction.measure_fidelity = fails
sys.exit(main(sys.argv[2:]))
"""

FIT = ("convert", *RANDOM, "--device", "cpu", "--out", "o", "--calibrate", "images", "--minutes", 60, "--reconstruct")


def told(stderr: str) -> list[str]:
    """What the command itself said there; the launcher has much to say of a process that failed."""
    return [line for line in stderr.splitlines() if line.startswith("flysurgery: ")]


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_two_processes_make_one_folder_and_one_report(images: Path, tmp_path: Path) -> None:
    (images / "broken.png").write_text("no image")
    done = launch(tmp_path, PROGRAM, "well", *FIT, "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)["reconstruction"]
    assert found["updates"] == 4 and found["after"]["relative_error"] <= found["before"]["relative_error"]
    assert told(done.stderr) == ["flysurgery: 1 images in images cannot be read and are left out: broken.png"]
    assert left(tmp_path) == ["images", "o", "program.py"]
    load(tmp_path / "o")


@pytest.mark.usefixtures("images")
@pytest.mark.parametrize("how", ["unlucky", "killed", "alone"])
def test_where_one_fails_both_end_and_nothing_is_written(how: str, tmp_path: Path) -> None:
    """By an error, by a kill, and where both are refused, as without work to share."""
    done = launch(tmp_path, PROGRAM, how, *(FIT[:-3] if how == "alone" else FIT))
    assert done.returncode == 1 and done.stdout == ""
    assert left(tmp_path) == ["images", "program.py"]
    said = told(done.stderr)
    if how == "killed":  # the launcher ends the other process too, before it says why it cannot go on, or after
        assert len(said) <= 1 and all("another process of this run has ended" in line for line in said)
    else:
        sentence = "this process has bad luck" if how == "unlucky" else "several processes share the work of --reconstruct only"
        assert len(said) == 1 and said[0].startswith(f"flysurgery: {sentence}")


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


def test_of_two_converts_into_one_folder_one_is_refused(tmp_path: Path) -> None:
    """Whichever comes first: it finds the folder there at its start, or at its end."""
    environment = os.environ | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    program = "import sys; from flysurgery.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "convert", *RANDOM, "--out", "o"]
    running = [subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = {process.wait(300): process.communicate()[1] for process in running}
    assert set(said) == {0, 1}, said
    assert len(told(said[1])) == 1 and "/o " in told(said[1])[0]
    assert left(tmp_path) == ["o"]
    load(tmp_path / "o")
