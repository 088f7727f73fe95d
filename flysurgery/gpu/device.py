"""What this machine can run: its GPU, its driver, its compiler."""

import functools

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.gpu.cache_folder import folder_obstacle
from flysurgery.gpu.compile import cubin_folder, cuda_module, kernel_path, nvrtc_version

CAPABILITY = (9, 0)
"""That of H100 and H200, for which the kernels are written."""


def device_obstacle(device_index: int | None = None) -> str | None:
    """Why no kernel can run on a CUDA device, by default the current one; None when they can."""
    if not torch.cuda.is_initialized():  # asking the driver takes longer than a kernel
        if torch.version.cuda is None:
            return "this PyTorch is built without CUDA; install a CUDA build"
        if not torch.cuda.is_available():
            return "no CUDA device is available"
    return _device_obstacle(torch.cuda.current_device() if device_index is None else device_index)


def kernels_take(x: Tensor) -> bool:
    """Whether kernels run on the device of x; elsewhere PyTorch does their work."""
    return x.is_cuda and device_obstacle(x.device.index) is None


@functools.cache
def _device_obstacle(device_index: int) -> str | None:
    capability = torch.cuda.get_device_capability(device_index)
    if capability != CAPABILITY:
        needed, found = (".".join(map(str, each)) for each in (CAPABILITY, capability))
        name = torch.cuda.get_device_name(device_index)
        return f"the kernels need a GPU of compute capability {needed}, such as an H100, {name} has {found}"
    try:
        kernel_path()
        nvrtc_version()
    except BackendError as error:
        return str(error)
    return None


@functools.cache
def shared_limit_of(device_index: int) -> int:
    """Bytes of shared memory that a block may use."""
    return torch.cuda.get_device_properties(device_index).shared_memory_per_block_optin


@functools.cache
def multiprocessors_of(device_index: int) -> int:
    """The number of multiprocessors, cached because PyTorch needs longer than a launch to give it."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def make_context_current(device_index: int) -> None:
    """Set the driver's context for a thread that has not used the device yet; PyTorch's device guard does not."""
    cuda_module("core").Device(device_index).set_current()


def cuda_facts() -> list[tuple[str, str, str | None]]:
    """What ``flysurgery doctor`` says about the CUDA backend: rows of ``(what, what was found, obstacle or None)``."""
    folder, facts = cubin_folder(), list[tuple[str, str, str | None]]()
    try:
        version = ".".join(map(str, nvrtc_version()))
        facts.append(("compiler", f"NVRTC {version}, cuda-core {cuda_module('core').__version__}", None))
    except BackendError as error:
        facts.append(("compiler", "none", str(error)))
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        facts.append((f"GPU {index}", f"{torch.cuda.get_device_name(index)}, compute capability {capability}", device_obstacle(index)))
    if len(facts) == 1:
        facts.append(("GPU", "none", device_obstacle()))
    return [*facts, ("kernel cache", str(folder), folder_obstacle(folder))]
