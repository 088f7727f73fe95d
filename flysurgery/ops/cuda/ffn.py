"""A whole feed-forward block in one launch: ``x + scale * down(activation(up(norm(x))))``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.device import device_obstacle
from flysurgery.ops.cuda.ffn_float_image import pack_float_ffn
from flysurgery.ops.cuda.ffn_float_tiling import FloatFfnTiling, float_ffn_tiling
from flysurgery.ops.cuda.ffn_image import pack_ffn
from flysurgery.ops.cuda.ffn_tiling import ACTIVATIONS, FfnTiling, ffn_tiling
from flysurgery.ops.cuda.ffn_warp_tiling import warp_ffn_tiling
from flysurgery.ops.cuda.fused import readable
from flysurgery.ops.cuda.kept import kept
from flysurgery.ops.cuda.kernel import Kernel, current_device, current_stream, device_arch, float_bits, load_kernel
from flysurgery.ops.cuda.modes import HALVES, present_mode
from flysurgery.ops.cuda.notes import fresh
from flysurgery.ops.cuda.obstacles import shared_limit_of
from flysurgery.ops.cuda.tiling import MODES
from flysurgery.patterns import Architecture


def ffn_obstacle(
    up: Architecture, down: Architecture, mode: str | None, norm: bool, activation: str, residual: bool, device_index: int
) -> str | None:
    """Why the fused kernel cannot run a block on a device in a mode of ``mode_of``; None when it can."""
    limit, wgmma = shared_limit_of(device_index), _has_wgmma(device_index)
    return device_obstacle(device_index) or size_obstacle(up, down, mode, norm, activation, residual, limit, wgmma=wgmma)


def _has_wgmma(device_index: int) -> bool:
    return device_arch(device_index) == "sm_90a"


@lru_cache(maxsize=1024)
def size_obstacle(
    up: Architecture, down: Architecture, mode: str | None, norm: bool, activation: str, residual: bool, shared_limit: int, *, wgmma: bool
) -> str | None:
    """Why the kernel of devices with wgmma, or without, has no tiling for a block; None when it has one."""
    if mode not in MODES:
        return "the fused FFN takes float16, bfloat16 and float32"
    if mode not in HALVES and not (wgmma and norm):
        return "the fused FFN takes float32 behind a norm, which bounds the rows, on devices of compute capability 9.0"
    if activation not in ACTIVATIONS:
        return f"the fused FFN has the activations {', '.join(ACTIVATIONS)}, not '{activation}'"
    if residual and up.in_features != down.out_features:
        return f"a residual needs as many outputs as inputs, got {down.out_features} and {up.in_features}"
    tile = _tile(up, down, mode, shared_limit, scaled=True, wgmma=wgmma)
    return tile if isinstance(tile, str) else None


def _tile(up: Architecture, down: Architecture, mode: str, shared_limit: int, *, scaled: bool, wgmma: bool) -> FfnTiling | str:
    if mode not in HALVES:
        return float_ffn_tiling(up, down, mode, shared_limit, scaled=scaled)
    find = ffn_tiling if wgmma else warp_ffn_tiling
    return find(up, down, shared_limit, scaled=scaled)


class FusedFfn:
    """The compiled kernel of one block: its architectures, mode, activation and options, on one device."""

    def __init__(self, tile: FfnTiling, mode: str, activation: str, norm: bool, residual: bool, device_index: int) -> None:
        self.tile, self.device_index = tile, device_index
        defines = {
            **tile.defines(),
            "MODE": MODES.index(mode),
            "ACTIVATION": ACTIVATIONS[activation],
            "NORM": int(norm),
            "RESIDUAL": int(residual),
        }
        self._kernel: Kernel = load_kernel(f"{tile.kernel}.cu", defines, name=tile.kernel, device_index=device_index)
        self._blocks = torch.cuda.get_device_properties(device_index).multi_processor_count
        self._shared_bytes = tile.shared_bytes  # which takes longer to find than a block to run

    def run(
        self, x: Tensor, image: Tensor, eps: float, early: bool = False
    ) -> Tensor:  # shapes: (rows, in_features), (bytes,) -> (rows, out_features)
        """Launch on the current stream. ``early``: the image was there before the kernel queued last, and is read while it still runs."""
        rows = x.shape[0]
        units = -(-rows // self.tile.unit_rows)
        written = units * self.tile.unit_rows if self.tile.whole_units else rows
        y = fresh((written, self.tile.factors[3].out_features), x.dtype, x.device)[:rows]
        if rows:
            self._kernel.launch(
                (min(units, self._blocks), 1, 1),
                (self.tile.threads, 1, 1),
                self._shared_bytes,
                current_stream(self.device_index),
                *(x, image, y, rows, x.stride(0) * x.element_size(), float_bits(eps)),
                early=early,
            )
        return y


@lru_cache(maxsize=256)
def _fused_ffn(
    up_shapes: tuple[torch.Size, ...],
    down_shapes: tuple[torch.Size, ...],
    mode: str,
    activation: str,
    norm: bool,
    scaled: bool,
    residual: bool,
    device_index: int,
    wgmma: bool | None,
) -> FusedFfn:
    up, down, limit = Architecture.of(*up_shapes), Architecture.of(*down_shapes), shared_limit_of(device_index)
    wgmma = _has_wgmma(device_index) if wgmma is None else wgmma
    obstacle = device_obstacle(device_index) or size_obstacle(up, down, mode, norm, activation, residual, limit, wgmma=wgmma)
    tile = _tile(up, down, mode, limit, scaled=scaled, wgmma=wgmma)
    if obstacle is not None or isinstance(tile, str):
        raise BackendError(obstacle or str(tile))
    return FusedFfn(tile, mode, activation, norm, residual, device_index)


def run_ffn(
    x: Tensor,  # shape: (rows, in_features)
    norm: Sequence[Tensor | None] | None,  # weight and bias; None for no norm
    eps: float,
    up: Sequence[Tensor],
    up_bias: Tensor | None,
    down: Sequence[Tensor],
    down_bias: Tensor | None,
    activation: str,
    scale: Tensor | None,
    residual: bool,
    wgmma: bool | None = None,
) -> Tensor:  # shape: (rows, out_features)
    """Find the kernel and the packed weights, and run them on the current stream.

    ``wgmma`` chooses between the kernels; None takes the one for this device.

    Raises:
        BackendError: the kernel cannot run this; ``ffn_obstacle`` tells beforehand.
    """
    device_index = x.device.index
    if device_index != current_device():
        with torch.cuda.device(device_index):
            return run_ffn(x, norm, eps, up, up_bias, down, down_bias, activation, scale, residual, wgmma)
    shapes = tuple([factor.shape for factor in up]), tuple([factor.shape for factor in down])
    mode = present_mode(x.dtype)
    kernel = _fused_ffn(*shapes, mode or "", activation, norm is not None, scale is not None, residual, device_index, wgmma)
    parts = (*up, *down, up_bias, down_bias, *(norm or (None, None)), scale)
    sources = tuple([part for part in parts if part is not None])

    def make() -> tuple[Tensor, ...]:
        factors = (up[1], up[0], down[1], down[0])
        pair = (None, None) if norm is None else (norm[0], norm[1])
        if isinstance(kernel.tile, FloatFfnTiling):
            return (pack_float_ffn(kernel.tile, factors, (up_bias, down_bias), pair, scale),)
        return (pack_ffn(kernel.tile, factors, (up_bias, down_bias), pair, scale, x.dtype),)

    present = tuple([part is not None for part in parts])
    (image,), early = kept(("ffn", kernel, x.dtype, present), sources, make)
    return kernel.run(readable(x), image, eps, early=early)
