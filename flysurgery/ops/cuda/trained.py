"""Linears in training, whose weights change at every step: packed once a step for both passes, by one launch, and not kept."""

from __future__ import annotations

import torch
from torch import Tensor

from flysurgery.ops.cuda.chain import Chain
from flysurgery.ops.cuda.gather import Packer
from flysurgery.ops.cuda.gradients import chain_for
from flysurgery.ops.cuda.met import meet
from flysurgery.ops.cuda.modes import HALF_MODES
from flysurgery.ops.cuda.multiply import product_for
from flysurgery.ops.cuda.product import Product
from flysurgery.ops.cuda.table import rows_bucket

_trained: dict[tuple[object, ...], Trained] = {}


class Trained:
    """A product and its backward pass. Looking weights up in a cache would take longer than packing halves does."""

    def __init__(self, product: Product, chain: Chain, factors: int, biases: int) -> None:
        self.product, self.chain = product, chain
        self._factors, self._with_bias = factors, biases > 0
        self.packer = Packer(self._pack, product.mode)

    def _pack(self, sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The images of the product, those of its biases, and those of the backward pass."""
        factors, biases = sources[: self._factors], sources[self._factors :]
        return (*self.product.pack_plainly(factors, biases, transposed=False), *self.chain.pack.plainly(factors))

    def pack(self, factors: tuple[Tensor, ...], biases: tuple[Tensor, ...]) -> tuple[Tensor, list[int]] | None:
        """The weights for both passes in one tensor, and the addresses of the images there; None where no table packs them."""
        sources = factors + biases
        gather = self.packer.gather_for(sources)
        if gather is None:
            return None
        images = gather(sources)
        return images, gather.addresses(images)

    def forward(self, x: Tensor, images: list[int]) -> Tensor:
        """The product; as ``Product.run``."""
        meet(self.product, _rows(x))
        return self.product.run(x, images[: -self.chain.images], self._with_bias)

    def backward(self, dy: Tensor, x: Tensor, images: list[int], with_input: bool, with_bias: bool) -> list[Tensor]:
        """The gradients; as ``Chain.run``."""
        meet(self.chain, _rows(x))
        return self.chain.run(dy, x, images[-self.chain.images :], with_input, with_bias)


def trained_for(x: Tensor, factors: tuple[Tensor, ...], biases: tuple[Tensor, ...], linears: int, mode: str) -> Trained | None:
    """The kernels for factors of these shapes; None where the weights had better be kept, or x is on another device."""
    device_index, rows = x.device.index, _rows(x)
    if rows == 0 or mode not in HALF_MODES.values() or device_index != torch.cuda.current_device():
        return None
    key = (mode, linears, len(biases), device_index, rows_bucket(rows), *[factor.shape for factor in factors])
    found = _trained.get(key)
    if found is None:
        product = product_for(factors, linears, mode, device_index, rows, False)
        found = _trained[key] = Trained(product, chain_for(factors, linears, mode, device_index, rows), len(factors), len(biases))
    return found


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def forget_trained() -> None:
    """Choose kernels anew at the next call, after the table of configurations has changed."""
    _trained.clear()
