"""The backward pass of linears that share x: one launch a factor for the chain of gradients, one for those of the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flysurgery.ops.cuda.configured import GRADIENT, SINGLE, factor_grad, single_factor
from flysurgery.ops.cuda.exact_gradient import ExactGradient
from flysurgery.ops.cuda.gather import Packer
from flysurgery.ops.cuda.kernel import with_one_stride
from flysurgery.ops.cuda.table import TunedCase
from flysurgery.patterns import Architecture, Pattern


class Chain:
    """The kernels of the backward pass of several linears of one architecture that share x, for one mode and device.

    The inputs of all factors but the last are computed again from x rather than kept from the forward pass, which takes an eighth
    of the backward pass of a ViT-S/16 and saves, for its q, k and v, three quarters of the memory that x takes.
    """

    def __init__(self, architecture: Architecture, mode: str, linears: int, device_index: int, rows: int) -> None:
        self.architecture, self.mode, self.linears, self.device_index = architecture, mode, linears, device_index
        patterns = architecture.patterns
        last = patterns[-1].transpose
        summed = Pattern(last.a, last.b, linears * last.c, last.d)
        self._inputs = [single_factor(pattern, mode, device_index, rows) for pattern in reversed(patterns[1:])]
        self._outputs = [single_factor(pattern.transpose, mode, device_index, rows) for pattern in patterns[:-1]]
        self._sum = single_factor(summed, mode, device_index, rows, segments=linears)
        exact = mode == "exact"
        self._gradients = [ExactGradient(p) if exact else factor_grad(p, mode, device_index, rows) for p in patterns]
        self._products = [*(pattern for pattern in patterns[1:]), *(pattern.transpose for pattern in patterns[:-1]), summed]
        self.pack = Packer(self._pack, mode)
        self.images = len(self._products)

    def cases(self, rows: int) -> list[TunedCase]:
        """What to autotune for calls of so many rows: one case a kind of launch."""
        device = torch.cuda.get_device_name(self.device_index)
        found = [TunedCase(device, SINGLE, Architecture((pattern,)), self.mode, 1, rows) for pattern in self._products]
        if self.mode != "exact":
            found += [TunedCase(device, GRADIENT, Architecture((pattern,)), self.mode, 1, rows) for pattern in self.architecture]
        return found

    def _pack(self, factors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """An image a launch: of the factors but the leftmost, from right to left, then of all transposed, from left to right."""
        length = len(self.architecture)
        places = [factors[place::length] for place in range(length)]  # of each place in the product, the factors of all linears
        images = [torch.cat([single.pack(factor) for factor in own]) for single, own in zip(self._inputs, places[:0:-1], strict=True)]
        for single, own in zip(self._outputs, places[:-1], strict=True):
            images.append(torch.cat([single.pack(factor.transpose(1, 2)) for factor in own]))
        joined = torch.cat([factor.transpose(1, 2) for factor in places[-1]], dim=2)
        return (*images, self._sum.pack(joined))

    def run(
        self,
        dy: Tensor,  # shape: (*batch, linears * out_features)
        x: Tensor,  # shape: (*batch, in_features)
        images: Sequence[Tensor | int],  # what ``pack`` gives, or the addresses
        with_input: bool,
        with_bias: bool,
    ) -> list[Tensor]:
        """The gradients of all linears' factors of each place in the product, of their biases if asked for, and of x if asked for.

        Those of one place, or of the biases, follow each other along the first dimension.
        """
        x, dy = with_one_stride(x), with_one_stride(dy)
        images_left = iter(images)
        inputs = [x]
        for single in self._inputs:
            inputs.append(single.run(inputs[-1], next(images_left), None, self.linears))
        of_factors, of_biases = [], []
        for place, gradient in enumerate(self._gradients):
            own, *sums = gradient.run(inputs.pop(), dy, self.linears, with_bias and place == 0)
            of_factors.append(own)
            of_biases += sums
            if place < len(self._outputs):
                dy = self._outputs[place].run(dy, next(images_left), None, self.linears)
        of_input = [self._sum.run(dy, next(images_left))] if with_input else []
        return [*of_factors, *of_biases, *of_input]
