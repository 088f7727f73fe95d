"""Products of factors: the way through the kernels, fused in one launch or factor by factor, and the call with packed weights."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import cache, lru_cache

import torch
from torch import Tensor

from flysurgery.gpu.device import shared_limit_of
from flysurgery.gpu.fused_linear import FusedLinear, fused_kernel, fused_reason
from flysurgery.gpu.gather import Packer
from flysurgery.gpu.kernel import current_device
from flysurgery.gpu.modes import dtype_of
from flysurgery.gpu.single_by_bmm import BatchedConfig, BatchedFactor, batched_configs, batched_pays
from flysurgery.gpu.single_factor import SingleFactor
from flysurgery.gpu.single_tiling import SingleConfig, candidates, single_reason
from flysurgery.gpu.tuned_table import TunedCase, chosen_by_table, meet, rows_bucket, tuned_config
from flysurgery.gpu.weight_cache import derived_for_launch
from flysurgery.patterns import Architecture, Pattern

SINGLE = "single_factor"
FactorConfig = SingleConfig | BatchedConfig
FactorProduct = SingleFactor | BatchedFactor


def factor_configs(pattern: Pattern, mode: str, rows: int, shared_limit: int) -> tuple[FactorConfig, ...]:
    """Ways to multiply this many rows by one factor: first the default without a timing, then the best of the other kind."""
    singles, batched = candidates(pattern, mode, shared_limit), batched_configs(mode)
    if batched_pays(pattern, mode, rows_bucket(rows)):
        return (*batched, *singles)
    return (*singles[:1], *batched, *singles[1:])


def factor_config(pattern: Pattern, mode: str, device_index: int, rows: int) -> FactorConfig | None:
    """The autotuned way for this many rows, otherwise the first; None where there is none."""
    fields = tuned_config(SINGLE, Architecture((pattern,)), mode, 1, device_index, rows)
    configs = factor_configs(pattern, mode, rows, shared_limit_of(device_index))
    return next((config for config in configs if asdict(config) == fields), None) or next(iter(configs), None)


@cache
def factor_product(pattern: Pattern, mode: str, config: FactorConfig | None, shared_limit: int) -> FactorProduct:
    """The product with one factor; the same object for the same configuration. None takes the first for ``SingleFactor``."""
    if isinstance(config, BatchedConfig):
        return BatchedFactor(pattern, mode, config)
    return SingleFactor(pattern, mode, config, shared_limit=shared_limit)


@lru_cache(maxsize=4096)
def product_obstacle(architecture: Architecture, mode: str, linears: int, shared_limit: int) -> str | None:
    """Why no kernel can run an architecture: neither the fused one nor, for one linear, a launch for each factor; None when one can."""
    fused = fused_reason(architecture, mode, linears, shared_limit)
    if fused is None or linears > 1:
        return fused
    reasons = (single_reason(pattern, mode, shared_limit) for pattern in architecture)
    chain = next((reason for reason in reasons if reason is not None), None)
    return None if chain is None else f"{fused}; {chain}"


class Product:
    """The kernels of one architecture, mode, device and number of linears that share x.

    The fused kernel multiplies two factors for which it has a tiling. All others are multiplied factor by factor, and the
    intermediates are rounded to the dtype of x. Several linears need the fused kernel.

    Args:
        kernels: the fused one, or those of the factors from right to left, the order in which x meets them.
    """

    def __init__(
        self, architecture: Architecture, mode: str, linears: int, device_index: int, kernels: FusedLinear | tuple[FactorProduct, ...]
    ) -> None:
        self.architecture, self.mode, self.linears, self.device_index = architecture, mode, linears, device_index
        self.kernels = kernels
        self._packers: dict[tuple[int, bool], Packer] = {}

    def cases(self, rows: int) -> list[TunedCase]:
        """The cases to autotune for calls with this many rows: one for each launch."""
        if isinstance(self.kernels, FusedLinear):
            return self.kernels.cases(rows)
        device = torch.cuda.get_device_name(self.device_index)
        return [TunedCase(device, SINGLE, Architecture((pattern,)), self.mode, 1, rows) for pattern in self.architecture]

    def pack(
        self,
        factors: tuple[Tensor, ...],  # shapes: (a, b, c, d), left to right; of several linears one after the other
        biases: tuple[Tensor, ...],  # shapes: (out_features,), one a linear, or none
        transposed: bool,
    ) -> tuple[Tensor, ...]:
        """The weights as the kernels read them, one image for each launch, and the concatenated biases if there are any.

        ``transposed``: the factors are those of the transposed architecture, whose product this multiplies by.
        """
        count = len(factors)

        def plainly(sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            """The same by torch operations."""
            linears = split_linears(sources[:count], self.linears, transposed)
            joined = [torch.cat([bias.detach().to(dtype_of(self.mode)) for bias in sources[count:]])] if sources[count:] else []
            if isinstance(self.kernels, FusedLinear):
                return (self.kernels.pack([(left, right) for left, right in linears]), *joined)
            return (*(single.pack(factor) for single, factor in zip(self.kernels, reversed(linears[0]), strict=True)), *joined)

        key = (len(biases), transposed)
        if key not in self._packers:
            self._packers[key] = Packer(plainly, self.mode)
        return self._packers[key](factors + biases)

    def run(
        self,
        x: Tensor,  # shape: (*batch, in_features)
        packed: Sequence[Tensor],  # what ``pack`` gives
        with_bias: bool,
        early: bool = False,
    ) -> Tensor:  # shape: (*batch, linears * out_features)
        """Multiply on the current stream. Rows of x that the kernels cannot read in place are copied first.

        ``early``: the weights were packed before the last queued kernel, and may be read while that kernel still runs.
        """
        bias = packed[-1] if with_bias else None
        if isinstance(self.kernels, FusedLinear):
            return self.kernels.run(x, packed[0], bias, early=early)
        last = len(self.kernels) - 1
        for place, single in enumerate(self.kernels):
            x = single.run(x, packed[place], bias if place == last else None)
        return x


def split_linears(factors: tuple[Tensor, ...], linears: int, transposed: bool) -> list[tuple[Tensor, ...]]:
    """The factors of each linear, left to right; where ``transposed``, those of the transposed matrix."""
    length = len(factors) // linears
    parts = [factors[start : start + length] for start in range(0, len(factors), length)]
    return [tuple(factor.transpose(1, 2) for factor in reversed(part)) for part in parts] if transposed else parts


def product_of(architecture: Architecture, mode: str, linears: int, device_index: int, rows: int) -> Product:
    """The kernels for this many rows, in the autotuned configurations, or in the first ones where nothing was tuned.

    The same configurations give the same object, so that different numbers of rows share packed weights where possible.

    Raises:
        BackendError: no kernel can run this; ``product_obstacle`` tells beforehand.
    """
    limit = shared_limit_of(device_index)
    if linears > 1 or fused_reason(architecture, mode, 1, limit) is None:
        kernel = fused_kernel(architecture, mode, linears, rows, device_index=device_index)
        return _product(architecture, mode, linears, device_index, kernel)
    ways = [(pattern, mode, factor_config(pattern, mode, device_index, rows), limit) for pattern in reversed(architecture.patterns)]
    return _product(architecture, mode, 1, device_index, tuple(factor_product(*way) for way in ways))


_product = cache(Product)


def run_product(
    x: Tensor,  # shape: (*batch, in_features)
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left to right; of several linears one after the other
    biases: Sequence[Tensor],  # shapes: (out_features,), one a linear, or none
    linears: int,
    mode: str,
    *,
    transposed: bool = False,
) -> Tensor:  # shape: (*batch, linears * out_features)
    """``x @ W.T + bias`` for one linear, or for several of one architecture side by side; on the current stream.

    ``transposed`` multiplies by W in place of its transpose: ``x @ W``, one linear, no bias. Any strides of x, any
    number of rows. Factors and biases may be wider than x; they are rounded when they are packed.
    """
    factors, biases = tuple(factors), tuple(biases)
    device_index = x.device.index
    if device_index != current_device():
        with torch.cuda.device(device_index):
            return run_product(x, factors, biases, linears, mode, transposed=transposed)
    rows, shapes = x.numel() // x.shape[-1], tuple(factor.shape for factor in factors[: len(factors) // linears])
    product = _chosen(shapes, mode, linears, device_index, rows_bucket(rows), transposed)
    meet(product.cases, x)
    if rows == 0:
        return x.new_empty((*x.shape[:-1], linears * product.architecture.out_features))
    packed, early = derived_for_launch(
        (product, transposed), factors + biases, lambda: product.pack(factors, biases, transposed), inference=False
    )
    return product.run(x, packed, bool(biases), early)


@chosen_by_table
def _chosen(shapes: tuple[torch.Size, ...], mode: str, linears: int, device_index: int, rows: int, transposed: bool) -> Product:
    architecture = Architecture(tuple(Pattern(*shape) for shape in shapes))
    return product_of(architecture.transpose if transposed else architecture, mode, linears, device_index, rows)
