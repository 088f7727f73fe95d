"""Processes of one program, and writes that are killed at any moment.

All are forked from a process without threads that has imported the package once.
"""

import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

SECONDS = 300

_APART = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
_APART.set_forkserver_preload(["torch", "timm", "transformers", "flysurgery", "tests.checkpoint.conftest"])


def two_processes(folder: Path, program: str, *arguments: object) -> list[subprocess.CompletedProcess[str]]:
    """Run ``program`` as ``program.py`` of ``folder``, where they work, in two processes; what each did.

    They have the environment that ``torchrun`` gives, but no launcher that ends one when the other fails.
    """
    file = folder / "program.py"
    file.write_text(program)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as the launcher of torchrun keeps one
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    launched |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    argv, outputs = [str(file), *map(str, arguments)], [folder / f".{rank}" for rank in range(2)]
    ranks = [launched | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    started = [_start(_run_program, argv, folder, environment, out) for environment, out in zip(ranks, outputs, strict=True)]
    found = []
    for code, out in zip(_exit_codes(started), outputs, strict=True):
        texts = [out.with_suffix(suffix) for suffix in (".out", ".err")]
        found.append(subprocess.CompletedProcess(argv, code, *(text.read_text() for text in texts)))
        for text in texts:
            text.unlink()
    return found


def _run_program(argv: list[str], folder: Path, environment: dict[str, str], out: Path) -> None:
    os.chdir(folder)
    os.environ |= environment
    for suffix, stream in ((".out", 1), (".err", 2)):
        os.dup2(os.open(out.with_suffix(suffix), os.O_CREAT | os.O_WRONLY), stream)
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


def _start(target: Callable[..., None], *arguments: object) -> BaseProcess:
    process = _APART.Process(target=_alone, args=(target, *arguments))
    process.start()
    return process


def _alone(target: Callable[..., None], *arguments: object) -> None:
    torch.set_num_threads(1)  # others would not be there after the next fork
    target(*arguments)


def _exit_codes(started: list[BaseProcess]) -> list[int]:
    """Wait for processes, and end those that take too long."""
    end = time.monotonic() + SECONDS
    for process in started:
        process.join(max(0.0, end - time.monotonic()))
    late = [process for process in started if process.exitcode is None]
    for process in late:
        process.kill()
    assert not late, f"{len(late)} of {len(started)} processes did not end within {SECONDS} s"
    return [process.exitcode for process in started if process.exitcode is not None]


RANDOM_KILLS = 8
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


def run_apart(function: Callable[..., object], *arguments: object) -> None:
    """Call a module's function in a process of its own, which has no other threads."""
    read, write = _APART.Pipe(duplex=False)
    (code,) = _exit_codes([_start(_tell_errors, write, function, arguments)])
    assert code == 0, read.recv() if read.poll() else f"the process ended with {code}"


def _tell_errors(told: Any, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    try:
        function(*arguments)
    except BaseException:
        told.send(traceback.format_exc())
        sys.exit(1)
