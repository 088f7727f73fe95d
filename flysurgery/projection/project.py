"""From a dense matrix to the nearest product of Kronecker-sparse factors, or to random ones, and how far it is from the matrix."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from time import perf_counter

import torch
from torch import Tensor, nn

from flysurgery.errors import PatternError, ProjectionError
from flysurgery.factors import dense_to_factor, factor_to_dense, factors_to_dense
from flysurgery.patterns import Architecture, check_fits, product_pattern
from flysurgery.projection.two_factor import block_svd, columns_to_factor, rows_to_factor, two_factor


@dataclass(frozen=True)
class Projection:
    """Factors near a dense matrix W, and the errors of these factors as they are stored.

    Attributes:
        architecture: the patterns of the factors.
        factors: left to right, each of shape (a, b, c, d), in the dtype and on the device of W.
        relative_error: ``‖W - K_1 ... K_L‖ / ‖W‖`` in the Frobenius norm. The stored factors are multiplied out in float64,
            so rounding them to the dtype of W counts; the rounding of a multiplication at run time does not. 0 for W = 0.
        energy_kept: ``1 - relative_error²``, the share of ``‖W‖²`` that the product explains.
        seconds: wall time of the projection and of measuring it.
    """

    architecture: Architecture
    factors: tuple[Tensor, ...]
    relative_error: float
    energy_kept: float
    seconds: float


@torch.no_grad()
def project(
    weight: Tensor,  # shape: (out_features, in_features)
    architecture: Architecture,
) -> Projection:
    """Find factors of ``architecture`` whose product is near ``weight`` in the Frobenius norm, and measure how near.

    One factor: the entries on its support, exactly. Two factors, whatever their patterns: the optimum, by block SVDs. More:
    within ``sqrt(L-1)`` of the optimum if the architecture is chainable. ``weight`` may have any floating or complex dtype and lie
    on any device, and is not changed; the work is done in float64 or complex128 on the CPU, and the factors are rounded once to
    the dtype of ``weight`` and put on its device.

    Raises:
        PatternError: ``weight`` is no matrix of the architecture's shape; the message gives both shapes.
        ProjectionError: ``weight`` holds NaN or infinite entries (the message says how many and where the first is), holds
            integers, or the architecture has more than two factors and is not chainable.
    """
    started = perf_counter()
    matrix = checked_matrix(weight, architecture)
    if len(architecture) == 1:
        factors = (dense_to_factor(matrix, architecture.patterns[0]),)
    elif len(architecture) == 2:
        factors = two_factor(matrix, *architecture)
    else:
        factors = hierarchical(matrix, architecture)
    return as_projection(weight, matrix, architecture, factors, started)


def hierarchical(matrix: Tensor, architecture: Architecture) -> tuple[Tensor, ...]:
    """Approximate ``matrix`` by a product of L factors of a chainable architecture.

    The left-most factor is split off by an optimal two-factor projection whose columns are orthonormal on each block, and what is left of
    the matrix, now in the next factors, is split in the same way. Because of the orthonormal columns the squared errors of the L-1 steps
    add up, and no step exceeds the optimum: the error is at most ``sqrt(L-1)`` times the smallest possible one, and zero for an exact
    product. In the end the factors are scaled so that their largest entries are of one magnitude.

    Raises:
        ProjectionError: the architecture is not chainable, where no algorithm with a guarantee is known.

    Source: Le, Zheng, Riccietti and Gribonval 2024, arXiv:2411.04506.
    """
    if not architecture.is_chainable:
        left, right = next(pair for pair in pairwise(architecture) if not Architecture(pair).is_chainable)
        raise ProjectionError(
            f"a product of more than two factors needs neighbours that are chainable, and {left},{right} are not chainable; "
            f"choose others, any two factors, or random factors to train from (--init random; init='random' in Python)"
        )
    # the patterns of K_1 ... K_L, K_2 ... K_L, and so on to K_L
    tails = list(accumulate(reversed(architecture.patterns), lambda tail, pattern: product_pattern(pattern, tail)))[::-1]
    factors: list[Tensor] = []
    remainder = dense_to_factor(matrix, tails[0])
    for pattern, tail in zip(architecture.patterns, tails[1:], strict=False):
        columns, values, rows = block_svd(factor_to_dense(remainder), pattern, tail)
        factors.append(columns_to_factor(columns, pattern))
        remainder = rows_to_factor(rows * values[:, None], tail)
    return of_equal_magnitude([*factors, remainder])


def of_equal_magnitude(factors: list[Tensor]) -> tuple[Tensor, ...]:
    """Share the magnitude out, so that no factor is near the ends of half precision's range before the others are."""
    largest = torch.stack([factor.abs().amax() for factor in factors])
    if not largest.all():
        return tuple(factors)
    common = largest.log().mean().exp()
    return tuple(factor * (common / own) for factor, own in zip(factors, largest, strict=True))


def draw(factors: Iterable[Tensor], architecture: Architecture, generator: torch.Generator | None = None) -> None:
    """Fill the factors, left to right, with numbers that give outputs the variance of ``nn.Linear``'s own start.

    ``nn.Linear`` draws its weights uniformly with variance ``1 / (3*in_features)``, which maps inputs of unit variance to outputs of
    variance 1/3. An output of a factor sums c products, so factors of variance ``1 / c`` keep the variance, and the leftmost, of
    ``1 / (3*c)``, brings the third.
    """
    for index, (factor, pattern) in enumerate(zip(factors, architecture, strict=True)):
        bound = math.sqrt((1 if index == 0 else 3) / pattern.c)
        nn.init.uniform_(factor, -bound, bound, generator)


@torch.no_grad()
def random_start(weight: Tensor, architecture: Architecture, seed: int) -> Projection:
    """Draw factors of any architecture in the place of the nearest ones, and measure how far their product is from ``weight``.

    Raises:
        PatternError, ProjectionError: as ``project`` does, but that any architecture will do.
    """
    started = perf_counter()
    factors = [torch.empty(pattern.factor_shape, dtype=torch.float64) for pattern in architecture]
    draw(factors, architecture, torch.Generator().manual_seed(seed))
    return as_projection(weight, checked_matrix(weight, architecture), architecture, factors, started)


def checked_matrix(weight: Tensor, architecture: Architecture) -> Tensor:
    """``weight`` in float64 or complex128 on the CPU, if it can be projected; raises what ``project`` raises."""
    if weight.dim() != 2:
        raise PatternError(f"expected a matrix of shape {architecture.shape}, got a tensor of shape {tuple(weight.shape)}")
    check_fits(architecture, *weight.shape)
    if not (weight.is_floating_point() or weight.is_complex()):
        raise ProjectionError(f"expected a weight of floating-point or complex numbers, got {weight.dtype}; convert it first")
    if weight.is_meta:
        raise ProjectionError("the weight is on the meta device and has no values; load the model's weights first")
    wide = torch.complex128 if weight.is_complex() else torch.float64
    matrix = weight.detach().cpu().to(wide).contiguous()  # the order of sums, and so the last bit, follows the strides
    bad = (~matrix.isfinite()).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        raise ProjectionError(
            f"the weight has {len(bad)} NaN or infinite entries of {matrix.numel()}, the first {matrix[row, column].item()} "
            f"at row {row}, column {column}; only finite weights can be projected"
        )
    return matrix


def as_projection(weight: Tensor, matrix: Tensor, architecture: Architecture, found: Sequence[Tensor], started: float) -> Projection:
    """Round the factors to what ``weight`` is stored in, and measure them; ``matrix`` is the same in float64 or complex128, as they are."""
    factors = tuple(factor.to(device=weight.device, dtype=weight.dtype) for factor in found)
    scale = matrix.abs().amax()
    if scale == 0:
        scale = torch.ones_like(scale)
    residual = (matrix - factors_to_dense([factor.to(matrix) for factor in factors])) / scale  # so that no square overflows
    norm = torch.linalg.vector_norm(matrix / scale)
    error = float(torch.linalg.vector_norm(residual) / norm) if norm > 0 else 0.0
    return Projection(architecture, factors, error, 1.0 - error**2, perf_counter() - started)


def product_of(projection: Projection) -> Tensor:
    """The product of the factors; shape (out_features, in_features), float64, on the CPU."""
    return factors_to_dense([factor.detach().to("cpu", torch.float64) for factor in projection.factors])
