"""The embedding of patches of images as one product, and why not."""

from __future__ import annotations

from functools import partial
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.dense import dense_patches_operator, patches_obstacle
from flysurgery.ops.cuda.device import device_obstacle
from flysurgery.ops.cuda.modes import present_mode
from flysurgery.ops.decided import decided
from flysurgery.ops.epilogue import common_obstacle
from flysurgery.ops.stage import Stage, Way


class Patches(NamedTuple):
    """The operands of ``patch_embedding`` beside the images, in the same order."""

    weight: Tensor
    bias: Tensor | None
    position: Tensor | None = None
    prefix: Tensor | None = None


def patch_embedding(
    images: Tensor,  # shape: (images, channels, height, width)
    weight: Tensor,  # shape: (features, channels, patch height, patch width)
    bias: Tensor | None,  # shape: (features,)
    position: Tensor | None = None,  # shape: (patches, features)
    prefix: Tensor | None = None,  # shape: (tokens, features)
) -> Tensor:  # shape: (images, tokens + patches, features)
    """A convolution of patches that do not overlap, as one matrix product that reads the pixels where they lie.

    ``position`` is added to the patches, the rows of ``prefix`` stand before those of each image; with one of these, or patches
    that the kernel does not read, it is one copy of the pixels and PyTorch's product.

    Raises:
        BackendError: this is no such convolution; the message is what ``patch_embedding_reason`` answers.
    """
    way = patch_embedding_way(images, weight, bias, position, prefix)
    if isinstance(way, str):
        raise BackendError(way)
    return way.run()


def patch_embedding_way(
    images: Tensor, weight: Tensor, bias: Tensor | None, position: Tensor | None = None, prefix: Tensor | None = None
) -> Way | str:
    """How ``patch_embedding`` computes this, or why it does not take it."""
    patches = Patches(weight, bias, position, prefix)
    present = [part for part in patches if part is not None]
    asked = "patch_embedding", *[part is None for part in patches]
    stages = decided(lambda: _stages(images, patches), (images, *present), *asked)
    return stages if isinstance(stages, str) else Way(stages, images, patches)


def _stages(images: Tensor, patches: Patches) -> tuple[Stage, ...] | str:
    """By which product, or why by none."""
    weight, _, position, prefix = patches
    obstacle = _obstacle(images, patches)
    if obstacle is not None:
        return obstacle
    mode = present_mode(images.dtype)
    alone = position is None and prefix is None
    if alone and mode is not None:
        features, channels, high, wide = map(index, weight.shape)
        if _patches_obstacle(features, channels, high, wide, mode, images.device.index) is None:
            return (Stage((), partial(_in_place, mode=mode)),)
    return (Stage((), _copied),)


def _in_place(y: Tensor, images: Tensor, patches: Patches, mode: str) -> Tensor:
    tokens = dense_patches_operator(images, patches.weight, patches.bias, mode)
    return tokens.view(len(images), -1, len(patches.weight))


def _copied(y: Tensor, images: Tensor, patches: Patches) -> Tensor:
    weight, bias, position, prefix = patches
    features, channels, high, wide = weight.shape
    count, _, height, width = images.shape
    pixels = images.reshape(count, channels, height // high, high, width // wide, wide).permute(0, 2, 4, 1, 3, 5)
    pixels = pixels.reshape(count, -1, channels * high * wide)
    offset = torch.zeros((1, features), dtype=images.dtype, device=images.device) if bias is None else bias[None]
    offset = (offset if position is None else position + offset).expand(count, pixels.shape[1], -1)
    matrix = weight.reshape(features, -1).t().expand(count, -1, -1)
    if prefix is None:
        return torch.baddbmm(offset, pixels, matrix)
    tokens = images.new_empty((count, len(prefix) + pixels.shape[1], features))
    tokens[:, : len(prefix)] = prefix
    torch.baddbmm(offset, pixels, matrix, out=tokens[:, len(prefix) :])
    return tokens


def patch_embedding_reason(
    images: Tensor, weight: Tensor, bias: Tensor | None, position: Tensor | None = None, prefix: Tensor | None = None
) -> str | None:
    """Why ``patch_embedding`` does not take this; None where it does."""
    way = patch_embedding_way(images, weight, bias, position, prefix)
    return way if isinstance(way, str) else None


def _obstacle(images: Tensor, patches: Patches) -> str | None:
    weight, tensors = patches.weight, tuple(part for part in patches if part is not None)
    obstacle = common_obstacle(images, tensors)
    if obstacle is not None:
        return obstacle
    if images.dim() != 4 or weight.dim() != 4 or images.shape[1] != weight.shape[1]:
        return f"expected images and a convolution of as many channels, got shapes {tuple(images.shape)} and {tuple(weight.shape)}"
    if images.shape[2] % weight.shape[2] or images.shape[3] % weight.shape[3]:
        return f"images of {images.shape[2]}x{images.shape[3]} are not cut into patches of {weight.shape[2]}x{weight.shape[3]}"
    wrong = next((tensor for tensor in tensors if tensor.dtype != images.dtype), None)
    return None if wrong is None else f"expected all tensors in the images' {images.dtype}, got {wrong.dtype}"


@torch.compiler.assume_constant_result
def _patches_obstacle(features: int, channels: int, high: int, wide: int, mode: str, device_index: int) -> str | None:
    return device_obstacle(device_index) or patches_obstacle(high, wide, channels, features, mode, device_index)
