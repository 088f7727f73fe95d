"""Recover fast transforms as products of butterfly factors, by projection and by learning, and time a Fourier transform made of them.

    python recipes/transforms.py recovered --out build/recovered.csv

The tables:

    recovered  DFT, DCT, DST, Hadamard, Hartley and a circular convolution, as Figure 5 of Dao et al. 2019 has them, by hierarchical
               factorisation after the transform's own permutation, beside sparse, low rank, and sparse plus low rank of as many numbers
    learned    the same by Adam from random factors and relaxed permutations, as they learn them: the best of --starts, before and
               after the permutations are rounded. ``found`` counts those below an rmse of 1e-4, ``choices`` are a, b and c of each level of
               the best one's permutations
    times      the Fourier transform by factors of several radices, bit reversal included, beside torch.fft and the dense product

Every transform has a Frobenius norm of sqrt(n), so that zeros have an rmse of n**-0.5. A real transform but Hadamard's is the real part of
a complex product. ``butterfly, real`` has real factors twice as wide instead. ``numbers`` counts real numbers, two for a complex one, and
no indices of sparse entries; ``share`` is that over the dense matrix's. DCT and DST take one permutation more than a butterfly has, and
the convolution a second butterfly, so that two products are learned for each. Transforms are complex64 or float32; rivals are computed in
float64.

Needs any device; learned a CPU and ten minutes.
Rows: recipes/results/transforms.csv
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import NamedTuple

import scipy.linalg
import torch
from recipe import Place, Run, Table, run
from torch import Tensor, nn

from flysurgery.bench import Case, Record
from flysurgery.factors import bit_reversal
from flysurgery.ops import ks_linear
from flysurgery.patterns import Architecture, square_dyadic
from flysurgery.projection import project

RATE = 0.05
ROUNDED = 0.5  # the share of the steps after which each choice of the permutations is rounded; the rest fits the factors alone


def permute(
    x: Tensor,  # shape: (rows, starts, n)
    choices: Tensor,  # shape: (starts, levels, 3), between 0 and 1
) -> Tensor:  # shape: (rows, starts, n)
    """Apply a relaxed permutation. Level l cuts a row into ``2**l`` blocks and makes three choices, the same for all blocks.

    a: the even entries before the odd ones. b: the first half reversed. c: the second half reversed. A choice between 0 and 1 mixes the
    two outcomes linearly. Where all are 0 or 1, this is a permutation; a = 1 and b = c = 0 on all levels is bit reversal.

    Source: Dao et al. 2019, arXiv:1903.05895.
    """
    for level in range(choices.shape[1]):
        a, b, c = choices[:, level, :, None, None].unbind(1)
        blocks = x.unflatten(-1, (1 << level, -1))
        blocks = a * torch.cat((blocks[..., ::2], blocks[..., 1::2]), -1) + (1 - a) * blocks
        first, second = blocks.chunk(2, -1)
        x = torch.cat((b * first.flip(-1) + (1 - b) * first, c * second.flip(-1) + (1 - c) * second), -1).flatten(-2)
    return x


def learn(
    target: Tensor,  # shape: (n, n)
    products: int,
    *,
    starts: int,
    steps: int,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:  # shapes: (starts,), (starts,), (starts, products, levels, 3)
    """Fit products of a complex butterfly and a permutation to a matrix, by Adam on the mean squared error of its entries.

    A real matrix is compared with the real part. All starts are fitted together, as blocks on the diagonal of one product, and do not
    affect each other. Gives the root mean squared error of each start with the relaxed permutations, that at the end with
    rounded ones, and the rounded choices.
    """
    n, generator = len(target), torch.Generator().manual_seed(seed)
    shapes = [(starts * pattern.a, pattern.b, pattern.c, pattern.d) for pattern in square_dyadic(n)]
    drawn = [[torch.randn(shape, generator=generator, dtype=torch.complex64) / 2**0.5 for shape in shapes] for _ in range(products)]
    butterflies = [[nn.Parameter(factor) for factor in factors] for factors in drawn]
    logits = nn.Parameter(torch.zeros(starts, products, len(shapes) - 1, 3))
    optimizer = torch.optim.Adam([logits, *(factor for factors in butterflies for factor in factors)])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1, cycle_momentum=False)
    identity = torch.eye(n, dtype=torch.complex64)[:, None].expand(n, starts, n)
    wanted = target.mT.to(torch.complex64)[:, None]

    def errors(choices: Tensor) -> Tensor:
        y = identity
        for place in reversed(range(products)):
            y = ks_linear(permute(y, choices[:, place]).flatten(1), butterflies[place]).unflatten(1, (starts, n))
        return squares(y - wanted, target).mean((0, 2))

    relaxed = squared = torch.zeros(starts)
    for step in range(steps):
        rounded = step >= ROUNDED * steps
        squared = errors((logits.detach() > 0).float() if rounded else logits.sigmoid())
        relaxed = relaxed if rounded else squared.detach()
        optimizer.zero_grad()
        squared.sum().backward()
        optimizer.step()
        schedule.step()
    return relaxed.sqrt(), squared.detach().sqrt(), (logits.detach() > 0).int()


def squares(difference: Tensor, target: Tensor) -> Tensor:
    """Squared errors of the entries, of their real parts where the target is real."""
    return (difference if target.is_complex() else difference.real).abs().square()


class Transform(NamedTuple):
    """A matrix, and complex or real ones whose product it is, or is the real part of; each is a butterfly with its columns in ``order``."""

    target: Tensor
    parts: tuple[Tensor, ...]
    order: Tensor
    products: int = 1


def dft(n: int) -> Tensor:
    return torch.fft.fft(torch.eye(n, dtype=torch.complex128), norm="ortho")


def cosine(n: int, phase: complex, shift: int) -> Transform:
    """The real part of ``phase * exp(-i pi (2q+1)(p+shift) / 2n)``: DCT and DST of the second kind, by a Fourier transform of n points.

    Source: Makhoul 1980, "A fast cosine transform in one and two dimensions".
    """
    p, q = torch.arange(n, dtype=torch.float64)[:, None] + shift, torch.arange(n)
    waves = phase * torch.exp(-1j * math.pi / (2 * n) * p * (2 * q + 1))
    waves = waves / torch.linalg.vector_norm(waves.real, dim=1, keepdim=True)
    order = torch.cat((q[::2], q[1::2].flip(0)))[bit_reversal(n)]
    return Transform(waves.real, (torch.where(q % 2 == 0, waves, waves.conj()),), order, products=2)


def convolution(n: int) -> Transform:
    """The circular convolution with a random filter: two Fourier transforms, and the filter's own between them."""
    taps = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    taps /= taps.norm()
    inverse = dft(n).conj() * torch.fft.fft(taps.to(torch.complex128))
    return Transform(torch.from_numpy(scipy.linalg.circulant(taps.numpy())), (inverse, dft(n)), bit_reversal(n), products=2)


TRANSFORMS: Mapping[str, Callable[[int], Transform]] = {
    "dft": lambda n: Transform(dft(n), (dft(n),), bit_reversal(n)),
    "dct": partial(cosine, phase=1, shift=0),
    "dst": partial(cosine, phase=1j, shift=1),
    "hadamard": lambda n: Transform(matrix := torch.from_numpy(scipy.linalg.hadamard(n) / n**0.5), (matrix,), torch.arange(n)),
    "hartley": lambda n: Transform(((1 + 1j) * dft(n)).real, ((1 + 1j) * dft(n),), bit_reversal(n)),
    "convolution": convolution,
}


def real_butterfly(n: int) -> Architecture:
    """Real factors that hold the real part of a complex square dyadic butterfly of n >= 4: each inner number is a pair."""
    middle = [(1 << level, 4, 4, n >> level + 1) for level in range(1, n.bit_length() - 2)]
    return Architecture.of((1, 2, 4, n // 2), *middle, (n // 2, 4, 2, 1))


def radix(n: int, size: int) -> Architecture:
    """Factors of ``size`` x ``size`` blocks, the last one of what is left; ``radix(n, 2)`` is the square dyadic butterfly."""
    patterns, left = [], 1
    while left < n:
        block = min(size, n // left)
        patterns.append((left, block, block, n // (left * block)))
        left *= block
    return Architecture.of(*patterns)


def low_rank(matrix: Tensor, rank: int) -> Tensor:
    """The nearest matrix of that rank. LAPACK's SVD fails on some of these matrices, whose singular values repeat."""
    _, vectors = torch.linalg.eigh(matrix.mH @ matrix)  # ascending
    kept = vectors[:, max(0, len(matrix) - rank) :]
    return matrix @ kept @ kept.mH


def sparse(matrix: Tensor, entries: int) -> Tensor:
    kept = matrix.abs().flatten().topk(min(entries, matrix.numel())).indices
    return torch.zeros_like(matrix).flatten().scatter(0, kept, matrix.flatten()[kept]).view_as(matrix)


def sparse_and_low_rank(matrix: Tensor, entries: int) -> Tensor:
    """About half of the entries for each, fitted by turns to what the other leaves."""
    n = len(matrix)
    rank = entries // (4 * n)
    own = other = torch.zeros_like(matrix)
    for _ in range(10):
        own = sparse(matrix - other, entries - 2 * n * rank)
        other = low_rank(matrix - own, rank)
    return own + other


def recovered(place: Place, *, transform: str, n: int) -> Iterator[Record]:
    """A transform by butterflies, and by rivals of as many numbers."""
    known = TRANSFORMS[transform](n)
    target, order, each = known.target, known.order, 2 if known.target.is_complex() else 1

    def row(candidate: str, numbers: int, make: Callable[[], Tensor]) -> Record:
        begun = time.perf_counter()
        error = float(squares(make() - target, target).mean().sqrt())
        found = {"numbers": numbers, "share": numbers / (each * n * n), "rmse": error, "seconds": time.perf_counter() - begun}
        return {"candidate": candidate} | found

    def product(parts: tuple[Tensor, ...], architecture: Architecture) -> Tensor:
        narrow = torch.complex64 if parts[0].is_complex() else torch.float32
        y = torch.eye(n, dtype=narrow)
        for part in reversed(parts):
            y = ks_linear(y[:, order], project(part[:, order].to(narrow), architecture).factors)
        return y.mT

    numbers = sum(square_dyadic(n).num_parameters * (2 if part.is_complex() else 1) for part in known.parts)
    yield row("butterfly", numbers, lambda: product(known.parts, square_dyadic(n)))
    if each == 1 and len(known.parts) == 1 and known.parts[0].is_complex():
        yield row("butterfly, real", real_butterfly(n).num_parameters, lambda: product((target,), real_butterfly(n)))
    yield row("sparse", numbers, lambda: sparse(target, numbers // each))
    yield row("low rank", numbers, lambda: low_rank(target, numbers // each // (2 * n)))
    yield row("sparse plus low rank", numbers, lambda: sparse_and_low_rank(target, numbers // each))


def learned(place: Place, *, transform: str, n: int, starts: int, steps: int, seed: int) -> Iterator[Record]:
    """The best of several starts, and how many found the transform."""
    known, begun = TRANSFORMS[transform](n), time.perf_counter()
    relaxed, errors, choices = learn(known.target, known.products, starts=starts, steps=steps, seed=seed)
    best = int(errors.argmin())
    found = {"found": int((errors < 1e-4).sum()), "rmse_relaxed": float(relaxed.min()), "rmse": float(errors[best])}
    text = " | ".join(" ".join("".join(map(str, level)) for level in product) for product in choices[best].tolist())
    yield found | {"products": known.products, "choices": text, "seconds": time.perf_counter() - begun}


@cache
def fourier_factors(n: int, size: int) -> tuple[Tensor, ...]:
    """Complex64 factors of the Fourier transform whose columns are in bit-reversed order."""
    return tuple(factor.to(torch.complex64) for factor in project(dft(n)[:, bit_reversal(n)], radix(n, size)).factors)


def times_case(place: Place, *, n: int, rows: int, mode: str) -> Case:
    """A Fourier transform of complex rows by factors of each radix, dense, and by torch.fft."""
    x, order = torch.randn(rows, n, dtype=torch.complex64, device=place.device), bit_reversal(n).to(place.device)
    matrix = dft(n).to(place.device, torch.complex64)
    runs: dict[str, Run | str] = {
        "fft": lambda x: torch.view_as_real(torch.fft.fft(x, norm="ortho")),
        "dense": lambda x: torch.view_as_real(x @ matrix),
    }
    for size in (2, 8, 64):
        if size == 2 or size < n:
            factors = [factor.to(place.device) for factor in fourier_factors(n, size)]
            runs[f"radix {size}"] = lambda x, factors=factors: torch.view_as_real(ks_linear(x[:, order], factors))
    return Case(runs, x, torch.view_as_real(torch.fft.fft(x.to(torch.complex128), norm="ortho")), baseline="fft")


TABLES = {
    "recovered": Table(
        {"transform": tuple(TRANSFORMS), "n": (8, 16, 32, 64, 128, 256, 512, 1024)},
        recovered,
        timed=False,
        quick={"n": (8, 64)},
        columns=("candidate", "numbers", "share", "rmse", "seconds"),
    ),
    "learned": Table(
        {"transform": tuple(TRANSFORMS), "n": (8, 16, 32), "starts": (16,), "steps": (3000,), "seed": (0,)},
        learned,
        timed=False,
        quick={"n": (8,), "steps": (1000,)},
        columns=("products", "found", "rmse_relaxed", "rmse", "choices", "seconds"),
    ),
    "times": Table(
        {"n": tuple(1 << bits for bits in range(1, 13)), "rows": (1, 64, 1024), "mode": ("fp32",)},
        times_case,
        quick={"n": (2, 64)},
        seconds=0.2,
    ),
}

if __name__ == "__main__":
    run(__doc__, TABLES)
