"""The dense matrices of two factors each, side by side, in one launch; by PyTorch where no kernel takes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd, lcm

import torch
from torch import Tensor

from flysurgery.factors import architecture_of, factors_to_dense
from flysurgery.gpu.device import kernels_take
from flysurgery.gpu.factor_gradients import macros
from flysurgery.gpu.kernel import Kernel, current_stream, load_kernel
from flysurgery.gpu.modes import DTYPE_NUMBERS
from flysurgery.patterns import Architecture, Pattern

_THREADS, _ROWS = 128, 8  # as the kernel has them


def multiplied_out(
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left to right; of several linears of one architecture one after the other
    linears: int,
) -> Tensor:  # shape: (linears * out_features, in_features), float32 or wider
    """The products of the factors, one linear below the other. No gradients."""
    length = len(factors) // linears
    dtype, *others = {factor.dtype for factor in factors}
    if length == 2 and kernels_take(factors[0]) and dtype in DTYPE_NUMBERS and not others:
        return _by_kernel([factor.contiguous() for factor in factors], linears)
    wide = [factor.detach().to(torch.promote_types(factor.dtype, torch.float32)) for factor in factors]
    return torch.cat([factors_to_dense(wide[start : start + length]) for start in range(0, len(factors), length)])


def _by_kernel(factors: Sequence[Tensor], linears: int) -> Tensor:
    architecture, index = architecture_of(factors[:2]), factors[0].device.index
    found = torch.empty((linears * architecture.out_features, architecture.in_features), dtype=torch.float32, device=factors[0].device)
    left = architecture.patterns[0]
    grid = -(-architecture.in_features // _THREADS), left.a * -(-left.b // _ROWS) * left.d, linears
    operands = _table(architecture, index), found, *factors[::2], *factors[1::2]
    _kernel(architecture, factors[0].dtype, linears, index).launch(grid, (_THREADS, 1, 1), 0, current_stream(index), *operands)
    return found


@lru_cache(maxsize=256)
def _kernel(architecture: Architecture, dtype: torch.dtype, linears: int, device_index: int) -> Kernel:
    return load_kernel("multiply_out.cu", macros(architecture, dtype, linears), name="multiply_out", device_index=device_index)


@lru_cache(maxsize=256)
def _table(architecture: Architecture, device_index: int) -> Tensor:  # shape: (classes of outputs, classes of inputs, 3), int32
    return torch.tensor(shared_features(architecture), dtype=torch.int32).to(torch.device("cuda", device_index))


def shared_features(architecture: Architecture) -> list[list[tuple[int, int, int]]]:
    """The inner features that an output and an input share: the first, the step to the next, and how many.

    Outputs of one block and residue of the left factor share the same, and so do inputs of one block and residue of the right factor.
    """
    left, right = architecture.patterns
    outputs = [_inner(left, left.c, block, residue) for block in range(left.a) for residue in range(left.d)]
    inputs = [_inner(right, right.b, block, residue) for block in range(right.a) for residue in range(right.d)]
    return [[_common(mine, theirs) for theirs in inputs] for mine in outputs]


def _inner(pattern: Pattern, size: int, block: int, residue: int) -> range:
    start = block * size * pattern.d + residue
    return range(start, start + size * pattern.d, pattern.d)


def _common(one: range, other: range) -> tuple[int, int, int]:
    """The numbers in both, each of which goes up in equal steps."""
    step, start, stop = lcm(one.step, other.step), max(one.start, other.start), min(one.stop, other.stop)
    if (one.start - other.start) % gcd(one.step, other.step):
        return 0, step, 0
    first = next(
        n for n in range(start, start + step) if n % one.step == one.start % one.step and n % other.step == other.start % other.step
    )
    return first, step, max(0, -(-(stop - first) // step))
