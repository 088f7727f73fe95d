"""Linears in training, whose weights change at every step: packed once a step for both passes, by one launch, and not kept."""

from __future__ import annotations

import torch
from torch import Tensor

from flysurgery.ops.cuda.chain import Chain
from flysurgery.ops.cuda.gather import Packer, can_gather
from flysurgery.ops.cuda.gradients import chain_for
from flysurgery.ops.cuda.met import meet
from flysurgery.ops.cuda.multiply import product_for
from flysurgery.ops.cuda.product import Product
from flysurgery.ops.cuda.table import rows_bucket

Packed = tuple[Tensor, ...]
_trained: dict[tuple[object, ...], Trained] = {}


class Trained:
    """A product and its backward pass. Looking weights up in a cache would take longer than packing halves does."""

    def __init__(self, product: Product, chain: Chain, factors: int) -> None:
        self.product, self.chain = product, chain
        self._packers: dict[int, Packer] = {}
        self._factors = factors

    def pack(self, factors: tuple[Tensor, ...], biases: tuple[Tensor, ...]) -> tuple[Packed, Packed]:
        """The weights for the forward pass, and those for the backward pass."""
        packer = self._packers.get(len(biases))
        if packer is None:
            packer = self._packers[len(biases)] = Packer(self._pack, self.product.mode)
        packed = packer.gather(factors + biases)
        return packed[: -self.chain.images], packed[-self.chain.images :]

    def _pack(self, sources: tuple[Tensor, ...]) -> Packed:
        factors, biases = sources[: self._factors], sources[self._factors :]
        return (*self.product.pack_plainly(factors, biases, transposed=False), *self.chain.pack.plainly(factors))

    def forward(self, x: Tensor, packed: Packed, with_bias: bool) -> Tensor:
        """The product; as ``Product.run``."""
        meet(self.product, _rows(x))
        return self.product.run(x, packed, with_bias)

    def backward(self, dy: Tensor, x: Tensor, packed: Packed, with_input: bool, with_bias: bool) -> list[Tensor]:
        """The gradients; as ``Chain.run``."""
        meet(self.chain, _rows(x))
        return self.chain.run(dy, x, packed, with_input, with_bias)


def trained_for(x: Tensor, factors: tuple[Tensor, ...], biases: tuple[Tensor, ...], linears: int, mode: str) -> Trained | None:
    """The kernels for factors of these shapes; None where the weights had better be kept, or x is on another device."""
    device_index, rows = x.device.index, _rows(x)
    if rows == 0 or not can_gather(factors + biases, mode) or device_index != torch.cuda.current_device():
        return None
    shapes = tuple(factor.shape for factor in factors[: len(factors) // linears])
    key = (shapes, mode, linears, device_index, rows_bucket(rows))
    found = _trained.get(key)
    if found is None:
        product = product_for(factors, linears, mode, device_index, rows, False)
        found = _trained[key] = Trained(product, chain_for(factors, linears, mode, device_index, rows), len(factors))
    return found


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def forget_trained() -> None:
    """Choose kernels anew at the next call, after the table of configurations has changed."""
    _trained.clear()
