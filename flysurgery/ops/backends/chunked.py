"""Chunks of rows on the CPU: all factors are applied to one chunk before the next, while it lies in the cache."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil

import torch
from torch import Tensor

from flysurgery.factors import architecture_of, to_blocks
from flysurgery.ops.backend import Backend, Problem
from flysurgery.ops.backends.pytorch import BmmBackend
from flysurgery.patterns import Pattern
from flysurgery.torch_state import is_exporting, is_tracing

FEW_ROWS, FEW_ROWS_OF_HALVES = 512, 1024
"""Below this the intermediates of bmm stay in the cache as well, and it has fewer steps.

The second is for bfloat16, chosen by trials of which no rows are kept.
"""

MOST_IDLE = 1.25
"""The largest accepted ratio of a batched product's thread time, busy or idle, to the time that its arithmetic needs."""

SCRATCH_BYTES = 8 << 20
"""The memory that each thread keeps: enough rows to keep BLAS busy, few enough for the cache."""


class ChunkedBackend(Backend):
    """Batched products on chunks of rows, with all that lies between two factors stored features first.

    Stored as ``(features, rows)``, the residue class j of a factor is a matrix of unit stride whose leading dimension is d times larger:
    BLAS reads it in place, and the permutation between two factors costs nothing. Intermediates stay in the cache. The bias is one more
    term of the last product: a row of ones below the intermediate. A compiled graph calls it as one operator: otherwise the compiler fuses
    an activation into the permutation between two layers, and no longer uses vector instructions.

    In 16 bits bmm's products are faster, but with many outputs their permutation outside the cache takes longest. In bfloat16 layers with
    more outputs than inputs are faster in chunks, by 2.0 and 2.4 (3152 rows, Xeon with AMX; ``recipes/results/cpu_multiply.csv``).
    """

    name = "chunked"

    def can_run(self, problem: Problem) -> str | None:
        if problem.device_type != "cpu":
            return f"it is written for the CPU, x is on {problem.device_type}"
        if problem.tracing and (is_exporting() or not torch.compiler.is_compiling()):
            return "it writes into memory given out before, which only a compiled graph can hold, as one operator"
        if problem.requires_grad:
            return "it gives no gradients"
        return None

    def advise_against(self, problem: Problem) -> str | None:
        architecture = problem.architecture
        widens = problem.dtype == torch.bfloat16 and architecture.out_features > architecture.in_features
        if problem.dtype.itemsize < 4 and not widens:
            return "oneDNN's products in 16 bits want rows first, and bmm has them so"
        few = _few_rows(problem.dtype)
        return f"below {few} rows bmm is faster" if problem.rows is not None and problem.rows < few else None

    def linear(self, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        if is_tracing(x):
            return torch.ops.flysurgery.chunked_linear(x, list(factors), bias)
        return self.bind(factors, bias)(x)

    def bind(self, factors: Sequence[Tensor], bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        left, *others = architecture_of(factors)
        bias_inside = bias is not None and left.a == 1 and bool(others)
        blocks = to_blocks(factors[0])
        if bias is not None and bias_inside:  # as one more column, of shape (d, b, 1)
            blocks = torch.cat((blocks, bias.view(left.b, 1, left.d).permute(2, 0, 1)), dim=2)
        inner = [(pattern, to_blocks(factor)) for pattern, factor in zip(others, factors[1:], strict=True)]
        return partial(_multiply, left=left, left_blocks=blocks, inner=inner[::-1], bias=bias, bias_inside=bias_inside)


def _few_rows(dtype: torch.dtype) -> int:
    return FEW_ROWS_OF_HALVES if dtype.itemsize < 4 else FEW_ROWS


def _compiled(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """The operator that a compiled graph calls; the number of rows is known only at the call."""
    backend = BmmBackend() if x.shape[0] < _few_rows(x.dtype) else ChunkedBackend()
    return backend.linear(x, factors, bias)


def _fake(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], architecture_of(factors).out_features)


_library = torch.library.Library("flysurgery", "FRAGMENT")
_library.define("chunked_linear(Tensor x, Tensor[] factors, Tensor? bias) -> Tensor")
_library.impl("chunked_linear", _compiled, "CPU")
torch.library.register_fake("flysurgery::chunked_linear", _fake, lib=_library)


def _multiply(
    x: Tensor,
    *,
    left: Pattern,
    left_blocks: Tensor,
    inner: Sequence[tuple[Pattern, Tensor]],
    bias: Tensor | None,
    bias_inside: bool,
) -> Tensor:
    rows, widths = x.shape[0], [pattern.out_features + left.d for pattern, _ in inner] + [left.out_features]
    chunk = _chunk_rows(rows, sum(widths) * x.element_size())
    out = x.new_empty(rows, left.out_features)
    scratch = _scratch_memory(sum(widths) * chunk, x.dtype).split([width * chunk for width in widths])
    for start in range(0, rows, chunk):
        columns = x[start : start + chunk].mT  # shape: (features, n)
        for (pattern, blocks), memory in zip(inner, scratch, strict=False):
            columns = _multiply_columns(columns, blocks, pattern, memory)
        if bias_inside:  # a row of ones behind each of the d residue classes
            features, n = columns.shape
            scratch[-2][features * n : (features + left.d) * n] = 1
            columns = scratch[-2][: (features + left.d) * n].view(features + left.d, n)
        result = out[start : start + chunk]
        _write_rows(result, columns, left_blocks, left, scratch[-1])
        if bias is not None and not bias_inside:
            result += bias
    return out


_kept = threading.local()


def _scratch_memory(size: int, dtype: torch.dtype) -> Tensor:  # shape: (size,)
    """Give memory with arbitrary content, which holds until this thread asks again.

    The allocator returns memory of this size to the system at the end of a call, and new pages cost as much
    as a small product. Larger requests than ``SCRATCH_BYTES`` are not kept.
    """
    nbytes = size * dtype.itemsize
    if nbytes > SCRATCH_BYTES:
        return torch.empty(size, dtype=dtype, device="cpu")
    if not hasattr(_kept, "memory"):
        with torch.inference_mode(False):  # what is made in inference mode cannot be written to outside it
            _kept.memory = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device="cpu")
    return _kept.memory[:nbytes].view(dtype)


def _chunk_rows(rows: int, row_bytes: int) -> int:
    """The rows of a chunk: as many as fit into the scratch memory, equal chunks, and enough rows to keep BLAS busy."""
    chunks = ceil(rows / max(64, SCRATCH_BYTES // row_bytes))
    return ceil(rows / chunks) if chunks else 1


def _classes(columns: Tensor, a: int, d: int) -> Tensor:  # shapes: (a*c*d, n) -> (a*d, c, n)
    """Sort features by block and residue class; a view wherever BLAS can read it in place."""
    classes = columns.unflatten(0, (a, -1, d)).movedim(2, 1).flatten(0, 1)
    return classes if 1 in classes.stride()[1:] else classes.contiguous()


def _bmm(left: Tensor, right: Tensor, out: Tensor) -> None:
    """``torch.bmm``, or one product after the other where it would leave threads idle: BLAS gives each product to one thread."""
    batch, threads = left.shape[0], torch.get_num_threads()
    if ceil(batch / threads) * threads > MOST_IDLE * batch:
        for a, b, c in zip(left, right, out, strict=True):
            torch.mm(a, b, out=c)
    else:
        torch.bmm(left, right, out=out)


def _multiply_columns(columns: Tensor, blocks: Tensor, pattern: Pattern, memory: Tensor) -> Tensor:
    """Multiply by an inner factor; the product, of shape (a*b*d, n), starts at the head of ``memory``."""
    a, b, d, n = pattern.a, pattern.b, pattern.d, columns.shape[1]
    place = memory[: a * b * d * n]
    if d == 1:
        _bmm(blocks, _classes(columns, a, d), place.view(a, b, n))
    else:
        place.view(a, b, d, n).copy_(torch.bmm(blocks, _classes(columns, a, d)).view(a, d, b, n).movedim(1, 2))
    return place.view(a * b * d, n)


def _write_rows(out: Tensor, columns: Tensor, blocks: Tensor, left: Pattern, memory: Tensor) -> None:
    a, b, d, n = left.a, left.b, left.d, out.shape[0]
    classes = _classes(columns, a, d).mT  # shape: (a*d, n, c)
    if a * d == 1:
        torch.mm(classes[0], blocks[0].mT, out=out)
        return
    product = memory[: a * d * n * b].view(a, d, n, b)
    _bmm(classes, blocks.mT, product.view(a * d, n, b))
    interleaved = out.view(n, a, b, d)
    if a == 1 and d == 2 and out.dtype in (torch.float32, torch.float64):
        # the two classes are the real and imaginary parts of complex rows, and PyTorch interleaves those fastest
        torch.complex(product[0, 0], product[0, 1], out=torch.view_as_complex(interleaved[:, 0]))
    else:
        interleaved.copy_(product.permute(2, 0, 3, 1))
