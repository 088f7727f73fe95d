"""Layer norm over the last dimension in one launch, and its gradients in another; by PyTorch where no kernel takes the rows."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from flysurgery.gpu.device import kernels_take, multiprocessors_of
from flysurgery.gpu.fused_linear import packed, readable
from flysurgery.gpu.kernel import current_stream, float_bits, rows_kernel
from flysurgery.gpu.modes import DTYPE_NUMBERS
from flysurgery.gpu.operands import present
from flysurgery.gpu.recording import fresh
from flysurgery.gpu.row_sums import sum_of_rows
from flysurgery.gpu.weight_cache import derived

_ROWS_OF_BLOCK = 8
_MAX_COLUMNS = 4096
_MOST_COLUMNS_OF_GRADIENT = 1024
_VECTOR_BYTES = 16


def layer_norm_obstacle(features: int, dtype: torch.dtype) -> str | None:
    """Why the kernel has no norm of rows of this many features; None where it has one."""
    if dtype not in DTYPE_NUMBERS:
        return f"the norm's kernel takes float16, bfloat16 and float32, not {dtype}"
    if features % (_VECTOR_BYTES // dtype.itemsize) or features > _MAX_COLUMNS:
        return f"the norm's kernel takes rows of whole vectors of 16 bytes and up to {_MAX_COLUMNS} features, got {features} of {dtype}"
    return None


def row_moments(
    x: Tensor,  # shape: (rows, features)
) -> Tensor:  # shape: (rows, 1, 2), float32
    """The mean of each row and the sum of the squared deviations from it, in one launch on the current stream.

    Rows begin at multiples of 16 bytes. Here a row is one part; moments of several parts have one pair for each.
    """
    return _launched(x, None, None, 0.0, fresh((x.shape[0], 1, 2), torch.float32, x.device), moments=True)


def run_layer_norm(
    x: Tensor,  # shape: (rows, features)
    weight: Tensor | None,  # shape: (features,)
    bias: Tensor | None,  # shape: (features,)
    eps: float,
) -> Tensor:  # shape: (rows, features)
    """``(x - mean) / sqrt(variance + eps) * weight + bias``, in float32, rounded once; on the current stream.

    Reads x and writes the result once; the weights may be of any dtype.
    """
    y = fresh(x.shape, x.dtype, x.device)
    if len(x) == 0:
        return y
    x, sources = readable(x), present(weight, bias)

    def make() -> tuple[Tensor, ...]:
        return tuple(part.clone() for part in present(*_wide(x, weight, bias)))

    wide = derived(("layer norm", weight is None), sources, make, inference=True) if sources else (None, None)
    return _launched(x, wide[0], wide[1], eps, y)


def normalize_rows(
    x: Tensor,  # shape: (rows, features)
    weight: Tensor | None,  # shape: (features,)
    bias: Tensor | None,  # shape: (features,)
    eps: float,
) -> Tensor:  # shape: (rows, features)
    """The norm of x by the weights as they are now, of which nothing is remembered; by PyTorch where the kernel does not take x."""
    if not kernels_take(x) or layer_norm_obstacle(x.shape[-1], x.dtype) is not None:
        own, shift = (None if each is None else each.to(x.dtype) for each in (weight, bias))
        return functional.layer_norm(x, x.shape[-1:], own, shift, eps)
    return _launched(packed(x), *_wide(x, weight, bias), eps, x.new_empty(x.shape))


def _wide(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Both in float32; ones or zeros for one that is missing beside the other."""
    if weight is None and bias is None:
        return None, None
    ones = x.new_ones(x.shape[-1], dtype=torch.float32) if weight is None else packed(weight.detach().float())
    return ones, torch.zeros_like(ones) if bias is None else packed(bias.detach().float())


def _launched(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, y: Tensor, *, moments: bool = False) -> Tensor:
    """y, filled by a launch; nothing is launched without rows."""
    (rows, features), index = x.shape, x.device.index
    if rows:
        kernel = rows_kernel("layer_norm", features, x.dtype, index, moments=moments, vector_bytes=_vector_bytes(features, x.dtype))
        grid, block = (-(-rows // _ROWS_OF_BLOCK), 1, 1), (32 * _ROWS_OF_BLOCK, 1, 1)
        operands = x, weight, bias, y, rows, x.stride(0) * x.element_size(), float_bits(eps)
        kernel.launch(grid, block, 0, current_stream(index), *operands, early=True)  # it reads nothing before earlier kernels have ended
    return y


class NormGradient(NamedTuple):
    """The gradients of x and of the norm's weight and bias, and sums of the former's rows where a kernel has found them."""

    x: Tensor  # shape: (rows, features)
    weight: Tensor  # shape: (features,), float32 or wider
    bias: Tensor  # shape: (features,), likewise
    sums: Tensor | None = None  # shape: (1, features), likewise


def norm_gradient(
    x: Tensor,  # shape: (rows, features)
    gradient: Tensor,  # of the norm of x, of the same shape
    weight: Tensor | None,  # shape: (features,)
    eps: float,
    beside: Tensor | None = None,  # of x by another path, of the same shape
) -> NormGradient:
    """The gradients of ``(x - mean) / sqrt(variance + eps) * weight + bias``; that of x plus ``beside``. Sums are float32 or wider."""
    rows, features = x.shape
    if not kernels_take(x) or layer_norm_obstacle(features, x.dtype) is not None or features > _MOST_COLUMNS_OF_GRADIENT:
        return _by_pytorch(x, gradient, weight, eps, beside)
    found, index = x.new_empty(x.shape), x.device.index
    vector = _vector_bytes(features, x.dtype)
    lane = -(-features * x.element_size() // (32 * vector)) * vector  # bytes of a row
    warps = 16 if lane <= 32 and lane // x.element_size() <= 12 else 8  # more where a lane's part leaves them registers
    blocks = max(1, min(-(-rows // warps), multiprocessors_of(index)))  # more blocks would leave more parts of the sums
    sums = torch.empty((blocks, 3, features), dtype=torch.float32, device=x.device)
    wide = None if weight is None else packed(weight.detach().float())
    operands = packed(x), packed(gradient), None if beside is None else packed(beside), wide, found, sums
    rows_kernel("norm_gradient", features, x.dtype, index, warps=warps, vector_bytes=vector).launch(
        (blocks, 1, 1), (32 * warps, 1, 1), 0, current_stream(index), *operands, rows, float_bits(eps), early=True
    )
    of_weight, of_bias, of_x = sum_of_rows(sums.view(blocks, -1), torch.float32).view(3, 1, features)
    return NormGradient(found, of_weight[0], of_bias[0], of_x)


def _vector_bytes(features: int, dtype: torch.dtype) -> int:
    """The bytes of a row that a lane reads at once: half as many where whole vectors would leave lanes idle in the last step."""
    row = features * dtype.itemsize
    return 8 if row % 512 and not row % 256 else _VECTOR_BYTES


def _by_pytorch(x: Tensor, gradient: Tensor, weight: Tensor | None, eps: float, beside: Tensor | None) -> NormGradient:
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, given = x.to(dtype), gradient.to(dtype)
    variance, mean = torch.var_mean(wide, dim=-1, correction=0, keepdim=True)
    scale = torch.rsqrt(variance + eps)
    unit, weighted = (wide - mean) * scale, given if weight is None else given * weight.to(dtype)
    of_x = scale * (weighted - weighted.mean(-1, keepdim=True) - unit * (weighted * unit).mean(-1, keepdim=True))
    of_x = of_x if beside is None else of_x + beside
    return NormGradient(of_x.to(x.dtype), (given * unit).sum(0), given.sum(0))
