"""The backends made of PyTorch's operators: contractions, products of blocks, of sparse layouts and of the dense matrix, convolutions."""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import conv1d, linear

from flysurgery.factors import factors_to_dense, ks_einsum, pattern_of, to_blocks
from flysurgery.ops.backend import Backend, FactorwiseBackend, Problem
from flysurgery.patterns import Pattern


class EinsumBackend(FactorwiseBackend):
    """``torch.einsum`` on (rows, a, c, d) and (a, b, c, d). Source: Gonon et al. 2024, arXiv:2405.15013, Section 2.2."""

    name = "einsum"

    def advise_against(self, problem: Problem) -> str | None:
        return "bmm is faster on the CPU" if problem.device_type == "cpu" else None

    def multiply(self, x: Tensor, prepared: Tensor, pattern: Pattern) -> Tensor:
        return ks_einsum(x, prepared)


class BmmBackend(FactorwiseBackend):
    """``torch.bmm``; x and y are copied into and out of the order of the blocks where d > 1.

    Source: Gonon et al. 2024, arXiv:2405.15013, Algorithm 2.
    """

    name = "bmm"

    def prepare(self, factor: Tensor) -> Tensor:
        return to_blocks(factor)

    def multiply(self, x: Tensor, prepared: Tensor, pattern: Pattern) -> Tensor:
        a, b, c, d = pattern.factor_shape
        by_block = x.reshape(-1, a, c, d).permute(1, 3, 0, 2).reshape(a * d, -1, c)
        product = torch.bmm(by_block, prepared.transpose(1, 2))  # shape: (a*d, rows, b)
        return product.view(a, d, -1, b).permute(2, 0, 3, 1).reshape(-1, a * b * d)


class DenseBackend(Backend):
    """``F.linear`` with the densified product. Without ``bind`` it densifies at every call, which costs more than it saves."""

    name = "dense"

    def bind(self, factors: Sequence[Tensor], bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        return partial(linear, weight=factors_to_dense(factors), bias=bias)


class ConvolutionBackend(Backend):
    """``conv1d`` with a group for each of the a*d dense blocks. Features are channels, rows of a sample are positions.

    ONNX files have it: ONNX Runtime and OpenVINO run it faster than dense layers, and batched products, with a transposition
    around each, mostly slower (rows in ``docs/python.md``). In PyTorch it is slower than the other backends.
    """

    name = "convolution"

    def can_run(self, problem: Problem) -> str | None:
        exported = problem.tracing and torch.onnx.is_in_onnx_export()
        return None if exported else "it is the form of a layer in ONNX files, and none is written now"

    def linear(self, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return self._flattened(x, factors, () if bias is None else (bias,))

    def _flattened(self, x: Tensor, factors: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
        """With the rows of each sample apart, so that a graph keeps its batch."""
        samples = x if x.dim() == 3 else x.flatten(1, -2) if x.dim() > 3 else x.reshape(1, -1, x.shape[-1])
        rows = samples.shape[1]
        columns = samples.transpose(1, 2)  # shape: (samples, features, rows)
        for factor in reversed(factors):
            a, b, c, d = factor.shape
            if d > 1:
                columns = columns.reshape(-1, a, c, d, rows).transpose(2, 3).reshape(-1, a * d * c, rows)
            columns = conv1d(columns, to_blocks(factor).flatten(0, 1)[..., None], groups=a * d)
            if d > 1:
                columns = columns.reshape(-1, a, d, b, rows).transpose(2, 3).reshape(-1, a * b * d, rows)
        product = columns.transpose(1, 2).reshape(*x.shape[:-1], -1)
        return product + biases[0] if biases else product


def _sparse_obstacle(problem: Problem) -> str | None:
    """Why PyTorch cannot multiply by a compressed sparse matrix here; None when it can.

    On the CPU it goes through MKL, which knows float32 and float64 only.
    """
    if problem.tracing:
        return "sparse layouts cannot be traced into a graph"
    if problem.device_type not in ("cpu", "cuda"):
        return f"PyTorch has sparse products on cpu and cuda, x is on {problem.device_type}"
    if problem.dtype.is_complex:
        return f"its sparse products of complex numbers are not tested, x is {problem.dtype}"
    if problem.device_type == "cpu":
        if not torch.backends.mkl.is_available():
            return "PyTorch multiplies sparse matrices on the CPU through MKL, which this build lacks"
        if problem.dtype not in (torch.float32, torch.float64):
            return f"MKL multiplies sparse matrices in float32 and float64, x is {problem.dtype}"
    return None


def _compressed(layout: torch.layout, counts: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR|BSR) tensor support is in beta|Sparse invariant checks are")
        return torch.sparse_compressed_tensor(counts, columns, values, shape, layout=layout, check_invariants=False)


class SparseBackend(FactorwiseBackend):
    """``F.linear`` with each factor in the CSR layout.

    On a CUDA device cuSPARSE sums in no fixed order: two calls may differ in the last bits.
    Source: Gonon et al. 2024, arXiv:2405.15013, Section 2.2.
    """

    name = "sparse"

    def can_run(self, problem: Problem) -> str | None:
        if problem.device_type == "cuda" and problem.dtype in (torch.float16, torch.bfloat16):
            return "cuSPARSE rounds the partial sums of CSR products to 16 bits"
        if problem.device_type == "cuda" and problem.requires_grad:
            return "PyTorch gives no gradients through CSR products on CUDA"
        return _sparse_obstacle(problem)

    def prepare(self, factor: Tensor) -> Tensor:
        a, b, c, d = pattern_of(factor).factor_shape
        count = torch.arange(a * b * d + 1, device=factor.device) * c
        block, residue, column = (torch.arange(size, device=factor.device) for size in (a, d, c))
        columns = (block.view(a, 1, 1, 1) * c + column) * d + residue.view(1, 1, d, 1)  # shape: (a, 1, d, c)
        values = factor.permute(0, 1, 3, 2).flatten()
        return _compressed(torch.sparse_csr, count, columns.expand(a, b, d, c).flatten(), values, (a * b * d, a * c * d))

    def multiply(self, x: Tensor, prepared: Tensor, pattern: Pattern) -> Tensor:
        return linear(x, prepared)


def tile_size(b: int, c: int, cuda_dtype: torch.dtype | None) -> int:
    """The rows of a tile: gcd(b, c); on CUDA, where it is a power of two, at most 128 of 16 bits or 64 of 32, which are 32 KiB.

    There PyTorch multiplies powers of two by a Triton kernel that holds several tiles at once: larger ones compile for half a
    minute, and then do not fit, or take tens of times as long.
    """
    tile = math.gcd(b, c)
    if cuda_dtype is not None and tile & (tile - 1) == 0:
        while tile * tile * cuda_dtype.itemsize > 1 << 15:
            tile //= 2
    return tile


class BsrBackend(FactorwiseBackend):
    """``F.linear`` with the block-diagonal form of each factor in the BSR layout, cut into square tiles.

    MKL and cuSPARSE want square tiles, and b x c blocks are cut into the largest that fit; see ``tile_size``.
    Source: Gonon et al. 2024, arXiv:2405.15013, Algorithm 2.
    """

    name = "bsr"

    def can_run(self, problem: Problem) -> str | None:
        if problem.requires_grad:
            return "PyTorch gives no gradients through BSR matrices"
        if problem.device_type == "cuda" and any(math.gcd(pattern.b, pattern.c) == 1 for pattern in problem.architecture):
            return "PyTorch's BSR products on CUDA need tiles larger than 1x1, and b and c of a pattern have no common divisor"
        return _sparse_obstacle(problem)

    def prepare(self, factor: Tensor) -> Tensor:
        a, b, c, d = pattern_of(factor).factor_shape
        tile = tile_size(b, c, factor.dtype if factor.is_cuda else None)
        down, across = b // tile, c // tile
        tiles = to_blocks(factor).view(a * d, down, tile, across, tile).transpose(2, 3).reshape(-1, tile, tile).contiguous()
        count = torch.arange(a * d * down + 1, device=factor.device) * across
        columns = torch.arange(a * d * across, device=factor.device).view(a * d, 1, across).expand(-1, down, -1).flatten()
        return _compressed(torch.sparse_bsr, count, columns, tiles, (a * d * b, a * d * c))

    def multiply(self, x: Tensor, prepared: Tensor, pattern: Pattern) -> Tensor:
        permuted = x.unflatten(-1, (pattern.a, pattern.c, pattern.d)).transpose(2, 3).reshape(x.shape)
        product = linear(permuted, prepared)
        return product.unflatten(-1, (pattern.a, pattern.d, pattern.b)).transpose(2, 3).flatten(1)
