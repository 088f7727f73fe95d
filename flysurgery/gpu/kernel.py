"""A kernel on a device: loaded once a process, launched on the caller's stream; and kernels compiled side by side."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from math import ceil
from typing import Any

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.gpu.compile import cuda_module, find_cubin
from flysurgery.gpu.device import make_context_current
from flysurgery.gpu.modes import macros
from flysurgery.gpu.tensor_map import Boxes

Argument = Tensor | Boxes | int | None
Grid = tuple[int, int, int]
Sizes = tuple[Grid, Grid, int]
"""Blocks, threads of a block, and bytes of its dynamic shared memory."""

ARCH = "sm_90a"
"""The architecture that kernels are compiled for, with wgmma and the copy engine."""

_FREE_SHARED_BYTES = 48 * 1024
_MOST_COMPILERS = 16


class Kernel:
    """One ``__global__`` function on one device: that of this name in the file of this name, loaded at its first launch."""

    def __init__(self, name: str, defines: Mapping[str, int | str], device_index: int) -> None:
        self.name, self.device_index = name, device_index
        self.function: Any = None
        self.words = list[int]()  # of each parameter; a struct has whole ones
        self._defines, self._loading = defines, threading.Lock()
        self._shared_bytes = _FREE_SHARED_BYTES
        self._launches: dict[tuple[tuple[int, ...], bool], Series] = {}

    def load(self) -> None:
        """Compile it, or find it compiled, and load it. Another thread may load other kernels meanwhile.

        Raises:
            BackendError: the kernel does not compile, or the driver rejects it.
        """
        with self._loading:
            if self.function is None:
                driver = cuda_module("bindings.driver")
                self._launch_as = driver.cuLaunchKernelEx
                self._code, kernel, self.words = _load(self.name, self._defines, self.device_index)
                self._kernel, self.function = driver.CUkernel(int(kernel.handle)), driver.CUfunction(int(kernel.handle))

    def launch(self, grid: Grid, block: Grid, shared_bytes: int, stream: int, *arguments: Argument, early: bool = False) -> None:
        """Queue the kernel on a stream. The device must be the current one.

        Args:
            shared_bytes: dynamic shared memory a block; above 48 KB the limit is raised once.
            stream: raw handle, ``current_stream(device_index)``.
            early: begin while the kernel before still runs; the kernel itself waits for it.
            arguments: tensors and None as pointers, integers as integers of the parameter's size, which are no addresses; a struct of
                pointers and 64-bit integers takes one argument a member.

        Raises:
            BackendError: the arguments are not as many as the kernel's parameters, the driver refuses the launch, or what ``load`` raises.
        """
        sizes = (*grid, *block, shared_bytes)
        if THREAD.recording is not None:
            THREAD.recording.launch(self, sizes, arguments, early)
        words = list[int]()
        for argument in arguments:
            if argument is None or isinstance(argument, int):
                words.append(argument or 0)
            elif isinstance(argument, Tensor):
                words.append(argument.data_ptr())
            else:
                words += argument.words(argument.at.data_ptr())
        series = self._launches.get((sizes, early))
        if series is None:
            if THREAD.asked is not None and self.function is None:
                THREAD.asked.load(self)
                return
            series = self._launches[sizes, early] = Series([(self, sizes, early)])
        if len(words) != series.count:
            raise BackendError(f"kernel {self.name} takes {series.count} arguments, got {len(words)}")
        series(stream, *words)

    def queue(self, config: Any, address: int) -> None:
        """Launch by a ``_launch_config``, which no other thread may use meanwhile, with the parameters whose addresses lie there."""
        result = self._launch_as(config, self.function, address, 0)[0]
        if result != 0 and result.name == "CUDA_ERROR_INVALID_CONTEXT":
            make_context_current(self.device_index)
            result = self._launch_as(config, self.function, address, 0)[0]
        if result != 0:
            grid, block = (config.gridDimX, config.gridDimY, config.gridDimZ), (config.blockDimX, config.blockDimY, config.blockDimZ)
            raise BackendError(
                f"kernel {self.name} was not launched: {result.name} with grid {grid}, block {block}, "
                f"{config.sharedMemBytes} bytes shared memory"
            )

    def allow_shared(self, shared_bytes: int) -> None:
        """Let the loaded kernel take so many bytes of shared memory a block. Raises BackendError where the device has less."""
        with self._loading:
            if shared_bytes <= self._shared_bytes:
                return
            driver = cuda_module("bindings.driver")
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            result = driver.cuKernelSetAttribute(attribute, shared_bytes, self._kernel, driver.CUdevice(self.device_index))[0]
            if result != 0:
                raise BackendError(
                    f"kernel {self.name} needs {shared_bytes} bytes of shared memory a block, this device has less: {result.name}"
                )
            self._shared_bytes = shared_bytes


class Series:
    """Launches that follow each other, each a kernel, its sizes, and whether it begins early; their parameters are one table."""

    def __init__(self, launches: Sequence[tuple[Kernel, tuple[int, ...], bool]]) -> None:
        for kernel, sizes, _ in launches:
            kernel.load()
            kernel.allow_shared(sizes[-1])
        self.count = sum(sum(kernel.words) for kernel, _, _ in launches)
        self._table, self._launches = (ctypes.c_int64 * self.count)(), list[tuple[Kernel, Any, int, Any]]()
        start = ctypes.addressof(self._table)
        for kernel, sizes, early in launches:
            *places, start = accumulate((8 * words for words in kernel.words), initial=start)
            pointers = (ctypes.c_void_p * len(places))(*places)  # which must live
            self._launches.append((kernel, _launch_config(sizes, early), ctypes.addressof(pointers), pointers))
        self._stream: int | None = None
        self._pack = struct.Struct(f"{self.count}q").pack_into
        self._lock = threading.Lock()

    def __call__(self, stream: int, *words: int) -> None:
        """Queue the kernels on a stream. The device must be the current one. Raises as ``Kernel.launch``."""
        with self._lock:  # the driver copies the parameters before it returns
            self._pack(self._table, 0, *words)
            if stream != self._stream:
                for _, config, _, _ in self._launches:
                    config.hStream = stream
                self._stream = stream
            for kernel, config, pointers, _ in self._launches:
                kernel.queue(config, pointers)


def _launch_config(sizes: tuple[int, ...], early: bool) -> Any:
    """The driver's description of a launch, without its stream; ``sizes`` are grid, block and shared bytes."""
    driver = cuda_module("bindings.driver")
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX, config.blockDimY, config.blockDimZ, config.sharedMemBytes = sizes
    if early:
        value = driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value = value
        config.attrs, config.numAttrs = [attribute], 1
    return config


@lru_cache(maxsize=4096)
def kernel_of(tile: Any, device_index: int, *options: object) -> Kernel:
    """The kernel ``tile.kernel`` with the macros ``tile.defines(*options)``."""
    return load_kernel(tile.kernel, tile.defines(*options), device_index)


@lru_cache(maxsize=4096)
def sized_kernel(name: str, device_index: int, **sizes: Hashable) -> Kernel:
    """A kernel with the macros ``macros(**sizes)``."""
    return load_kernel(name, macros(**sizes), device_index)


def rows_kernel(name: str, features: int, dtype: torch.dtype, device_index: int, activation: str = "none", **more: int) -> Kernel:
    """A kernel of whole rows, with further macros."""
    return sized_kernel(name, device_index, columns=features, mode=dtype, activation=activation, **more)


_kernels: dict[tuple[object, ...], Kernel] = {}


def load_kernel(name: str, defines: Mapping[str, int | str], device_index: int) -> Kernel:
    """The kernel of this name with these macros, the same object for the same arguments; it is loaded at its first launch.

    Keep the result instead of calling this for every launch: hashing the arguments costs more than the lookup saves.
    """
    key = (name, device_index, tuple(sorted(defines.items())))
    return _kernels.get(key) or _kernels.setdefault(key, Kernel(name, {**defines}, device_index))


def _load(name: str, defines: Mapping[str, int | str], device_index: int) -> tuple[Any, Any, list[int]]:
    """The code object, which must live, the function in it, and the words of its parameters."""
    source, driver, rejected = f"{name}.cu", cuda_module("bindings.driver"), None
    with torch.cuda.device(device_index):
        # The driver refuses by default to load code during a capture, although it is safe.
        _, before = driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            make_context_current(device_index)
            for refresh in (False, True):  # a file damaged in the cache folder is replaced
                cubin = find_cubin(source, defines, arch=ARCH, name=name, refresh=refresh)
                try:
                    code = cuda_module("core").ObjectCode.from_cubin(cubin, name=source)
                    kernel = code.get_kernel(name)
                    return code, kernel, [ceil(size / 8) for _, size in kernel.arguments_info]
                except Exception as error:  # cuda-core's own error type is private
                    rejected = error
        finally:
            driver.cuThreadExchangeStreamCaptureMode(before)
    raise BackendError(f"the CUDA driver rejects kernel {source} for {ARCH}: {rejected}; update the driver") from rejected


class _Asked:
    """Kernels that are loaded by the threads of a pool, each once."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool, self._loads = pool, dict[Kernel, Future[None]]()

    def load(self, kernel: Kernel) -> None:
        """Let a kernel be loaded; further requests would keep threads waiting."""
        if kernel not in self._loads:
            self._loads[kernel] = self._pool.submit(kernel.load)

    def finish(self) -> None:
        """Wait for all of them. Raises as ``Kernel.load``."""
        for load in self._loads.values():
            load.result()


class _OfThread(threading.local):
    asked: _Asked | None = None
    recording: Any = None  # a Recording


THREAD = _OfThread()
"""What this thread's launches are part of: a block of ``compiling``, a recording, both or neither."""


@contextmanager
def compiling() -> Iterator[None]:
    """Load the kernels that this thread launches in the block side by side, before the block ends.

    Run in it once what will be run or timed afterwards. A launch of a kernel that is not loaded yet does nothing, so results inside are
    arbitrary, and nothing that is derived from parameters is remembered. Backward passes stay in this thread, and autograd does not look
    for NaN.

    Raises:
        BackendError: at the end of the block, if a kernel does not compile, or the driver rejects it.
    """
    before = THREAD.asked
    with (
        ThreadPoolExecutor(min(_MOST_COMPILERS, os.cpu_count() or 1)) as pool,
        torch.autograd.set_multithreading_enabled(False),
        torch.autograd.set_detect_anomaly(False),
    ):
        asked = THREAD.asked = _Asked(pool)
        try:
            yield
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            THREAD.asked = before
        asked.finish()


def is_compiling() -> bool:
    """Whether this thread is in a block of ``compiling``."""
    return THREAD.asked is not None


def current_device() -> int:
    """``torch.cuda.current_device()`` at a third of its cost, for processes that already use CUDA."""
    return torch._C._cuda_getDevice()


def current_stream(device_index: int) -> int:
    """Raw handle of PyTorch's current stream on a device."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def rows_and_stride(x: Tensor) -> tuple[int, int] | None:
    """How many rows x has, all leading dimensions together, and the elements from one to the next.

    None where the rows do not have one stride, or the features are not adjacent.
    """
    features = x.shape[-1]
    if x.is_contiguous():
        return x.numel() // features, features
    if x.stride(-1) != 1 and features > 1:
        return None
    rows, stride = 1, features
    for size, step in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size > 1:
            if rows > 1 and step != rows * stride:
                return None
            rows, stride = rows * size, step if rows == 1 else stride
    return rows, stride


def in_rows(x: Tensor) -> tuple[Tensor, int, int]:
    """x, or a copy where its rows do not have one stride; and what ``rows_and_stride`` gives for it."""
    placed = rows_and_stride(x)
    return in_rows(x.clone(memory_format=torch.contiguous_format)) if placed is None else (x, *placed)


def float_bits(value: float) -> int:
    """A float32 as the integer of the same bits: launches take integers."""
    return struct.unpack("i", struct.pack("f", value))[0]
