"""Linears in training, whose weights change at every step: packed once a step for both passes, by one launch, and not kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flysurgery.ops.cuda.chain import Chain
from flysurgery.ops.cuda.gather import Packer
from flysurgery.ops.cuda.gradients import chain_for
from flysurgery.ops.cuda.met import meet
from flysurgery.ops.cuda.modes import HALVES
from flysurgery.ops.cuda.multiply import product_for
from flysurgery.ops.cuda.product import Product
from flysurgery.ops.cuda.table import rows_bucket

_trained: dict[tuple[object, ...], Trained] = {}
_forgotten = 0


class Trained:
    """A product and its backward pass. Looking weights up in a cache would take longer than packing halves does.

    Args:
        product: that of all factors, or of the leftmost alone where the chain keeps its input.
    """

    def __init__(self, product: Product, chain: Chain, factors: int, with_bias: bool) -> None:
        self.product, self.chain = product, chain
        self._factors, self._with_bias = factors, with_bias
        self._keeps = len(product.architecture) < len(chain.architecture)
        self._multiplied = 1 if self._keeps else factors
        self._by_address = product.takes_addresses
        self.packer = Packer(self._pack, product.mode)

    def _pack(self, sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The images of the product, those of its biases, and those of the backward pass."""
        factors, biases = sources[: self._factors], sources[self._factors :]
        multiplied = self.product.pack_plainly(factors[: self._multiplied], biases, transposed=False)
        return (*multiplied, *self.chain.pack.plainly(factors))

    def pack(self, parameters: tuple[Tensor, ...]) -> Tensor | None:
        """The weights for both passes; None where no table packs these factors and biases."""
        gather = self.packer.gather_for(parameters)
        return None if gather is None else gather(parameters)

    def forward(self, x: Tensor, packed: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The product, as ``Product.run`` gives it, and what ``backward`` takes beside x."""
        meet(self.product, x)
        images = self._images(packed)
        kept = self.chain.inputs(x, images[-self.chain.images :]) if self._keeps else []
        return self.product.run(kept[0] if kept else x, images[: -self.chain.images], self._with_bias), kept

    def backward(
        self, dy: Tensor, x: Tensor, kept: Sequence[Tensor], packed: Tensor, with_input: bool, with_bias: bool, wide: bool
    ) -> list[Tensor]:
        """The gradients; as ``Chain.run``."""
        meet(self.chain, x)
        return self.chain.run(dy, x, self._images(packed)[-self.chain.images :], with_input, with_bias, wide, kept)

    def _images(self, packed: Tensor) -> Sequence[Tensor | int]:
        """The weights of each launch, by their addresses where the product takes these, too: that takes less time."""
        gather = self.packer.gather
        assert gather is not None, "it has packed"
        return gather.addresses(packed) if self._by_address else torch.split_with_sizes(packed, gather.sizes)


class TrainedCall:
    """What stays the same from call to call of linears that share x: the dtype that x is cast to, the mode, and the kernels.

    Args:
        count: how many of the parameters are factors. Biases lie behind them.
    """

    def __init__(self, dtype: torch.dtype, linears: int, mode: str, count: int) -> None:
        self.dtype, self.linears, self.mode, self.count = dtype, linears, mode, count
        self._known: tuple[torch.Size, int, int, int] | None = None
        self._trained: Trained | None = None

    def trained(self, x: Tensor, parameters: tuple[Tensor, ...]) -> Trained | None:
        """The kernels for both passes; None where the weights had better be kept, or x is on another device. Shapes but that of x stay."""
        known = x.shape, x.get_device(), torch.cuda.current_device(), _forgotten
        if known != self._known:
            self._trained = _trained_for(x, parameters, self.count, self.linears, self.mode)
            self._known = known
        return self._trained


def _trained_for(x: Tensor, parameters: tuple[Tensor, ...], count: int, linears: int, mode: str) -> Trained | None:
    device_index, rows = x.device.index, x.numel() // x.shape[-1]
    if rows == 0 or mode not in HALVES or device_index != torch.cuda.current_device():
        return None
    key = (mode, linears, device_index, rows_bucket(rows), *[parameter.shape for parameter in parameters])
    found = _trained.get(key)
    if found is None:
        factors = parameters[:count]
        chain = chain_for(factors, linears, mode, device_index, rows)
        product = product_for(factors[:1] if chain.keeps else factors, linears, mode, device_index, rows, False)
        found = _trained[key] = Trained(product, chain, count, len(parameters) > count)
    return found


def forget_trained() -> None:
    """Choose kernels anew at the next call, after the table of configurations has changed."""
    global _forgotten
    _forgotten += 1
    _trained.clear()
