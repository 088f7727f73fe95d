"""The embedding of patches of images as one product: what is computed, and which launch computes it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from flysurgery.gpu.dense import patches_obstacle, rows_of_image, run_patches
from flysurgery.gpu.modes import present_mode
from flysurgery.gpu.parts import present
from flysurgery.ops.ways import Stage, Stages


class PatchEmbedding(NamedTuple):
    """A convolution of patches that do not overlap; x: (images, channels, height, width).

    The result is (images, tokens + patches, features). The tokens of ``prefix`` stand before the patches of each image. ``position`` is
    added to the patches, or to both where it has rows for both. With ``image``, which neither may stand beside, the result is that of the
    convolution, (images, features, rows, columns), with the features of a patch side by side in memory. One product reads the pixels where
    they lie. Where the kernel cannot, they are copied once and PyTorch computes the product.
    """

    weight: Tensor  # shape: (features, channels, patch height, patch width)
    bias: Tensor | None  # shape: (features,)
    position: Tensor | None = None  # shape: (*, patches, features), or (*, tokens + patches, features)
    prefix: Sequence[Tensor] = ()  # shapes: (*, some of the tokens, features)
    image: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return present(self.weight, self.bias, self.position, *self.prefix)

    @property
    def form(self) -> tuple[Hashable, ...]:
        return "patch_embedding", self.bias is None, self.position is None, self.image

    def wrong(self, x: Tensor) -> str | None:
        other = next((tensor.dtype for tensor in self.tensors if tensor.dtype != x.dtype), None)
        return self.wrong_sizes(x) or (other and f"expected all tensors in the images' {x.dtype}, got {other}")

    def wrong_sizes(self, x: Tensor) -> str | None:
        """Why the sizes of the operands do not fit each other; None where they do."""
        weight = self.weight
        if x.dim() != 4 or weight.dim() != 4 or x.shape[1] != weight.shape[1]:
            return f"expected images and a convolution of as many channels, got shapes {tuple(x.shape)} and {tuple(weight.shape)}"
        (height, width), (high, wide) = x.shape[2:], weight.shape[2:]
        if height < high or width < wide or height % high or width % wide:
            return f"images of {height}x{width} are not cut into patches of {high}x{wide}"
        return _wrong_rows(self, (height // high) * (width // wide))

    def stages(self, x: Tensor) -> Stages | str:
        mode, (features, channels, high, wide) = present_mode(x.dtype), self.weight.shape
        if mode is not None and patches_obstacle(high, wide, channels, features, mode, x.device.index) is None:
            stage = Stage((), partial(_in_place, mode=mode))
        else:
            stage = Stage((), _copied)
        return (stage, Stage((), _as_image)) if self.image else (stage,)

    def plainly(self, x: Tensor) -> Tensor:
        patches = functional.conv2d(x, self.weight, self.bias, stride=self.weight.shape[2:])
        return patches if self.image else self._with_position(x, patches.flatten(2).transpose(1, 2))

    def by_product(self, x: Tensor) -> Tensor:
        """The same by one product, with gradients: that of a convolution's weight takes PyTorch longer."""
        patches = functional.linear(_pixels(x, self.weight), self.weight.flatten(1), self.bias)
        return _as_image(patches, x, self) if self.image else self._with_position(x, patches)

    def _with_position(self, x: Tensor, patches: Tensor) -> Tensor:
        _, _, position, prefix, _ = self
        if position is not None and position.shape[-2] == patches.shape[1]:
            patches, position = patches + position, None
        tokens = torch.cat([*(each.expand(len(x), -1, -1) for each in prefix), patches], dim=1) if prefix else patches
        return tokens if position is None else tokens + position


def _as_image(y: Tensor, images: Tensor, patches: PatchEmbedding) -> Tensor:
    _, _, high, wide = patches.weight.shape
    return y.transpose(1, 2).unflatten(2, (images.shape[2] // high, images.shape[3] // wide))


def _in_place(y: Tensor, images: Tensor, patches: PatchEmbedding, mode: str) -> Tensor:
    weight, bias, position, prefix, _ = patches
    return run_patches(images, weight, bias, position, prefix, mode)


def _copied(y: Tensor, images: Tensor, patches: PatchEmbedding) -> Tensor:
    weight, bias, position, prefix, _ = patches
    features, count, pixels = weight.shape[0], images.shape[0], _pixels(images, weight)
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


def _pixels(images: Tensor, weight: Tensor) -> Tensor:  # shape: (images, patches, channels * patch height * patch width)
    """A copy in which the pixels of a patch lie side by side."""
    (count, channels, height, width), (high, wide) = images.shape, weight.shape[2:]
    cut = images.reshape(count, channels, height // high, high, width // wide, wide)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(count, (height // high) * (width // wide), channels * high * wide)


def _wrong_rows(patches: PatchEmbedding, count: int) -> str | None:
    """Why position and prefix do not fit an image of this many patches."""
    weight, _, position, prefix, _ = patches
    features = weight.shape[0]
    for rows in (*prefix, *([] if position is None else [position])):
        if rows.dim() < 2 or rows.shape[-1] != features or rows.shape[:-2].numel() != 1:
            return f"expected position and prefix to be rows of {features} features, got a tensor of shape {tuple(rows.shape)}"
    tokens = sum(rows.shape[-2] for rows in prefix)
    beyond = 0 if position is None else position.shape[-2] - count
    if beyond in (0, tokens):
        return None
    return f"{count} patches and {tokens} tokens before them have no position of {count + beyond} rows"
