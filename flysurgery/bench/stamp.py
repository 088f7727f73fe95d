"""Says where and with what a measurement was taken."""

from __future__ import annotations

import importlib
import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import torch

import flysurgery


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


def nvml_handle(device: torch.device) -> tuple[Any, Any] | None:
    """Give NVML and its handle of a CUDA device; None without ``nvidia-ml-py``, without a driver, or where NVML does not see the device."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
    except Exception:  # NVML makes its error classes at run time
        return None


def clocks_mhz(device: torch.device) -> str | None:
    """Give the present clocks of multiprocessors and memory as ``"1980/3201"``; None away from CUDA or where they cannot be read."""
    if device.type != "cuda":
        return None
    found = nvml_handle(device)
    if found is None:
        clocks = _nvidia_smi("clocks.sm,clocks.mem", device.index or 0)
        return clocks and clocks.replace(", ", "/")
    nvml, handle = found
    try:
        return f"{nvml.nvmlDeviceGetClockInfo(handle, 1)}/{nvml.nvmlDeviceGetClockInfo(handle, 2)}"
    except Exception:  # a virtual device may not tell
        return None


def _cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def _driver() -> str | None:
    return _nvidia_smi("driver_version")


@cache
def _commit() -> str:
    """Give the commit of the sources at the first stamp of this process.

    It is ``uncommitted`` where the sources differ from their commit or there is none, and ``installed`` outside git.
    """
    git = ("git", "-C", str(Path(flysurgery.__file__).parent))
    if _first_line(*git, "rev-parse", "--is-inside-work-tree") != "true":
        return "installed"
    if _first_line(*git, "status", "--porcelain", "--", ".") is not None:
        return "uncommitted"
    return _first_line(*git, "rev-parse", "--short=12", "HEAD") or "uncommitted"


def _nvidia_smi(query: str, index: int = 0) -> str | None:
    return _first_line("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", f"--id={index}")


def _first_line(*command: str) -> str | None:
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return output.splitlines()[0] if output else None
