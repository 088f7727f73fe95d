"""The clocks that a device runs at, as NVML or ``nvidia-smi`` tells them."""

from __future__ import annotations

import importlib
import subprocess
from typing import Any

import torch


def nvml_handle(device: torch.device) -> tuple[Any, Any] | None:
    """NVML and its handle of a CUDA device; None without ``nvidia-ml-py``, without a driver, or where the device hides from it."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
    except Exception:  # NVML's errors are classes that it makes at run time
        return None


def clocks_mhz(device: torch.device) -> str | None:
    """``"1980/3201"``: the present clocks of the multiprocessors and of the memory; None away from CUDA or where nobody tells."""
    if device.type != "cuda":
        return None
    found = nvml_handle(device)
    if found is not None:
        nvml, handle = found
        try:
            return f"{nvml.nvmlDeviceGetClockInfo(handle, 1)}/{nvml.nvmlDeviceGetClockInfo(handle, 2)}"
        except Exception:  # a virtual device may not tell
            return None
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader,nounits", f"--id={device.index or 0}"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return output.strip().replace(", ", "/") or None
