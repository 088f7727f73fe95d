"""A whole feed-forward block in one launch: ``x + scale * down(activation(up(norm(x))))``."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.gpu.device import multiprocessors_of, shared_limit_of
from flysurgery.gpu.ffn_float_tiling import FloatFfnTiling, float_ffn_tiling
from flysurgery.gpu.ffn_image import pack_ffn, pack_float_ffn
from flysurgery.gpu.ffn_tiling import ROWS_OF_WARPGROUP, FfnTiling, ffn_tiling
from flysurgery.gpu.fused_linear import readable
from flysurgery.gpu.kernel import Kernel, current_stream, float_bits, load_kernel
from flysurgery.gpu.modes import HALVES, macros, mode_for
from flysurgery.gpu.parts import FusedFactors, Norm, present
from flysurgery.gpu.replay.recording import fresh
from flysurgery.gpu.weight_cache import derived_for_launch
from flysurgery.patterns import Architecture


@lru_cache(maxsize=1024)
def ffn_obstacle(up: Architecture, down: Architecture, mode: str, norm: bool, shared_limit: int) -> str | None:
    """Why the fused kernel cannot run a block; None when it can."""
    if mode not in HALVES and not norm:
        return "the fused FFN takes float32 behind a norm, which bounds the rows"
    tile = _tile(up, down, mode, shared_limit, scaled=True)
    return tile if isinstance(tile, str) else None


def _tile(up: Architecture, down: Architecture, mode: str, shared_limit: int, *, scaled: bool) -> FfnTiling | str:
    if mode not in HALVES:
        return float_ffn_tiling(up, down, mode, shared_limit, scaled=scaled)
    return ffn_tiling(up, down, shared_limit, scaled=scaled)


@lru_cache(maxsize=256)
def _prepared(
    up_shapes: tuple[torch.Size, ...],
    down_shapes: tuple[torch.Size, ...],
    mode: str,
    activation: str,
    norm: bool,
    scaled: bool,
    residual: bool,
    device_index: int,
) -> tuple[FfnTiling, Kernel, int]:
    """The tiling of a block, its kernel, and the shared memory of a launch, which takes longer to compute than a block to run."""
    up, down = Architecture.of(*up_shapes), Architecture.of(*down_shapes)
    limit = shared_limit_of(device_index)
    obstacle, tile = ffn_obstacle(up, down, mode, norm, limit), _tile(up, down, mode, limit, scaled=scaled)
    if obstacle is not None or isinstance(tile, str):
        raise BackendError(obstacle or str(tile))
    options = macros(mode=mode, activation=activation, norm=norm, residual=residual)
    return tile, load_kernel(tile.kernel, {**tile.defines(), **options}, device_index), tile.shared_bytes


def run_ffn(
    x: Tensor,  # shape: (rows, in_features)
    norm: Norm | None,
    up: FusedFactors,
    down: FusedFactors,
    activation: str,
    scale: Tensor | None,
    residual: bool,
) -> Tensor:  # shape: (rows, out_features)
    """Find the kernel and the packed weights, and launch it on the current stream.

    Raises:
        BackendError: the kernel cannot run this; ``ffn_obstacle`` tells beforehand.
    """
    device_index = x.device.index
    shapes = tuple([factor.shape for factor in up.factors]), tuple([factor.shape for factor in down.factors])
    tile, kernel, shared_bytes = _prepared(*shapes, mode_for(x), activation, norm is not None, scale is not None, residual, device_index)
    norm_weight, norm_bias, eps = norm or (None, None, 0.0)
    (ups, up_bias), (downs, down_bias) = up, down
    parts = (up_bias, down_bias, norm_weight, norm_bias, scale)

    def make() -> tuple[Tensor, ...]:
        factors, affine = (ups[1], ups[0], downs[1], downs[0]), (norm_weight, norm_bias)
        if isinstance(tile, FloatFfnTiling):
            return (pack_float_ffn(tile, factors, (up_bias, down_bias), affine, scale),)
        return (pack_ffn(tile, factors, (up_bias, down_bias), affine, scale, x.dtype),)

    token = ("ffn", kernel, x.dtype, *[part is not None for part in parts])
    (image,), early = derived_for_launch(token, present(*ups, *downs, *parts), make)
    x, rows, units = readable(x), x.shape[0], -(-x.shape[0] // ROWS_OF_WARPGROUP)
    written = units * ROWS_OF_WARPGROUP if tile.whole_units else rows
    y = fresh((written, tile.factors[3].out_features), x.dtype, x.device)[:rows]
    if rows:
        kernel.launch(
            (min(units, multiprocessors_of(device_index)), 1, 1),
            (tile.threads, 1, 1),
            shared_bytes,
            current_stream(device_index),
            *(x, image, y, rows, x.stride(0) * x.element_size(), float_bits(eps)),
            early=early,
        )
    return y
