"""Where and with what a measurement was taken."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

import torch

import flysurgery
from flysurgery.bench.clocks import clocks_mhz


@dataclass(frozen=True)
class Stamp:
    """What a row needs besides its numbers so that it can be compared or repeated.

    ``driver`` and ``clocks_mhz`` (multiprocessors/memory, at the time of the stamp) are None on the CPU.
    """

    date: str
    device: str
    driver: str | None
    threads: int
    torch: str
    flysurgery: str
    commit: str
    clocks_mhz: str | None = None


def take_stamp(device: torch.device) -> Stamp:
    """Describe this machine, the software on it and the state of the sources now."""
    cuda = device.type == "cuda"
    return Stamp(
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        device=torch.cuda.get_device_name(device) if cuda else _cpu_name(),
        driver=_driver() if cuda else None,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        flysurgery=flysurgery.__version__,
        commit=_commit(),
        clocks_mhz=clocks_mhz(device),
    )


def _cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def _driver() -> str | None:
    return _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])


@cache
def _commit() -> str:
    """The commit of the sources that this process found at its first stamp, ``uncommitted`` where they differ from it or there is none,
    ``installed`` outside git.
    """
    sources = Path(flysurgery.__file__).parent
    if _first_line(["git", "-C", str(sources), "rev-parse", "--is-inside-work-tree"]) != "true":
        return "installed"
    if _first_line(["git", "-C", str(sources), "status", "--porcelain", "--", "."]) is not None:
        return "uncommitted"
    return _first_line(["git", "-C", str(sources), "rev-parse", "--short=12", "HEAD"]) or "uncommitted"


def _first_line(command: list[str]) -> str | None:
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return output.splitlines()[0] if output else None
