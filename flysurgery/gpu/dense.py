"""A dense linear with its epilogue, ``residual + activation(scale * (x Wᵀ + bias))``, in one launch; also gated, and of patches."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.gpu.dense_tiling import BATCH_BYTES, NO_PATCH, DenseTiling, Patch, StreamTiling, dense_tiling, stream_tiling
from flysurgery.gpu.device import multiprocessors_of, shared_limit_of
from flysurgery.gpu.fused_linear import readable
from flysurgery.gpu.kernel import Kernel, Sizes, current_stream, kernel_of
from flysurgery.gpu.modes import WEIGHT_SHIFT, dtype_of, in_halves, scaled_rows
from flysurgery.gpu.operands import Dense, present
from flysurgery.gpu.recording import fresh
from flysurgery.gpu.tensor_map import boxes
from flysurgery.gpu.weight_cache import derived, derived_for_launch

_NARROW = 64


def dense_obstacle(
    in_features: int, out_features: int, mode: str, device_index: int, *, gated: bool = False, fast: bool = False
) -> str | None:
    """Why the kernel cannot run a dense layer, or a gate and a value with this many outputs together; None where it can.

    ``fast``: also where PyTorch's product, followed by separate launches for the epilogue, is faster. With narrower tiles x is read more
    often from the L2 cache. Float32 by pairs is faster than PyTorch in all cases.
    """
    tile = dense_tiling(in_features, out_features, mode, shared_limit_of(device_index), gated)
    if isinstance(tile, str):
        return tile
    if not fast or mode == "fp32" or tile.columns > _NARROW:
        return None
    return f"the weights of {in_features} inputs leave the dense kernel tiles of {tile.columns} columns, for which x is read too often"


def run_dense(
    x: Tensor,  # shape: (rows, in_features)
    linear: Dense,
    activation: str,
    residual: Tensor | None,  # shape: (rows, out_features)
    scale: Tensor | None,  # shape: (out_features,)
    mode: str,
) -> Tensor:  # shape: (rows, out_features)
    """``residual + activation(scale * linear(x))`` in one launch on the current stream; sums and epilogue are float32.

    Weights may be wider than x; they are rounded when they are packed. x and the residual are read once from device memory.

    Raises:
        BackendError: there is no tiling, as ``dense_obstacle`` tells beforehand, or the kernel does not compile or launch.
    """
    device_index, outputs = x.device.index, linear.weight.shape[0]
    x, residual = readable(x), None if residual is None else readable(residual)
    streamed = streamed_for(x.shape[0], x.shape[1], outputs, mode, device_index)
    if streamed is not None:
        return _launch_streamed(streamed, x, linear, activation, residual, scale, None)
    y = fresh((x.shape[0], outputs), x.dtype, x.device)
    if x.shape[0] == 0:
        return y
    tile, kernel, sizes = _launcher((*x.shape, outputs), mode, activation, residual is not None, device_index)
    (image, columns), early = _packed(tile, linear, scale)
    strides = [0 if part is None else part.stride(0) * part.element_size() for part in (x, residual)]
    kernel.launch(*sizes, current_stream(device_index), x, image, columns, residual, y, x.shape[0], *strides, 0, early=early)
    return y


def run_dense_moments(
    x: Tensor,  # shape: (rows, in_features)
    linear: Dense,
    residual: Tensor,  # shape: (rows, out_features)
    scale: Tensor | None,  # shape: (out_features,)
    mode: str,
) -> tuple[Tensor, Tensor]:  # shapes: (rows, out_features), (rows, parts, 2) float32
    """``residual + scale * linear(x)``, and the mean and squared deviations of parts of equal size of its rows.

    Raises:
        BackendError: weights do not stream here, as ``streamed_for`` tells beforehand, or the kernel does not compile or launch.
    """
    device_index = x.device.index
    streamed = streamed_for(x.shape[0], *linear.sizes, mode, device_index)
    if streamed is None:
        raise BackendError(f"moments are left behind where weights stream, which they do not for {x.shape[0]} rows in mode '{mode}'")
    moments = fresh((x.shape[0], streamed.column_tiles, 2), torch.float32, x.device)
    return _launch_streamed(streamed, readable(x), linear, "none", readable(residual), scale, moments), moments


def run_dense_gated(
    x: Tensor,  # shape: (rows, in_features)
    weights: Sequence[Tensor],  # shapes: (out_features, in_features) of gate and value, or (2 * out_features, in_features) of both
    biases: Sequence[Tensor],  # shapes: (out_features,), or (2 * out_features,) of both, or none
    gate: int,
    activation: str,
    mode: str,
) -> Tensor:  # shape: (rows, out_features)
    """``activation(gate) * value`` in one launch on the current stream; sums and epilogue are float32.

    ``gate`` is the index of the gate among the two weights, or among the halves of the one.

    Raises:
        BackendError: as ``run_dense``.
    """
    device_index, x = x.device.index, readable(x)
    (rows, in_features), outputs = x.shape, sum(weight.shape[0] for weight in weights)
    y = fresh((rows, outputs // 2), x.dtype, x.device)
    if rows == 0:
        return y
    tile, kernel, sizes = _launcher((rows, in_features, outputs), mode, activation, False, device_index, gated=True)

    def make() -> tuple[Tensor, ...]:
        return pack_dense(tile, _in_turn(tile, weights, gate), _in_turn(tile, biases, gate) if biases else None, None)

    image, columns = derived(("dense gated", tile, gate, len(biases)), (*weights, *biases), make, inference=True)
    kernel.launch(*sizes, current_stream(device_index), x, image, columns, None, y, rows, x.stride(0) * x.element_size(), 0, 0)
    return y


def _in_turn(tile: DenseTiling, parts: Sequence[Tensor], gate: int) -> Tensor:
    """Alternates outputs of the gate and of the value, half a block's columns each."""
    halves = torch.cat([part.detach() for part in parts]).unflatten(0, (2, -1, tile.columns // 2))
    return torch.stack((halves[gate], halves[1 - gate]), dim=1).flatten(0, 2)


@lru_cache(maxsize=1024)
def _launcher(
    sizes: tuple[int, int, int], mode: str, activation: str, residual: bool, device_index: int, patch: Patch = NO_PATCH, gated: bool = False
) -> tuple[DenseTiling, Kernel, Sizes]:
    """The tiling for this many rows, inputs and outputs, its kernel, and the launch: blocks, threads and shared memory.

    Raises:
        BackendError: there is no tiling.
    """
    tile = dense_tiling(*sizes[1:], mode, shared_limit_of(device_index), gated)
    if isinstance(tile, str):
        raise BackendError(tile)
    launch = (tile.blocks(sizes[0], multiprocessors_of(device_index)), 1, 1), (32 * tile.warps, 1, 1), tile.shared_bytes
    return tile, kernel_of(tile, device_index, activation, residual, patch), launch


def _launch_streamed(
    tile: StreamTiling,
    x: Tensor,
    linear: Dense,
    activation: str,
    residual: Tensor | None,
    scale: Tensor | None,
    moments: Tensor | None,  # shape: (rows, parts, 2), to be filled
) -> Tensor:
    rows, device_index = x.shape[0], x.device.index
    y = fresh((rows, tile.out_features), x.dtype, x.device)
    (image, columns), early = _packed(tile, linear, scale)
    kernel_of(tile, device_index, activation, residual is not None, NO_PATCH, moments is not None).launch(
        (tile.blocks(rows, multiprocessors_of(device_index)), 1, 1),
        (32 * tile.warps, 1, 1),
        tile.shared_bytes,
        current_stream(device_index),
        boxes(x, tile.rows),
        boxes(y if residual is None else residual, *tile.brought, swizzled=False),
        boxes(y, *tile.fetched, swizzled=False),
        *(image, columns, moments, rows),
        early=early,
    )
    return y


def _packed(tile: DenseTiling, linear: Dense, scale: Tensor | None) -> tuple[tuple[Tensor, ...], bool]:
    """What ``pack_dense`` gives, and whether it existed before the last queued kernel."""
    token = ("dense linear", tile, linear.bias is None, scale is None)
    return derived_for_launch(token, present(*linear, scale), lambda: pack_dense(tile, *linear, scale))


def pack_dense(
    tile: DenseTiling,
    weight: Tensor,  # shape: (out_features, *)
    bias: Tensor | None,  # shape: (out_features,)
    scale: Tensor | None,  # shape: (out_features,)
) -> tuple[Tensor, Tensor]:  # shapes: (bytes,) uint8, (2, out_features) float32
    """The weights as the kernel reads them, and the factors and summands of the sums."""
    wide = weight.detach().flatten(1).float()
    factor = wide.new_ones(tile.out_features) if scale is None else scale.detach().float()
    shift = wide.new_zeros(tile.out_features) if bias is None else bias.detach().float()
    shift = shift if scale is None else shift * factor
    if tile.element_bytes == 4:
        wide, exponent = scaled_rows(wide)
        factor = torch.ldexp(factor, WEIGHT_SHIFT - exponent)
    # 8 * run columns are (lane, tile, 2) in y and (tile, lane, 2) here; 16 floats are (lane, half, 2) in x and (half, lane, 2) here
    inputs = (tile.batch // 16, 4, 2, 2) if tile.element_bytes == 4 else (tile.batch // 16, 2, 4, 2)
    split = wide.reshape(tile.out_features // tile.columns, -1, 4, tile.run, 2, tile.in_features // tile.batch, *inputs)
    half, lane = (8, 7) if tile.element_bytes == 4 else (7, 8)
    panels = split.permute(0, 5, 6, half, 1, 3, 2, 4, lane, 9)  # tile, batch, step, k8, columns, 8 inputs
    half = torch.bfloat16 if tile.mode == "bf16" else torch.float16
    if tile.images == 1:
        image = panels.to(half, memory_format=torch.contiguous_format)  # moves and rounds in one launch
    else:
        image = torch.stack(in_halves(panels, tile.images), dim=2)
    return image.reshape(-1).view(torch.uint8), torch.stack((factor, shift))


@lru_cache(maxsize=1024)
def streamed_for(rows: int, in_features: int, out_features: int, mode: str, device_index: int) -> StreamTiling | None:
    """The tiling of streaming weights; None where there is none, or too few rows to give every multiprocessor a tile."""
    limit = shared_limit_of(device_index)
    tile = dense_tiling(in_features, out_features, mode, limit)
    streamed = None if isinstance(tile, str) else stream_tiling(tile, limit)
    return None if streamed is None or streamed.tiles(rows) < multiprocessors_of(device_index) else streamed


def patches_obstacle(high: int, wide: int, channels: int, features: int, mode: str, device_index: int) -> str | None:
    """Why the kernel cannot read patches of this many pixels where they lie; None where it can."""
    line = wide * dtype_of(mode).itemsize
    if line % 16 or BATCH_BYTES % line or high * line % BATCH_BYTES:
        return f"the dense kernel reads patches whose lines are 16, 32, 64 or 128 bytes, got {high}x{wide} pixels in mode '{mode}'"
    return dense_obstacle(channels * high * wide, features, mode, device_index)


def run_patches(
    images: Tensor,  # shape: (images, channels, height, width)
    weight: Tensor,  # shape: (features, channels, patch height, patch width)
    bias: Tensor | None,  # shape: (features,)
    position: Tensor | None,  # shape: (*, patches, features), or (*, tokens + patches, features)
    prefix: Sequence[Tensor],  # shapes: (*, some of the tokens, features)
    mode: str,
) -> Tensor:  # shape: (images, tokens + patches, features)
    """The convolution of patches that do not overlap, which are read where they lie, in one launch on the current stream.

    The position is added to the float32 sums. The tokens of ``prefix``, with their position if there is one, are written before each
    image's patches.

    Raises:
        BackendError: there is no tiling, as ``patches_obstacle`` tells beforehand, or the kernel does not compile or launch.
    """
    device_index = images.device.index
    (count, channels, height, width), (features, _, high, wide) = images.shape, weight.shape
    images = images if images.is_contiguous() and images.data_ptr() % 16 == 0 else images.clone(memory_format=torch.contiguous_format)
    patches, patch = (height // high) * (width // wide), Patch(high, wide, sum(tokens.shape[-2] for tokens in prefix))
    rows, inputs = count * patches, channels * high * wide
    y = fresh((count, patch.prefix + patches, features), images.dtype, images.device)
    if rows == 0:
        return y
    tile, kernel, sizes = _launcher((rows, inputs, features), mode, "none", position is not None, device_index, patch)

    def make() -> tuple[Tensor, ...]:
        added = [part for part in rows_of_image(position, prefix, patches) if part is not None]
        return *pack_dense(tile, weight, bias, None), *([torch.cat(added)] if added else [])

    sources = (weight, *[part for part in (bias, position, *prefix) if part is not None])
    (image, columns, *added), early = derived_for_launch(("dense patches", tile, patches, bias is None, position is None), sources, make)
    strides = width * images.element_size(), features * images.element_size(), height
    kernel.launch(*sizes, current_stream(device_index), images, image, columns, added[0] if added else None, y, rows, *strides, early=early)
    return y


def rows_of_image(position: Tensor | None, prefix: Sequence[Tensor], patches: int) -> tuple[Tensor | None, Tensor | None]:
    """The rows before an image's patches, with their position where it has one for them, and the rows that are added to patches."""
    before = torch.cat([tokens.detach().flatten(0, -2) for tokens in prefix]) if prefix else None
    if position is None:
        return before, None
    rows = position.detach().flatten(0, -2)
    covered = len(rows) - patches
    return (before + rows[:covered] if before is not None and covered else before), rows[covered:]
