"""One way through the kernels for a product of factors: fused in one launch, or a launch a factor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from flysurgery.ops.cuda.fused import FusedLinear, aligned
from flysurgery.ops.cuda.gather import can_gather, gather, make_tables
from flysurgery.ops.cuda.obstacles import fused_obstacle, shared_limit_of
from flysurgery.ops.cuda.single import SingleFactor, candidates
from flysurgery.ops.cuda.single_tiling import SingleConfig
from flysurgery.ops.cuda.table import TunedCase, matching, tuned_config
from flysurgery.ops.cuda.tiling import FusedConfig
from flysurgery.patterns import Architecture

FUSED = "fused_linear"
SINGLE = "single_factor"


class Product:
    """The kernels of one architecture, mode, device and number of linears that share x.

    Two factors go through the fused kernel where it tiles them, all others through one launch a factor, the
    intermediates rounded to the dtype of x. Several linears need the fused kernel.

    Args:
        kernels: the fused one, or those of the factors from right to left, the order in which x meets them.
    """

    def __init__(
        self, architecture: Architecture, mode: str, linears: int, device_index: int, kernels: FusedLinear | tuple[SingleFactor, ...]
    ) -> None:
        self.architecture, self.mode, self.linears, self.device_index = architecture, mode, linears, device_index
        self.kernels = kernels
        self._tables: dict[bool, tuple[Tensor, ...]] = {}

    def cases(self, rows: int) -> list[TunedCase]:
        """What to autotune for calls of so many rows: one case a launch."""
        device = torch.cuda.get_device_name(self.device_index)
        if isinstance(self.kernels, FusedLinear):
            return [TunedCase(device, FUSED, self.architecture, self.mode, self.linears, rows)]
        return [TunedCase(device, SINGLE, Architecture((pattern,)), self.mode, 1, rows) for pattern in self.architecture]

    def pack(
        self,
        factors: tuple[Tensor, ...],  # shapes: (a, b, c, d), left to right; of several linears one after the other
        transposed: bool,
    ) -> tuple[Tensor, ...]:
        """The weights as the kernels read them, one image a launch.

        ``transposed``: the factors are those of the transposed architecture, whose product this multiplies by. Half
        precision takes one launch an image, once it has been learnt where each weight goes.
        """
        tables = self._tables_for(factors, transposed) if can_gather(factors, self.mode) else None
        if tables is None:
            return self._pack(_split(factors, self.linears, transposed))
        return tuple(gather(factors, table, self.mode) for table in tables)

    def _tables_for(self, factors: tuple[Tensor, ...], transposed: bool) -> tuple[Tensor, ...] | None:
        tables = self._tables.get(transposed)
        if tables is None and not torch.cuda.is_current_stream_capturing():  # what a graph makes is only there once it replays
            tables = make_tables(lambda values: self._pack(_split(values, self.linears, transposed)), factors, self.mode)
            self._tables[transposed] = tables
        return tables

    def _pack(self, linears: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if isinstance(self.kernels, FusedLinear):
            return (self.kernels.pack([(left, right) for left, right in linears]),)
        return tuple(single.pack(factor) for single, factor in zip(self.kernels, reversed(linears[0]), strict=True))

    def run(
        self,
        x: Tensor,  # shape: (rows, in_features)
        images: tuple[Tensor, ...],
        bias: Tensor | None,  # shape: (linears * out_features,)
    ) -> Tensor:  # shape: (rows, linears * out_features)
        """Multiply on the current stream. Rows of x that the kernels cannot read in place are copied first."""
        if isinstance(self.kernels, FusedLinear):
            bias = bias if bias is None else _copy_unless(aligned(bias), bias)
            return self.kernels.run(_copy_unless(aligned(x), x), images[0], bias)
        x = _copy_unless(x.stride(1) == 1, x)
        for left, (single, image) in enumerate(zip(self.kernels, images, strict=True), start=1 - len(self.kernels)):
            x = single.run(x, image, bias if left == 0 else None)
        return x


def _split(factors: tuple[Tensor, ...], linears: int, transposed: bool) -> list[tuple[Tensor, ...]]:
    length = len(factors) // linears
    parts = [factors[start : start + length] for start in range(0, len(factors), length)]
    return [tuple(factor.transpose(1, 2) for factor in reversed(part)) for part in parts] if transposed else parts


def product_of(architecture: Architecture, mode: str, linears: int, device_index: int, rows: int) -> Product:
    """The kernels for so many rows, in the autotuned configurations, else the first candidates.

    The same object for the same configurations, so that numbers of rows share packed weights where they can.

    Raises:
        BackendError: no kernel can run this; ``product_obstacle`` tells beforehand.
    """
    limit = shared_limit_of(device_index)
    if linears > 1 or fused_obstacle(architecture, mode, 1, limit) is None:
        fields = tuned_config(FUSED, architecture, mode, linears, device_index, rows)
        config = FusedLinear.tuned(architecture, mode, linears, fields, device_index=device_index) if fields else None
        return _fused(architecture, mode, linears, device_index, config)
    configs = []
    for pattern in architecture:
        fields = tuned_config(SINGLE, Architecture((pattern,)), mode, 1, device_index, rows)
        configs.append(matching(fields, lambda pattern=pattern: candidates(pattern, mode, limit)))
    return _chain(architecture, mode, device_index, tuple(configs))


@cache
def _fused(architecture: Architecture, mode: str, linears: int, device_index: int, config: FusedConfig | None) -> Product:
    kernel = FusedLinear(architecture, mode, linears, config=config, device_index=device_index)
    return Product(architecture, mode, linears, device_index, kernel)


@cache
def _chain(architecture: Architecture, mode: str, device_index: int, configs: tuple[SingleConfig | None, ...]) -> Product:
    limit = shared_limit_of(device_index)
    pairs = [*zip(architecture.patterns, configs, strict=True)]
    kernels = tuple(SingleFactor(pattern, mode, config, shared_limit=limit) for pattern, config in reversed(pairs))
    return Product(architecture, mode, 1, device_index, kernels)


def _copy_unless(readable: bool, tensor: Tensor) -> Tensor:
    return tensor if readable else tensor.clone(memory_format=torch.contiguous_format)
