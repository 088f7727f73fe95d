"""The embedding of patches of images as one product: what is computed, and which launch computes it."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from flysurgery.gpu.dense_patches import patches_obstacle, run_patches
from flysurgery.gpu.device import device_obstacle
from flysurgery.gpu.modes import mode_for
from flysurgery.ops.parts import present
from flysurgery.ops.ways import Stage, Stages
from flysurgery.torch_state import is_tracing


class PatchEmbedding(NamedTuple):
    """A convolution of patches that do not overlap; x: (images, channels, height, width). The result is (images, patches, features).

    One product reads the pixels where they lie.
    """

    weight: Tensor  # shape: (features, channels, patch height, patch width)
    bias: Tensor | None  # shape: (features,)

    registered = True

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return present(self.weight, self.bias)

    @property
    def form(self) -> tuple[Hashable, ...]:
        return "patch_embedding", self.bias is None

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
        return None

    def stages(self, x: Tensor) -> Stages | str:
        mode, (features, channels, high, wide) = mode_for(x), map(index, self.weight.shape)
        return _patches_obstacle(features, channels, high, wide, mode, x.device.index) or (Stage((), partial(_in_place, mode=mode)),)

    def plainly(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.weight, self.bias, stride=self.weight.shape[2:]).flatten(2).transpose(1, 2)

    def by_product(self, x: Tensor) -> Tensor:
        """The same by a copy and one product, with gradients: those of a convolution's weight take PyTorch longer."""
        (count, channels, height, width), (high, wide) = x.shape, self.weight.shape[2:]
        cut = x.reshape(count, channels, height // high, high, width // wide, wide)
        pixels = cut.permute(0, 2, 4, 1, 3, 5).reshape(count, -1, channels * high * wide)
        return functional.linear(pixels, self.weight.flatten(1), self.bias)


def _in_place(y: Tensor, images: Tensor, patches: PatchEmbedding, mode: str) -> Tensor:
    run = torch.ops.flysurgery.dense_patches if is_tracing(images) else run_patches
    return run(images, *patches, mode)


@torch.compiler.assume_constant_result  # depends on the machine and the arguments alone
def _patches_obstacle(features: int, channels: int, high: int, wide: int, mode: str, device_index: int) -> str | None:
    return device_obstacle(device_index) or patches_obstacle(high, wide, channels, features, mode, device_index)
