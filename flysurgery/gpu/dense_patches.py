"""The dense product of patches of images, read where they lie, in one launch; an operator that compiled graphs can hold."""

from __future__ import annotations

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
    mode: str,
) -> Tensor:  # shape: (images, patches, features)
    """The convolution of patches that do not overlap, which are read where they lie, in one launch on the current stream.

    Raises:
        BackendError: there is no tiling, as ``patches_obstacle`` tells beforehand, or the kernel does not compile or launch.
    """
    device_index = images.device.index
    (count, channels, height, width), (features, _, high, wide) = images.shape, weight.shape
    images = images if images.is_contiguous() and images.data_ptr() % 16 == 0 else images.clone(memory_format=torch.contiguous_format)
    patches = (height // high) * (width // wide)
    rows = count * patches
    y = fresh((count, patches, features), images.dtype, images.device)
    if rows == 0:
        return y
    tile, kernel, sizes = launcher(channels * high * wide, features, mode, "none", False, Patch(high, wide), rows, device_index)
    sources = (weight,) if bias is None else (weight, bias)
    token = ("dense linear", tile, bias is None, True)
    (image, columns), early = derived_for_launch(token, sources, lambda: pack_dense(tile, weight, bias, None))
    strides = width * images.element_size(), 0, height
    kernel.launch(*sizes, current_stream(device_index), images, image, columns, None, y, rows, *strides, early=early)
    return y


def _on_device(images: Tensor, weight: Tensor, bias: Tensor | None, mode: str) -> Tensor:
    with torch.cuda.device(images.device):
        return run_patches(images, weight, bias, mode)


def _fake(images: Tensor, weight: Tensor, bias: Tensor | None, mode: str) -> Tensor:
    (count, _, height, width), (features, _, high, wide) = images.shape, weight.shape
    return images.new_empty((count, (height // high) * (width // wide), features))


_library = torch.library.Library("flysurgery", "FRAGMENT")
_library.define("dense_patches(Tensor images, Tensor weight, Tensor? bias, str mode) -> Tensor")
_library.impl("dense_patches", _on_device, "CUDA")
torch.library.register_fake("flysurgery::dense_patches", _fake, lib=_library)
