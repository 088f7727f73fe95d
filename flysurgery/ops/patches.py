"""The embedding of patches of images as one product, and why not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.dense_patches import dense_patches_operator, patches_obstacle, rows_of_image
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
    prefix: Sequence[Tensor] = ()


def patch_embedding(
    images: Tensor,  # shape: (images, channels, height, width)
    weight: Tensor,  # shape: (features, channels, patch height, patch width)
    bias: Tensor | None,  # shape: (features,)
    position: Tensor | None = None,  # shape: (*, patches, features), or (*, tokens + patches, features)
    prefix: Sequence[Tensor] = (),  # shapes: (*, some of the tokens, features)
) -> Tensor:  # shape: (images, tokens + patches, features)
    """A convolution of patches that do not overlap, as one matrix product that reads the pixels where they lie.

    The tokens of ``prefix`` stand before the patches of each image. ``position`` is added to the patches, or to both where it has rows
    for both. Patches that the kernel does not read are one copy of the pixels and PyTorch's product.

    Raises:
        BackendError: this is no such convolution; the message is what ``patch_embedding_reason`` answers.
    """
    way = patch_embedding_way(images, weight, bias, position, prefix)
    if isinstance(way, str):
        raise BackendError(way)
    return way.run()


def patch_embedding_way(
    images: Tensor, weight: Tensor, bias: Tensor | None, position: Tensor | None = None, prefix: Sequence[Tensor] = ()
) -> Way | str:
    """How ``patch_embedding`` computes this, or why it does not take it."""
    patches = Patches(weight, bias, position, prefix)
    asked = "patch_embedding", bias is None, position is None
    stages = decided(lambda: _stages(images, patches), (images, *_tensors(patches)), *asked)
    return stages if isinstance(stages, str) else Way(stages, images, patches)


def _stages(images: Tensor, patches: Patches) -> tuple[Stage, ...] | str:
    """By which product, or why by none."""
    obstacle = _obstacle(images, patches)
    if obstacle is not None:
        return obstacle
    mode = present_mode(images.dtype)
    if mode is not None:
        features, channels, high, wide = map(index, patches.weight.shape)
        if _patches_obstacle(features, channels, high, wide, mode, images.device.index) is None:
            return (Stage((), partial(_in_place, mode=mode)),)
    return (Stage((), _copied),)


def _in_place(y: Tensor, images: Tensor, patches: Patches, mode: str) -> Tensor:
    weight, bias, position, prefix = patches
    return dense_patches_operator(images, weight, bias, position, [*prefix], mode)


def _copied(y: Tensor, images: Tensor, patches: Patches) -> Tensor:
    weight, bias, position, prefix = patches
    features, channels, high, wide = weight.shape
    count, _, height, width = images.shape
    pixels = images.reshape(count, channels, height // high, high, width // wide, wide).permute(0, 2, 4, 1, 3, 5)
    pixels = pixels.reshape(count, -1, channels * high * wide)
    before, position = rows_of_image(position, prefix, pixels.shape[1])
    offset = torch.zeros((1, features), dtype=images.dtype, device=images.device) if bias is None else bias[None]
    offset = (offset if position is None else position + offset).expand(count, pixels.shape[1], -1)
    matrix = weight.reshape(features, -1).t().expand(count, -1, -1)
    if before is None:
        return torch.baddbmm(offset, pixels, matrix)
    tokens = images.new_empty((count, len(before) + pixels.shape[1], features))
    tokens[:, : len(before)] = before
    torch.baddbmm(offset, pixels, matrix, out=tokens[:, len(before) :])
    return tokens


def patch_embedding_reason(
    images: Tensor, weight: Tensor, bias: Tensor | None, position: Tensor | None = None, prefix: Sequence[Tensor] = ()
) -> str | None:
    """Why ``patch_embedding`` does not take this; None where it does."""
    way = patch_embedding_way(images, weight, bias, position, prefix)
    return way if isinstance(way, str) else None


def _obstacle(images: Tensor, patches: Patches) -> str | None:
    weight, tensors = patches.weight, _tensors(patches)
    obstacle = common_obstacle(images, tensors)
    if obstacle is not None:
        return obstacle
    if images.dim() != 4 or weight.dim() != 4 or images.shape[1] != weight.shape[1]:
        return f"expected images and a convolution of as many channels, got shapes {tuple(images.shape)} and {tuple(weight.shape)}"
    (height, width), (high, wide) = images.shape[2:], weight.shape[2:]
    if height < high or width < wide or height % high or width % wide:
        return f"images of {height}x{width} are not cut into patches of {high}x{wide}"
    obstacle = _wrong_rows(patches, (height // high) * (width // wide))
    if obstacle is not None:
        return obstacle
    wrong = next((tensor for tensor in tensors if tensor.dtype != images.dtype), None)
    return None if wrong is None else f"expected all tensors in the images' {images.dtype}, got {wrong.dtype}"


def _wrong_rows(patches: Patches, count: int) -> str | None:
    """Why position and prefix are no rows of an image of so many patches."""
    weight, _, position, prefix = patches
    features = weight.shape[0]
    for rows in (*prefix, *([] if position is None else [position])):
        if rows.dim() < 2 or rows.shape[-1] != features or rows.shape[:-2].numel() != 1:
            return f"expected position and prefix to be rows of {features} features, got a tensor of shape {tuple(rows.shape)}"
    tokens = sum(rows.shape[-2] for rows in prefix)
    beyond = 0 if position is None else position.shape[-2] - count  # PyTorch 2.11's compiler takes a symbol for no member of a tuple
    if beyond == 0 or beyond == tokens:
        return None
    return f"{count} patches and {tokens} tokens before them have no position of {count + beyond} rows"


def _tensors(patches: Patches) -> tuple[Tensor, ...]:
    weight, bias, position, prefix = patches
    return weight, *[part for part in (bias, position, *prefix) if part is not None]


@torch.compiler.assume_constant_result
def _patches_obstacle(features: int, channels: int, high: int, wide: int, mode: str, device_index: int) -> str | None:
    return device_obstacle(device_index) or patches_obstacle(high, wide, channels, features, mode, device_index)
