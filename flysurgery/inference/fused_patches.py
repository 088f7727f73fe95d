"""The fused modules of patches of images: by themselves, and with position and the tokens before them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn import functional

from flysurgery import ops
from flysurgery.inference.fused_modules import Step, shapes_of, value_of
from flysurgery.inference.methods import Together
from flysurgery.ops import Stage, Way


class PatchesStep(Step):
    """A convolution whose stride is its kernel's size, as one product of the flattened patches and a matrix.

    Gives what the convolution gives, (images, features, rows, columns), with the features of a patch side by side in memory.
    """

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution

    def way(self, x: Tensor, *others: Tensor) -> Way | str:
        weight, bias = self.convolution.weight, self.convolution.bias
        if x.dim() != 4 or x.shape[2] % weight.shape[2] or x.shape[3] % weight.shape[3]:
            return f"the patches of {weight.shape[2]}x{weight.shape[3]} do not tile the image"
        if x.shape[1] != weight.shape[1]:
            return f"images have {x.shape[1]} channels, the weight {weight.shape[1]}"
        if x.dtype != weight.dtype:
            return f"images are {x.dtype}, the weight is {weight.dtype}"
        way = ops.way(x, ops.PatchEmbedding(weight, bias))
        stages = (Stage((), _patches_product),) if isinstance(way, str) else way.stages
        return Way((*stages, Stage((), _as_image)), x, ops.PatchEmbedding(weight, bias))

    def likeness(self) -> tuple[object, ...]:
        return shapes_of(self.convolution)

    def plain(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.convolution(x)


class EmbeddingStep(Step):
    """Patches with their position and the tokens before them: the result of ``together`` for images of the traced size."""

    def __init__(
        self,
        together: Together,
        convolution: nn.Conv2d,
        position: tuple[nn.Module, str] | None,
        prefix: tuple[tuple[nn.Module, str], ...],
        image: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.together, self.convolution = together, convolution
        self._position, self._prefix, self.image = position, prefix, image

    def way(self, x: Tensor, *others: Tensor) -> Way | str:
        if tuple(x.shape[1:]) != self.image:
            return f"position is that of images of {self.image}, got {tuple(x.shape)}"
        weight, bias = self.convolution.weight, self.convolution.bias
        return ops.way(x, ops.PatchEmbedding(weight, bias, value_of(self._position), [getattr(*each) for each in self._prefix]))

    def read(self) -> Iterable[nn.Module]:
        return [self.convolution, *[owner for owner, _ in (*self._prefix, *((self._position,) if self._position else ()))]]

    def likeness(self) -> tuple[object, ...]:
        return (*shapes_of(self.convolution), self._position is None, len(self._prefix))

    def plain(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.together(x)


def _patches_product(y: Tensor, x: Tensor, given: ops.PatchEmbedding) -> Tensor:
    """By PyTorch's product, on any device and with gradients."""
    (images, channels, height, width), (_, _, high, wide) = x.shape, given.weight.shape
    patches = x.reshape(images, channels, height // high, high, width // wide, wide).permute(0, 2, 4, 1, 3, 5)
    return functional.linear(patches.reshape(images, -1, channels * high * wide), given.weight.flatten(1), given.bias)


def _as_image(y: Tensor, x: Tensor, given: ops.PatchEmbedding) -> Tensor:
    _, _, high, wide = given.weight.shape
    return y.transpose(1, 2).unflatten(2, (x.shape[2] // high, x.shape[3] // wide))
