"""Two processes of one program, as ``torchrun`` starts them, and writes that are killed at any moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).parents[2])


def launch(folder: Path, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run ``program`` in two processes with ``folder`` as their working directory, where it lies as ``program.py`` then."""
    (folder / "program.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py", *map(str, arguments)]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            out, err = launcher.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            launcher.terminate()  # by which it ends the processes that it started; a kill would leave them
            raise
    return subprocess.CompletedProcess(command, launcher.returncode, out, err)


RANDOM_KILLS = 20
_CHANGES = ("os.mkdir", "os.rename", "os.chmod", "os.remove", "os.rmdir")


def kills(write: Callable[[], object]) -> Iterator[None]:
    """Give control after each killed ``write``, which runs in a copy of this process, and once after one that was not killed.

    This process must have no other threads. The moments are those before each change of which ``sys.audit`` tells, and random ones within
    the time of a whole write, as tensors are written without its telling.
    """
    moment, killed, seconds = 0, True, 0.0
    while killed:
        began = time.perf_counter()
        killed = _ended_by_kill(_forked(write, moment))
        seconds, moment = time.perf_counter() - began, moment + 1
        yield
    assert moment > 5, "it makes more changes than that"
    draw = random.Random(0)
    for _ in range(RANDOM_KILLS):
        child = _forked(write)
        time.sleep(draw.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        _ended_by_kill(child)
        yield


def _forked(write: Callable[[], object], moment: int | None = None) -> int:
    child = os.fork()
    if child:
        return child
    before = count()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        changes = event in _CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if changes and next(before) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(hook)
        write()
        os._exit(0)
    finally:
        os._exit(1)


def _ended_by_kill(child: int) -> bool:
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), f"the write ended with {code}"
    return code != 0


def run_apart(module: str, function: str, folder: Path) -> None:
    """Call ``module.function(folder)`` in a process of its own, which has no other threads."""
    root = str(Path(__file__).parents[2])
    program = f"import sys; from pathlib import Path; from {module} import {function} as run; run(Path(sys.argv[1]))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", program, str(folder)], env=environment, check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
