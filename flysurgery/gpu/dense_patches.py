"""The dense product of patches of images, read where they lie, with position and the tokens before them, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flysurgery.gpu.dense import dense_obstacle, launcher, pack_dense
from flysurgery.gpu.dense_tiling import BATCH_BYTES, Patch
from flysurgery.gpu.kernel import current_stream
from flysurgery.gpu.modes import dtype_of
from flysurgery.gpu.replay.recording import fresh
from flysurgery.gpu.weight_cache import derived_for_launch


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
    tile, kernel, sizes = launcher(inputs, features, mode, "none", position is not None, patch, rows, device_index)

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
