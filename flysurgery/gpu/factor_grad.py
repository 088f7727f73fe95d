"""The gradient of one factor, without permuted copies of the activations."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.gpu.grad_choice import grad_configs, grad_reason
from flysurgery.gpu.grad_tiling import GradConfig, GradTiling
from flysurgery.gpu.grad_wgmma import ALIGNMENT, WgmmaGradConfig, WgmmaGradTiling, wgmma_grad_configs
from flysurgery.gpu.kernel import Prepared, Rows, current_stream, in_rows, load_kernel
from flysurgery.patterns import Pattern

__all__ = ["FactorGrad", "grad_configs", "grad_reason", "gradient_configs"]

_LANES_A_BLOCK = 32
_MOST_CONFIGS, _MOST_WGMMA = 12, 9
AnyGradConfig = GradConfig | WgmmaGradConfig


def gradient_configs(pattern: Pattern, mode: str, shared_limit: int, *, wgmma: bool) -> tuple[AnyGradConfig, ...]:
    """Ways to run a factor gradient on a device with or without wgmma, the most promising first, a dozen at most."""
    first: tuple[AnyGradConfig, ...] = wgmma_grad_configs(pattern, mode, shared_limit)[:_MOST_WGMMA] if wgmma else ()
    return (*first, *grad_configs(pattern, mode, shared_limit))[:_MOST_CONFIGS]


class GradLaunch(NamedTuple):
    """The gradients of splits of the rows, for ``sum_of_splits`` to add."""

    product: Prepared  # takes the addresses of x, dy, and of the first split's gradients of factors and of biases
    splits: int
    step: int  # elements of a split: the gradients of the factors of all linears, then those of their biases
    of_factors: int  # elements of the former


class GradientSplits(NamedTuple):
    """Where the splits of one gradient lie in a workspace, in elements."""

    first: int
    splits: int
    step: int
    size: int


def sum_of_splits(parts: Sequence[GradientSplits], device_index: int) -> Prepared:
    """The launch that adds the splits of several gradients; takes the addresses of the workspace and of each gradient."""
    vector = 1 if any(number % 4 for part in parts for number in (part.first, part.step, part.size)) else 4
    defines = {"PARTS": len(parts), "VECTOR": vector}
    kernel = load_kernel("factor_grad_sum.cu", defines, name="factor_grad_sum", device_index=device_index)
    blocks = sum(ceil(part.size / (vector * _LANES_A_BLOCK)) for part in parts)
    return kernel.prepare((blocks, 1, 1), (256, 1, 1), 0, *(number for column in zip(*parts, strict=True) for number in column))


class FactorGrad:
    """The gradient of one factor of one pattern and mode.

    Args:
        pattern: compiled into the kernel.
        mode: ``fp16`` and ``bf16`` for inputs of these types; ``tf32`` and ``fp32`` for float32 inputs.
        config: one of ``gradient_configs``; None takes the first of ``grad_configs``, which every device runs.
        shared_limit: bytes of shared memory that a block may use on the device.
        joined: how many linears share x and have their outputs side by side, so that x may be read once for all of them.

    Raises:
        BackendError: the kernel cannot run this; ``grad_reason`` tells beforehand.

    Cost of a call of R rows: ``R * flops_per_row`` operations (three times in mode ``fp32``), x and dy read from device
    memory once, and a workspace of at most 32 MiB or one factor. Two runs give equal bits.
    """

    def __init__(self, pattern: Pattern, mode: str, config: AnyGradConfig | None = None, *, shared_limit: int, joined: int = 1) -> None:
        reason = grad_reason(pattern, mode, shared_limit)
        if reason is not None and not isinstance(config, GradConfig):
            raise BackendError(reason)
        self.pattern = pattern
        self.mode = mode
        portable = config if isinstance(config, GradConfig) else grad_configs(pattern, mode, shared_limit)[0]
        self.tile = GradTiling(pattern, mode, portable)
        self.wgmma_tile = WgmmaGradTiling(pattern, mode, config, joined) if isinstance(config, WgmmaGradConfig) else None
        self._totals: dict[tuple[int, int], Prepared] = {}
        self._launches: dict[tuple[Rows, Rows, int, bool, int], GradLaunch] = {}

    @property
    def sums_dy(self) -> bool:
        """Whether ``prepared`` can also give the gradient of a bias: products of halves with ones are exact."""
        return self.tile.element_bytes == 2

    def run(
        self,
        x: Tensor,  # shape: (*batch, a*c*d)
        dy: Tensor,  # shape: (*batch, a*b*d)
    ) -> Tensor:  # shape: (a, b, c, d), float32
        """The gradient on the current stream. Rows may be strided, and of any alignment of whole elements; others are copied first."""
        (x, at_x), (dy, at_dy) = in_rows(x), in_rows(dy)
        out = torch.empty(self.pattern.factor_shape, dtype=torch.float32, device=x.device)
        if at_x.rows == 0:
            return out.zero_()
        device_index = x.device.index
        stream, found = current_stream(device_index), self.prepared(at_x, at_dy, 1, False, device_index)
        workspace = torch.empty(found.splits * found.step, dtype=torch.float32, device=x.device)
        found.product(stream, x.data_ptr(), dy.data_ptr(), workspace.data_ptr(), 0)
        key = found.splits, device_index
        if key not in self._totals:
            self._totals[key] = sum_of_splits([GradientSplits(0, found.splits, found.step, out.numel())], device_index)
        self._totals[key](stream, workspace.data_ptr(), out.data_ptr())
        return out

    def prepared(self, x: Rows, dy: Rows, linears: int, with_bias: bool, device_index: int) -> GradLaunch:
        """The launch for linears that share x, or whose inputs lie side by side; with biases' gradients in modes that can. Needs a row.

        For each split the gradients of the factors, each (a, b, c, d), follow each other, and those of the biases follow them.
        """
        key = (x, dy, linears, with_bias, device_index)
        found = self._launches.get(key)
        if found is None:
            found = self._launches[key] = self._prepare(*key)
        return found

    def _prepare(self, x: Rows, dy: Rows, linears: int, with_bias: bool, device_index: int) -> GradLaunch:
        pattern, shared_x = self.pattern, x.features == self.pattern.in_features
        wgmma = self.wgmma_tile
        if wgmma is not None and x.aligned(ALIGNMENT) and dy.aligned(ALIGNMENT) and wgmma.joined in (1, linears if shared_x else 1):
            tile, source, shared_bytes, joined = wgmma, "factor_grad_wgmma.cu", wgmma.shared_bytes(with_bias), wgmma.joined
            defines = wgmma.defines(with_bias)
        else:
            tile, source, shared_bytes, joined = self.tile, "factor_grad.cu", self.tile.shared_bytes, 1
            x_vector = tile.x_vector if x.aligned(tile.x_vector) else tile.element_bytes
            dy_vector = tile.dy_vector if dy.aligned(tile.dy_vector) else tile.element_bytes
            defines = tile.defines(x_vector, dy_vector, with_bias)
        splits, chunks = tile.splits(x.rows, torch.cuda.get_device_properties(device_index).multi_processor_count, linears)
        of_factors = linears * pattern.nnz
        size = of_factors + (linears * pattern.out_features if with_bias else 0)
        step = 0 if shared_x else pattern.in_features
        kernel = load_kernel(source, defines, name="factor_grad", device_index=device_index)
        grid, block = (tile.groups * linears // joined * splits, 1, 1), (tile.config.threads, 1, 1)
        numbers = (x.rows, x.stride, dy.stride, chunks, size, linears, step, pattern.out_features)
        return GradLaunch(kernel.prepare(grid, block, shared_bytes, *numbers), splits, size, of_factors)
