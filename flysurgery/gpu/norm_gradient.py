"""The gradients of a layer norm in one launch, with the sums over rows that its weight and bias need; by PyTorch elsewhere."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flysurgery.gpu.device import kernels_take, multiprocessors_of
from flysurgery.gpu.fused import packed
from flysurgery.gpu.kernel import Kernel, current_stream, float_bits, load_kernel
from flysurgery.gpu.layer_norm import layer_norm_obstacle
from flysurgery.gpu.modes import DTYPE_NUMBERS
from flysurgery.gpu.row_sums import sum_of_rows

_WARPS, _MOST_COLUMNS = 8, 1024
_BLOCKS = 2
"""Blocks of a multiprocessor, which all run at once for narrow rows."""


class NormGradient(NamedTuple):
    """The gradients of x, of the norm's weight and bias, and the sum over rows of what came beside x, None where nothing did."""

    x: Tensor  # shape: (rows, features)
    weight: Tensor  # shape: (features,), float32 or wider
    bias: Tensor  # shape: (features,), likewise
    beside: Tensor | None  # shape: (features,), likewise


def norm_gradient(
    x: Tensor,  # shape: (rows, features)
    gradient: Tensor,  # of the norm of x, of the same shape
    weight: Tensor | None,  # shape: (features,)
    eps: float,
    beside: Tensor | None = None,  # of x by another path, of the same shape
) -> NormGradient:
    """The gradients of ``(x - mean) / sqrt(variance + eps) * weight + bias``; that of x plus ``beside``. Sums are float32 or wider."""
    rows, features = x.shape
    if not kernels_take(x) or layer_norm_obstacle(features, x.dtype) is not None or features > _MOST_COLUMNS:
        return _by_pytorch(x, gradient, weight, eps, beside)
    found, index = x.new_empty(x.shape), x.device.index
    blocks = max(1, min(-(-rows // _WARPS), _BLOCKS * multiprocessors_of(index)))
    sums = torch.empty((blocks, 3, features), dtype=torch.float32, device=x.device)
    wide = None if weight is None else packed(weight.detach().float())
    operands = packed(x), packed(gradient), None if beside is None else packed(beside), wide, found, sums
    _kernel(features, x.dtype, index).launch(
        (blocks, 1, 1), (32 * _WARPS, 1, 1), 0, current_stream(index), *operands, rows, float_bits(eps), early=True
    )
    of_weight, of_bias, of_beside = sums.sum(0)
    return NormGradient(found, of_weight, of_bias, None if beside is None else of_beside)


def _by_pytorch(x: Tensor, gradient: Tensor, weight: Tensor | None, eps: float, beside: Tensor | None) -> NormGradient:
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, given = x.to(dtype), gradient.to(dtype)
    variance, mean = torch.var_mean(wide, dim=-1, correction=0, keepdim=True)
    scale = torch.rsqrt(variance + eps)
    unit, weighted = (wide - mean) * scale, given if weight is None else given * weight.to(dtype)
    of_x = scale * (weighted - weighted.mean(-1, keepdim=True) - unit * (weighted * unit).mean(-1, keepdim=True))
    of_x = of_x if beside is None else of_x + beside
    sums = (given * unit).sum(0), given.sum(0), None if beside is None else sum_of_rows(beside, dtype)
    return NormGradient(of_x.to(x.dtype), *sums)


@lru_cache(maxsize=256)
def _kernel(features: int, dtype: torch.dtype, device_index: int) -> Kernel:
    defines = {"COLUMNS": features, "MODE": DTYPE_NUMBERS[dtype]}
    return load_kernel("norm_gradient.cu", defines, name="norm_gradient", device_index=device_index)
