"""What this machine can run: its GPU, its driver, its compiler."""

from __future__ import annotations

import functools

import torch

from flysurgery.errors import BackendError
from flysurgery.gpu.bindings import cuda_module, nvrtc_capabilities, nvrtc_version
from flysurgery.gpu.compile import kernel_path
from flysurgery.gpu.cubins import cubin_folder
from flysurgery.gpu.folder import folder_obstacle

OLDEST_CAPABILITY = (8, 0)


def device_obstacle(device_index: int | None = None) -> str | None:
    """Why no kernel can run on a CUDA device, by default the current one; None when they can."""
    if not torch.cuda.is_initialized():  # asking the driver takes longer than a kernel
        if torch.version.cuda is None:
            return "this PyTorch is built without CUDA; install a CUDA build"
        if not torch.cuda.is_available():
            return "no CUDA device is available"
    return _device_obstacle(torch.cuda.current_device() if device_index is None else device_index)


def hopper_obstacle(kernel: str, device_index: int) -> str | None:
    """Why a kernel that needs wgmma, named by ``kernel``, cannot run on a CUDA device; None when it can."""
    obstacle = device_obstacle(device_index)
    if obstacle is not None:
        return obstacle
    major, minor = torch.cuda.get_device_capability(device_index)
    if (major, minor) == (9, 0):
        return None
    return f"{kernel} needs a GPU of compute capability 9.0, this one has {major}.{minor}"


@functools.cache
def _device_obstacle(device_index: int) -> str | None:
    major, minor = torch.cuda.get_device_capability(device_index)
    if (major, minor) < OLDEST_CAPABILITY:
        name = torch.cuda.get_device_name(device_index)
        return f"the kernels need a GPU of compute capability 8.0 or newer, {name} has {major}.{minor}"
    try:
        kernel_path()
        if 10 * major + minor not in nvrtc_capabilities():
            return (
                f"NVRTC {'.'.join(map(str, nvrtc_version()))} does not compile for compute capability {major}.{minor}; install a newer one"
            )
    except BackendError as error:
        return str(error)
    return None


def cuda_facts() -> list[tuple[str, str, str | None]]:
    """What ``flysurgery doctor`` says about the CUDA backend: rows of ``(what, what was found, obstacle or None)``."""
    return [_compiler_fact(), *_device_facts(), _folder_fact()]


def _compiler_fact() -> tuple[str, str, str | None]:
    try:
        version = ".".join(map(str, nvrtc_version()))
        return ("compiler", f"NVRTC {version}, cuda-core {cuda_module('core').__version__}", None)
    except BackendError as error:
        return ("compiler", "none", str(error))


def _device_facts() -> list[tuple[str, str, str | None]]:
    if not torch.cuda.is_available():
        return [("GPU", "none", device_obstacle())]
    facts = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        facts.append((f"GPU {index}", f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}", device_obstacle(index)))
    return facts


def _folder_fact() -> tuple[str, str, str | None]:
    folder = cubin_folder()
    return ("kernel cache", str(folder), folder_obstacle(folder))
