"""Multiplies two factors to a dense matrix, and computes the gradients of factors from the gradient of that matrix."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import gcd, lcm
from typing import Any

import torch
from torch import Tensor

from flysurgery.factors import architecture_of, factors_to_dense, ks_einsum
from flysurgery.gpu.device import kernels_take
from flysurgery.gpu.kernel import Kernel, current_stream, load_kernel
from flysurgery.gpu.modes import DTYPE_NUMBERS
from flysurgery.gpu.weight_cache import make_to_keep
from flysurgery.patterns import Architecture, Pattern

_TILE, _WARPS = 32, 8  # as the kernel of gradients has them
_TERMS_OF_WARP = 48
"""That a warp of the kernel of gradients sums at least, where several share a sum."""
_SIDE, _THREADS = 64, 128  # as the kernel of products has them: outputs and inputs of a block


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
        return _gradients_by_kernel(dw, [factor.contiguous() for factor in factors], linears, architecture)
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


def _gradients_by_kernel(dw: Tensor, factors: Sequence[Tensor], linears: int, architecture: Architecture) -> list[Tensor]:
    device_index = dw.device.index
    left, right = architecture.patterns
    found = [torch.empty(factor.shape, dtype=torch.float32, device=dw.device) for factor in factors]
    table = _table(_tiles, architecture, device_index)
    # among how many warps of a block a sum is split
    splits = [min(_WARPS, 1 << max(0, (terms // _TERMS_OF_WARP).bit_length() - 1)) for terms in (right.c, left.b)]
    blocks = [-(-rows // (_WARPS // split * _TILE)) for rows, split in zip((left.b, right.c), splits, strict=True)]
    operands = (*factors[::2], *factors[1::2], *found[::2], *found[1::2])
    more = {"LEFT_SPLIT": splits[0], "RIGHT_SPLIT": splits[1]}
    kernel = _kernel("factor_gradients", architecture, factors[0].dtype, linears, device_index, **more)
    grid = len(table), sum(blocks), linears
    kernel.launch(grid, (32 * _WARPS, 1, 1), 0, current_stream(device_index), dw.contiguous(), table, *operands)
    return found


@lru_cache(maxsize=256)
def _kernel(name: str, architecture: Architecture, dtype: torch.dtype, linears: int, device_index: int, **more: int) -> Kernel:
    sides = zip("LR", architecture.patterns, strict=True)
    sizes = {f"{side}_{letter}": size for side, p in sides for letter, size in zip("ABCD", p.factor_shape, strict=True)}
    return load_kernel(name, {**sizes, "LINEARS": linears, "MODE": DTYPE_NUMBERS[dtype], **more}, device_index)


@lru_cache(maxsize=256)
def _table(make: Callable[[Architecture], list[Any]], architecture: Architecture, device_index: int) -> Tensor:
    """What ``make`` gives, in int32."""
    device = torch.device("cuda", device_index)
    return make_to_keep(lambda: (torch.tensor(make(architecture), dtype=torch.int32).to(device),), device)[0]


def _tiles(architecture: Architecture) -> list[list[int]]:
    """The inner features of two factors by tiles of ``_TILE``, filled up with -1.

    Those of a tile lie in the same block of both factors and have the same residues there.
    """
    left, right = architecture.patterns
    groups = defaultdict[tuple[int, ...], list[int]](list)
    for m in range(left.in_features):
        groups[m // (left.c * left.d), m % left.d, m // (right.b * right.d), m % right.d].append(m)
    parts = [group[start : start + _TILE] for group in groups.values() for start in range(0, len(group), _TILE)]
    return [[*part, *[-1] * (_TILE - len(part))] for part in parts]


def multiplied_out(
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left to right; of several linears of one architecture one after the other
    linears: int,
    dtype: torch.dtype,
) -> Tensor:  # shape: (linears * out_features, in_features)
    """The products of the factors in ``dtype``, one linear below the other, summed in float32 or wider. No gradients."""
    length = len(factors) // linears
    given, *others = {factor.dtype for factor in factors}
    if length == 2 and kernels_take(factors[0]) and {given, dtype} <= {*DTYPE_NUMBERS} and not others:
        return _multiplied_by_kernel([factor.contiguous() for factor in factors], linears, dtype)
    wide = [factor.detach().to(torch.promote_types(factor.dtype, torch.float32)) for factor in factors]
    return torch.cat([factors_to_dense(wide[start : start + length]).to(dtype) for start in range(0, len(factors), length)])


def _multiplied_by_kernel(factors: Sequence[Tensor], linears: int, dtype: torch.dtype) -> Tensor:
    architecture, index = architecture_of(factors[:2]), factors[0].device.index
    found = torch.empty((linears * architecture.out_features, architecture.in_features), dtype=dtype, device=factors[0].device)
    left, right = architecture.patterns
    grid = right.a * -(-right.c // _SIDE) * right.d, left.a * -(-left.b // _SIDE) * left.d, linears
    operands = _table(_shared_features, architecture, index), found, *factors[::2], *factors[1::2]
    kernel = _kernel("multiply_out", architecture, factors[0].dtype, linears, index, TARGET=DTYPE_NUMBERS[dtype])
    kernel.launch(grid, (_THREADS, 1, 1), 0, current_stream(index), *operands)
    return found


def _shared_features(architecture: Architecture) -> list[list[tuple[int, int, int]]]:
    """The inner features that an output and an input share: the first, the step to the next, and how many.

    Outputs of one block and residue of the left factor share the same, and so do inputs of one block and residue of the right factor.
    """
    left, right = architecture.patterns
    inputs = _inner(right, right.b)
    return [[_common(mine, theirs) for theirs in inputs] for mine in _inner(left, left.c)]


def _inner(pattern: Pattern, size: int) -> list[range]:
    """The inner features of each block and residue of a factor that has ``size`` of them in a block."""
    a, _, _, d = pattern.factor_shape
    starts = [block * size * d + residue for block in range(a) for residue in range(d)]
    return [range(start, start + size * d, d) for start in starts]


def _common(one: range, other: range) -> tuple[int, int, int]:
    """The numbers in both, each of which goes up in equal steps."""
    step, start, stop = lcm(one.step, other.step), max(one.start, other.start), min(one.stop, other.stop)
    if (one.start - other.start) % gcd(one.step, other.step):
        return 0, step, 0
    first = next(
        n for n in range(start, start + step) if n % one.step == one.start % one.step and n % other.step == other.start % other.step
    )
    return first, step, max(0, -(-(stop - first) // step))
