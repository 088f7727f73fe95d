"""A dense linear with its bias, layer scale and residual in one launch: ``residual + scale * (x Wᵀ + bias)``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flysurgery.ops.cuda.fused import aligned
from flysurgery.ops.cuda.kernel import Kernel, current_stream, device_arch, load_kernel
from flysurgery.ops.cuda.modes import dtype_of
from flysurgery.ops.cuda.obstacles import shared_limit_of
from flysurgery.ops.derived import derived

_MODES = ("fp16", "bf16", "tf32", "fp32")
_BATCH_BYTES = 128
_TARGET = 11  # kTarget of kernels/scale.cuh


@dataclass(frozen=True)
class DenseTiling:
    """Sizes of ``kernels/dense_linear.cu``.

    Attributes:
        warps: of a block, 16 rows each.
        columns: outputs of a block, whose weights it keeps in shared memory.
        stages: batches of x in shared memory, a warp.
        wgmma: whether products are made by warpgroups.
    """

    in_features: int
    out_features: int
    mode: str
    warps: int
    columns: int
    stages: int
    wgmma: bool

    @property
    def element_bytes(self) -> int:
        return dtype_of(self.mode).itemsize

    @property
    def planes(self) -> int:
        """Images of the weights: hi and lo where fp32 is split in pairs."""
        return 2 if self.mode == "fp32" else 1

    @property
    def batch(self) -> int:
        """Inputs of a batch."""
        return _BATCH_BYTES // self.element_bytes

    @property
    def run(self) -> int:
        """Tiles of 8 columns of which a lane's columns are adjacent: 16 bytes."""
        return 8 // self.element_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        weights = self.in_features * self.columns * 2 * self.planes
        return weights + self.warps * self.stages * 16 * _BATCH_BYTES + self.columns * 8 + self.in_features // self.batch * 8

    @property
    def registers(self) -> int:
        """Registers a thread, estimated: sums, and what stands beside them."""
        return self.columns // 2 * (2 if self.element_bytes == 4 else 1) + 56

    def blocks(self, rows: int, multiprocessors: int) -> int:
        """How many blocks to launch."""
        tiles, unit = self.out_features // self.columns, 64 if self.wgmma else 16
        return tiles * max(1, min(-(-rows // unit), multiprocessors // tiles))

    def defines(self, residual: bool) -> dict[str, int]:
        """The macros that the kernel is compiled with."""
        return {
            "IN": self.in_features,
            "OUT": self.out_features,
            "MODE": _MODES.index(self.mode),
            "WGMMA": int(self.wgmma),
            "RESIDUAL": int(residual),
            "WARPS": self.warps,
            "COLUMNS": self.columns,
            "STAGES": self.stages,
        }


def dense_tiling(in_features: int, out_features: int, mode: str, shared_limit: int, wgmma: bool) -> DenseTiling | str:
    """The tiling for a layer, or why there is none: the widest column tile, then the most warps and batches on their way."""
    if mode not in _MODES:
        return f"the dense kernel has no mode '{mode}', only {', '.join(_MODES)}"
    tile = DenseTiling(in_features, out_features, mode, 0, 0, 0, wgmma)
    if in_features % tile.batch or out_features % (8 * tile.run):
        return f"the dense kernel takes multiples of {tile.batch} inputs and {8 * tile.run} outputs, got {in_features} and {out_features}"
    for columns in range(min(out_features, 192), 0, -8 * tile.run):
        for warps in (12, 8, 4):
            for stages in (4, 3, 2):
                tile = DenseTiling(in_features, out_features, mode, warps, columns, stages, wgmma)
                if out_features % columns == 0 and tile.shared_bytes <= shared_limit and tile.registers * warps * 32 <= 65536:
                    return tile
    return f"the weights of {in_features} inputs of the narrowest tile exceed {shared_limit} bytes of shared memory"


def dense_obstacle(in_features: int, out_features: int, mode: str, device_index: int) -> str | None:
    """Why the kernel cannot run a dense layer; None where it can."""
    tile = _tiling(in_features, out_features, mode, device_index)
    return tile if isinstance(tile, str) else None


def run_dense_linear(
    x: Tensor,  # shape: (rows, in_features)
    weight: Tensor,  # shape: (out_features, in_features)
    bias: Tensor | None,  # shape: (out_features,)
    residual: Tensor | None,  # shape: (rows, out_features)
    scale: Tensor | None,  # shape: (out_features,)
    mode: str,
) -> Tensor:  # shape: (rows, out_features)
    """``residual + scale * (x @ weight.T + bias)`` in one launch on the current stream; sums and epilogue are float32.

    Weights may be wider than x; they are rounded when they are packed. x and the residual are read once from device memory.

    Raises:
        BackendError: the kernel does not compile or launch; ``dense_obstacle`` tells beforehand whether it takes the sizes.
    """
    device_index = x.device.index
    if device_index != torch.cuda.current_device():
        with torch.cuda.device(device_index):
            return run_dense_linear(x, weight, bias, residual, scale, mode)
    rows = x.shape[0]
    y = x.new_empty((rows, weight.shape[0]))
    if rows == 0:
        return y
    tile = _tiling(weight.shape[1], weight.shape[0], mode, device_index)
    assert isinstance(tile, DenseTiling)  # else there was an obstacle
    sources = tuple(part for part in (weight, bias, scale) if part is not None)
    image, columns = derived(("dense linear", tile, bias is None, scale is None), sources, lambda: pack_dense(tile, weight, bias, scale))
    x = x if aligned(x) else x.clone(memory_format=torch.contiguous_format)
    if residual is not None and not aligned(residual):
        residual = residual.clone(memory_format=torch.contiguous_format)
    _kernel(tile, residual is not None, device_index).launch(
        (tile.blocks(rows, torch.cuda.get_device_properties(device_index).multi_processor_count), 1, 1),
        (32 * tile.warps, 1, 1),
        tile.shared_bytes,
        current_stream(device_index),
        *(x, image, columns, residual, y, rows, x.stride(0) * x.element_size()),
        0 if residual is None else residual.stride(0) * residual.element_size(),
    )
    return y


def pack_dense(
    tile: DenseTiling,
    weight: Tensor,  # shape: (out_features, in_features)
    bias: Tensor | None,  # shape: (out_features,)
    scale: Tensor | None,  # shape: (out_features,)
) -> tuple[Tensor, Tensor]:  # shapes: (bytes,) uint8, (2, out_features) float32
    """The weights as the kernel reads them, and what the sums are multiplied by and what is added."""
    wide = weight.detach().float()
    factor = wide.new_ones(tile.out_features) if scale is None else scale.detach().float()
    shift = wide.new_zeros(tile.out_features) if bias is None else bias.detach().float() * factor
    if tile.element_bytes == 4:
        largest = torch.where(wide.isfinite(), wide.abs(), 0.0).amax(dim=1, keepdim=True)
        exponent = (_TARGET + 1 - torch.frexp(largest).exponent).clamp(-115, 123)  # brings it to [2^11, 2^12)
        wide = torch.ldexp(wide, exponent)
        factor = torch.ldexp(factor, _TARGET - exponent[:, 0])
    # 8 * run columns are (lane, tile, 2) in y and (tile, lane, 2) here; 16 inputs of floats are (lane, half, 2) in x and (half, lane, 2) here
    inputs = (tile.batch // 16, 4, 2, 2) if tile.element_bytes == 4 else (tile.batch // 16, 2, 4, 2)
    split = wide.reshape(tile.out_features // tile.columns, -1, 4, tile.run, 2, tile.in_features // tile.batch, *inputs)
    half, lane = (8, 7) if tile.element_bytes == 4 else (7, 8)
    panels = split.permute(0, 5, 6, half, 1, 3, 2, 4, lane, 9)  # tile, batch, step, k8, columns, 8 inputs
    high = panels.to(torch.bfloat16 if tile.mode == "bf16" else torch.float16)
    images = [high] if tile.planes == 1 else [high, (panels - high.float()).half()]
    return torch.stack(images, dim=2).reshape(-1).view(torch.uint8), torch.stack((factor, shift))


@lru_cache(maxsize=256)
def _tiling(in_features: int, out_features: int, mode: str, device_index: int) -> DenseTiling | str:
    return dense_tiling(in_features, out_features, mode, shared_limit_of(device_index), device_arch(device_index) == "sm_90a")


@lru_cache(maxsize=256)
def _kernel(tile: DenseTiling, residual: bool, device_index: int) -> Kernel:
    return load_kernel("dense_linear.cu", tile.defines(residual), name="dense_linear", device_index=device_index)


def _fake_dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, scale: Tensor | None, mode: str) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


_library = torch.library.Library("flysurgery", "FRAGMENT")
_library.define("dense_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? scale, str mode) -> Tensor")
_library.impl("dense_linear", run_dense_linear, "CUDA")
torch.library.register_fake("flysurgery::dense_linear", _fake_dense_linear, lib=_library)
