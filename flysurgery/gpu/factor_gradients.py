"""The gradients of factors out of the gradient of their product, so that the rows of a batch are summed by one dense product."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from flysurgery.factors import architecture_of, ks_einsum
from flysurgery.gpu.device import kernels_take
from flysurgery.gpu.kernel import Kernel, current_stream, load_kernel
from flysurgery.gpu.modes import DTYPE_NUMBERS
from flysurgery.patterns import Architecture

_TILE, _THREADS = 32, 512  # as the kernel has them


def factor_gradients(
    dw: Tensor,  # shape: (linears * out_features, in_features), float32 or float64
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left to right; of several linears one after the other
    linears: int,
) -> list[Tensor]:  # one a factor, of its shape and the dtype of dw
    """The gradients of factors whose products have the gradients ``dw``, side by side along the outputs.

    Two factors on CUDA take one launch for all linears, which reads ``dw`` twice, if all factors have one dtype. All others are multiplied
    by PyTorch, as if the rows of one linear's ``dw`` were a batch.
    """
    length = len(factors) // linears
    architecture = architecture_of(factors[:length])
    (dtype, *others) = {factor.dtype for factor in factors}
    if length == 2 and kernels_take(dw) and dw.dtype == torch.float32 and dtype in DTYPE_NUMBERS and not others:
        return _by_kernel(dw, [factor.contiguous() for factor in factors], linears, architecture)
    starts = range(0, len(factors), length)
    parts = zip(dw.split(architecture.out_features), starts, strict=True)
    return [gradient for part, start in parts for gradient in _by_pytorch(part, factors[start : start + length])]


def _by_pytorch(dw: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:
    wide = [factor.to(dw.dtype) for factor in factors]
    gradient, inputs, found = torch.eye(len(dw), dtype=dw.dtype, device=dw.device), [dw], list[Tensor]()
    for factor in wide[:0:-1]:
        inputs.append(ks_einsum(inputs[-1], factor))
    for factor in wide:
        a, b, c, d = factor.shape
        found.append(torch.einsum("rabd,racd->abcd", gradient.view(-1, a, b, d), inputs.pop().view(-1, a, c, d)).contiguous())
        gradient = ks_einsum(gradient, factor.transpose(1, 2))
    return found


def _by_kernel(dw: Tensor, factors: Sequence[Tensor], linears: int, architecture: Architecture) -> list[Tensor]:
    device_index = dw.device.index
    left, right = architecture.patterns
    found = [torch.empty(factor.shape, dtype=torch.float32, device=dw.device) for factor in factors]
    table = _table(architecture, device_index)
    grid = len(table) // _TILE, -(-left.b // _TILE) - (-right.c // _TILE), linears
    operands = (*factors[::2], *factors[1::2], *found[::2], *found[1::2])
    kernel = _kernel(architecture, factors[0].dtype, linears, device_index)
    kernel.launch(grid, (_THREADS, 1, 1), 0, current_stream(device_index), dw.contiguous(), table, *operands)
    return found


@lru_cache(maxsize=256)
def _kernel(architecture: Architecture, dtype: torch.dtype, linears: int, device_index: int) -> Kernel:
    return load_kernel("factor_gradients.cu", macros(architecture, dtype, linears), name="factor_gradients", device_index=device_index)


def macros(architecture: Architecture, dtype: torch.dtype, linears: int) -> dict[str, int]:
    """The macros that the kernel is compiled with."""
    sides = zip("LR", architecture.patterns, strict=True)
    sizes = {f"{side}_{name}": size for side, p in sides for name, size in zip("ABCD", p.factor_shape, strict=True)}
    return {**sizes, "LINEARS": linears, "MODE": DTYPE_NUMBERS[dtype]}


@lru_cache(maxsize=256)
def _table(architecture: Architecture, device_index: int) -> Tensor:  # shape: (tiles * _TILE,), int32
    return torch.tensor(tiles_of(architecture), dtype=torch.int32).flatten().to(torch.device("cuda", device_index))


def tiles_of(architecture: Architecture) -> list[list[int]]:
    """The inner features of two factors by tiles of ``_TILE``, filled up with -1.

    Those of a tile lie in the same block of both factors and have the same residues there.
    """
    left, right = architecture.patterns
    groups = defaultdict[tuple[int, ...], list[int]](list)
    for m in range(left.in_features):
        groups[m // (left.c * left.d), m % left.d, m // (right.b * right.d), m % right.d].append(m)
    parts = [group[start : start + _TILE] for group in groups.values() for start in range(0, len(group), _TILE)]
    return [[*part, *[-1] * (_TILE - len(part))] for part in parts]
