"""Factors of a matrix that is a Monarch matrix times the transpose of another, by simultaneous diagonalization."""

from time import perf_counter

import torch
from torch import Tensor

from flysurgery.errors import OptionError, PatternError, ProjectionError
from flysurgery.patterns import Architecture
from flysurgery.projection.project import Projection, as_projection, checked_matrix, of_equal_magnitude

SWEEPS = 10
"""They bring random products of up to 1024x1024 to relative errors of about 1e-10 and less, from 1e-6 at the start."""


@torch.no_grad()
def factor_mm_star(
    weight: Tensor,  # shape: (n, n)
    block: int,
) -> Projection:
    """Find the factors of ``weight = M Nᵀ``, where M and N are real Monarch matrices with blocks of side b (the class MM*).

    With ``s = n/b``, M and N are products of ``(1,s,s,b),(s,b,b,1)``. The two inner factors are multiplied into one, so three come back:
    ``(1,s,s,b),(s,b,b,1),(1,s,s,b)``. The first two are M, the last is Nᵀ. They are not unique. Let ``B_ij`` be the s×s block of the
    rows i and the columns j modulo b. Then ``B_ij = A_i D_ij C_j`` with a diagonal ``D_ij``, and for fixed k and l all
    ``B_il⁻¹ B_ij B_kj⁻¹ B_kl`` are diagonal in one basis: the eigenvectors of a random sum of them. ``SWEEPS`` solutions by least squares,
    for D, A and C in turn, take back the precision that the inverses cost.

    The work is done in float64 on the CPU, and the factors are rounded once to the dtype of ``weight``, on its device. It recovers
    products of random factors up to rounding, and is no approximation of other matrices. Costs O(n³/b) flops.

    Raises:
        OptionError: ``block`` is no positive integer.
        PatternError: ``weight`` is not square, or ``block`` does not divide n.
        ProjectionError: ``weight`` is complex or cannot be projected (see ``project``), no row and no column of blocks is without
            singular ones, or the product differs from ``weight``, relative to it, by more than the root of its dtype's precision.

    Source: Dao et al. 2022, arXiv:2204.00595, Algorithm 2 and Appendix D.3. The choice of k and l, the random sum and the sweeps are ours.
    """
    started = perf_counter()
    if type(block) is not int or block < 1:
        raise OptionError(f"block must be a positive integer, got {block!r}")
    n = weight.shape[-1] if weight.dim() else 0
    if tuple(weight.shape) != (n, n) or n < 1 or n % block:
        raise PatternError(
            f"an MM* factorization with blocks of {block} needs an n×n matrix with n a multiple of it, got {tuple(weight.shape)}"
        )
    if weight.is_complex():
        raise ProjectionError(f"expected a real weight for an MM* factorization, got {weight.dtype}; use project for complex weights")
    s = n // block
    architecture = Architecture.of((1, s, s, block), (s, block, block, 1), (1, s, s, block))
    matrix = checked_matrix(weight, architecture)
    B = matrix.reshape(s, block, s, block).permute(1, 3, 0, 2)
    left, right = _start(B)
    for _ in range(SWEEPS):
        middle = _diagonals(B, left, right)
        left = _right_inverse_times(middle[..., None] * right, B)
        right = _right_inverse_times((left[:, None] * middle[:, :, None]).transpose(0, 1).mT, B.transpose(0, 1).mT).mT
    factors = left.permute(1, 2, 0)[None], _diagonals(B, left, right).permute(2, 0, 1)[..., None], right.permute(1, 2, 0)[None]
    found = as_projection(weight, matrix, architecture, of_equal_magnitude([factor.contiguous() for factor in factors]), started)
    if not found.relative_error <= torch.finfo(weight.dtype).eps ** 0.5:
        raise ProjectionError(
            f"the {n}x{n} matrix is no product MM* of real Monarch matrices with blocks of {block}: the factors found miss it by "
            f"{found.relative_error:.1e} of its norm; try another block size, or project it"
        )
    return found


def _start(B: Tensor) -> tuple[Tensor, Tensor]:  # shapes: (b, b, s, s) and (b, s, s) twice
    """A and C of a solution whose ``D_il`` and ``D_kj`` are the identity, with the row k and column l of blocks farthest from singular."""
    values = torch.linalg.svdvals(B)
    invertible = (values[..., -1] / values[..., 0]).nan_to_num()  # a block of zeros has 0/0
    k, column = int(invertible.amin(1).argmax()), int(invertible.amin(0).argmax())
    if not min(invertible[k].amin(), invertible[:, column].amin()) > torch.finfo(B.dtype).eps:
        raise ProjectionError(
            f"an MM* factorization with blocks of {len(B)} needs a row and a column without singular blocks among the {len(B)}x{len(B)} "
            f"blocks of {B.shape[-1]}x{B.shape[-1]} entries, and the matrix has none; try another block size, or project it"
        )
    alike = torch.linalg.solve(B[:, column, None], B) @ torch.linalg.solve(B[k], B[k, column].expand_as(B[k]))
    shares = torch.randn(len(B), len(B), 1, 1, generator=torch.Generator().manual_seed(0), dtype=B.dtype)
    norms = torch.linalg.matrix_norm(alike, keepdim=True)
    eigenvalues, eigenvectors = torch.linalg.eig((shares * alike / norms.where(norms > 0, 1.0)).sum((0, 1)))
    # rounding may part a double eigenvalue into a complex pair, whose real and imaginary parts then are eigenvectors
    basis = torch.where(eigenvalues.imag >= 0, eigenvectors.real, eigenvectors.imag)
    left = B[:, column] @ basis
    return left, torch.linalg.solve_ex(left[k], B[k]).result


def _diagonals(B: Tensor, left: Tensor, right: Tensor) -> Tensor:  # shape: (b, b, s)
    """``D_ij``, the diagonal of ``A_i⁻¹ B_ij C_j⁻¹``."""
    inner = torch.linalg.solve_ex(right, B, left=False).result
    return torch.linalg.solve_ex(left[:, None], inner).result.diagonal(dim1=-2, dim2=-1)


def _right_inverse_times(known: Tensor, B: Tensor) -> Tensor:  # shapes: (b, b, s, s) twice, the result (b, s, s)
    """For each i the matrix ``A_i`` for which ``A_i known_ij`` is nearest to ``B_ij`` over all j."""
    finite = known.nan_to_num(0.0, 0.0, 0.0)  # LAPACK takes no other numbers; of a matrix that is no product they may occur
    side_by_side = (each.transpose(1, 2).flatten(2) for each in (finite, B))
    return torch.linalg.lstsq(*(each.mT for each in side_by_side)).solution.mT
