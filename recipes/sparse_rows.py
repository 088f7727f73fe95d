"""An unstructured sparse matrix times a dense one with the batch last, by a Triton kernel that sums in float32.

Rows of similar length stand in groups of ``ROWS``, each padded to its longest, so that rows of uneven lengths cost little. A program
multiplies all of them with the same few columns of x, which stay in the first cache: each of their values is read many times.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # rows of the matrix that one program sums at a time
CONFIGS = [triton.Config({"COLUMNS": columns}, num_warps=warps) for columns, warps in ((32, 4), (32, 8), (64, 8), (128, 8), (128, 16))]
"""What a CUDA device is asked for the fastest of, once for each matrix."""


@triton.jit
def _kernel(order, begins, places, values, bias, x, y, count, groups, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    lanes, inside = tl.arange(0, ROWS), columns < count
    for group in range(groups):
        row = tl.load(order + group * ROWS + lanes)
        total = tl.zeros((ROWS, COLUMNS), tl.float32) + tl.load(bias + row).to(tl.float32)[:, None]
        for step in range(tl.load(begins + group), tl.load(begins + group + 1)):
            place = tl.load(places + step * ROWS + lanes)[:, None]
            value = tl.load(values + step * ROWS + lanes).to(tl.float32)[:, None]
            total += value * tl.load(x + place * count + columns, mask=inside, other=0).to(tl.float32)
        tl.store(y + row[:, None] * count + columns, total.to(y.dtype.element_ty), mask=inside)


def multiply_by_rows(weight: Tensor, bias: Tensor) -> Callable[[Tensor], Tensor]:
    """Store the values of ``weight`` that are not zero, and give ``weight @ x + bias[:, None]`` as a function of x.

    ``weight`` has a multiple of ``ROWS`` rows. Without CUDA the kernel runs where Triton interprets it.
    """
    lengths = (weight != 0).sum(1)
    order = lengths.argsort(descending=True)
    longest = lengths[order].view(-1, ROWS)[:, 0].tolist()
    begins = torch.tensor([0, *longest], device=weight.device).cumsum(0).int()
    places, values = [], []
    for rows, length in zip(weight[order].split(ROWS), longest, strict=True):
        first = (rows == 0).int().argsort(dim=1, stable=True)[:, :length]  # shape: (ROWS, length), zeros behind the others
        places.append(first.T.reshape(-1))
        values.append(rows.gather(1, first).T.reshape(-1))
    stored = order.int(), begins, torch.cat(places).int(), torch.cat(values), bias
    kernel: Any = triton.autotune(CONFIGS, key=["steps"])(_kernel) if weight.is_cuda else _kernel
    usual = {} if weight.is_cuda else {"COLUMNS": 32}

    def run(x: Tensor) -> Tensor:  # shapes: (in_features, batch) -> (out_features, batch)
        y, count = x.new_empty(len(weight), x.shape[1]), x.shape[1]
        grid = lambda chosen: (triton.cdiv(count, chosen["COLUMNS"]),)  # noqa: E731
        kernel[grid](*stored, x, y, count, len(longest), sum(longest), ROWS=ROWS, **usual)
        return y

    return run
