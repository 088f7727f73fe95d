"""The embedding of patches of images as one product: what is computed, which launch computes it, and the same with gradients."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from flysurgery.gpu.dense import patches_obstacle, rows_of_image, run_patches
from flysurgery.gpu.gradients import summed
from flysurgery.gpu.graph_branch import Branch, begin_ahead
from flysurgery.gpu.modes import current_mode
from flysurgery.gpu.operands import present
from flysurgery.gpu.uncounted_writes import doubt_trained
from flysurgery.ops.attention import copy_wide
from flysurgery.ops.choose_launches import Stage, Stages
from flysurgery.torch_state import is_tracing, refuse_second_derivative, without_autocast


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
        for rows in present(*self.prefix, self.position):
            if rows.dim() < 2 or rows.shape[-1] != len(weight) or rows.shape[:-2].numel() != 1:
                return f"expected position and prefix to be rows of {len(weight)} features, got a tensor of shape {tuple(rows.shape)}"
        count, tokens = (height // high) * (width // wide), sum(rows.shape[-2] for rows in self.prefix)
        if self.position is None or self.position.shape[-2] in (count, count + tokens):
            return None
        return f"{count} patches and {tokens} tokens before them have no position of {self.position.shape[-2]} rows"

    def stages(self, x: Tensor) -> Stages | str:
        mode, (features, channels, high, wide) = current_mode(x.dtype), self.weight.shape
        if mode is not None and patches_obstacle(high, wide, channels, features, mode, x.device.index) is None:
            stage = Stage((), lambda y, x, given: run_patches(x, *given[:4], mode=mode))
        else:
            stage = Stage((), lambda y, x, given: _multiplied(x, given)[0])
        return (stage, Stage((), _as_image)) if self.image else (stage,)

    def plainly(self, x: Tensor) -> Tensor:
        patches = functional.conv2d(x, self.weight, self.bias, stride=self.weight.shape[2:])
        return patches if self.image else self._with_position(x, patches.flatten(2).transpose(1, 2))

    def by_product(self, x: Tensor) -> Tensor:
        """The same by one product, with gradients: that of a convolution's weight takes PyTorch longer."""
        pixels = _cut(x, self.weight).flatten(3).flatten(1, 2)
        patches = functional.linear(pixels, self.weight.flatten(1), self.bias)
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


def _multiplied(images: Tensor, given: PatchEmbedding) -> tuple[Tensor, Tensor]:
    """The tokens, in the dtype of the images, and the pixels of each token, row by row: zeros for those before the patches."""
    count, features, branch = len(images), len(given.weight), Branch(images.device)
    cut = _cut(images, given.weight)
    patches, before = cut.shape[1:3].numel(), sum(tokens.shape[-2] for tokens in given.prefix)
    matrix = branch.run(given.weight.flatten(1).to, images.dtype)
    added = branch.run(_added, given, patches, images.dtype)
    pixels = images.new_empty((count, before + patches, matrix.shape[1]))
    pixels[:, :before] = 0
    copy_wide(pixels[:, before:].view(cut.shape), cut)
    branch.join()
    rows, shape = pixels.flatten(0, 1), (count, before + patches, features)
    if added is None or added.dim() == 1:
        y = functional.linear(rows, matrix, added)
    else:
        y = images.new_empty((len(rows), features))
        copy_wide(y.view(shape), added.expand(shape))
        y.addmm_(rows, matrix.t())
    return torch.ops.aten._unsafe_view(y, shape), rows  # no view for autograd, so that others may write to it


def _added(given: PatchEmbedding, patches: int, dtype: torch.dtype) -> Tensor | None:  # shape: (features,) or (tokens + patches, features)
    """What is added to the product: the bias, or a row for each token of an image; None where there is nothing."""
    weight, bias, position, prefix, _ = given
    before, position = rows_of_image(position, prefix, patches)
    if before is None and position is None:
        return None if bias is None else bias.to(dtype)
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    rows = bias.expand(patches, -1) if position is None else position + bias
    return (rows if before is None else torch.cat([before, rows])).to(dtype)


def _cut(images: Tensor, weight: Tensor) -> Tensor:  # shape: (images, rows, columns, channels, patch height, patch width)
    """The pixels of each patch, where they lie."""
    (count, channels, height, width), (high, wide) = images.shape, weight.shape[2:]
    return images.reshape(count, channels, height // high, high, width // wide, wide).permute(0, 2, 4, 1, 3, 5)


def embedded(x: Tensor, given: PatchEmbedding) -> Tensor:
    """The embedding with gradients, in the dtype of x. The tensors may be wider than x; their gradients are summed in float32 or wider.

    There is no second derivative. PyTorch's operators serve images that require gradients, compilers, transforms and modes.
    """
    if x.requires_grad or is_tracing(x, *given.tensors):
        return given.by_product(x).to(x.dtype)
    begin_ahead(x.device)  # a model begins here
    y: Any = _Embedded.apply(given, x, *given.tensors)
    return _as_image(y, x, given) if given.image else y


class _Embedded(torch.autograd.Function):
    """The tokens of images. The embedding's tensors follow the images, so that gradients find them."""

    @staticmethod
    def forward(ctx: Any, given: PatchEmbedding, x: Tensor, *tensors: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        with without_autocast(x.device.type):
            y, rows = _multiplied(x, given)
        ctx.given = given
        ctx.save_for_backward(rows if ctx.needs_input_grad[2] else None)  # which the gradient of the weight alone needs
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_second_derivative()
        given, needs, (rows,) = ctx.given, ctx.needs_input_grad[2:], ctx.saved_tensors
        doubt_trained([tensor for tensor, need in zip(given.tensors, needs, strict=True) if need])
        with without_autocast(dy.device.type):
            dy, weight, branch = dy.contiguous(), given.weight, Branch(dy.device)
            others = branch.run(_of_tokens, dy, given)
            of_weight = None if rows is None else summed(dy.flatten(0, 1), rows).view(weight.shape).to(weight.dtype)
            branch.join()
        return None, None, *[gradient if need else None for gradient, need in zip((of_weight, *others), needs, strict=True)]


def _of_tokens(dy: Tensor, given: PatchEmbedding) -> list[Tensor]:
    """The gradients of bias, position and prefix, out of one sum over images. They share no memory."""
    _, bias, position, prefix, _ = given
    sums = dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32))
    sizes = [tokens.shape[-2] for tokens in prefix]
    *of_prefix, patches = sums.split([*sizes, len(sums) - sum(sizes)])
    of_bias = [] if bias is None else [patches.sum(0)]
    of_position = [] if position is None else [sums[len(sums) - position.shape[-2] :]]
    found = zip((*of_bias, *of_position, *of_prefix), given.tensors[1:], strict=True)
    return [gradient.to(tensor.dtype, copy=True).view(tensor.shape) for gradient, tensor in found]
