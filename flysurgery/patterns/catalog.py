"""The named architectures: every row of Table 8 of Gonon et al. 2024, and their ViT-S/16 ones."""

from contextlib import suppress
from math import gcd

from flysurgery.errors import OptionError, PatternError
from flysurgery.patterns.pattern import Architecture

ARCHITECTURES = ("monarch", "gonon", "lowrank", "dyadic", "kaleidoscope", "block", "deformable")
"""The names that ``named`` knows. Those in ``SQUARE`` exist for square matrices alone, those ``OF_BLOCKS`` take a number of blocks."""
SQUARE = ("dyadic", "kaleidoscope", "block")
OF_BLOCKS = ("monarch", "block", "deformable")

RANK_STEP = 8
"""Default ranks are multiples of this: 16 bytes of half precision, which dense matrix kernels want rows to be aligned to."""


def low_rank(out_features: int, in_features: int, rank: int | None = None) -> Architecture:
    """Low rank r, ``(1,m,r,1),(1,r,n,1)``, with ``r*(m+n)`` parameters.

    Without a rank: the largest one with at most half the parameters of the dense matrix, ``m*n / (2*(m+n))``, rounded
    down to a multiple of ``RANK_STEP`` where it is at least that large.

    Raises:
        OptionError: the rank is no positive integer.
        PatternError: the rank exceeds ``min(m, n)``; the message gives both sizes.
    """
    _check_sizes(out_features, in_features)
    if rank is None:
        half = max(1, out_features * in_features // (2 * (out_features + in_features)))
        rank = half - half % RANK_STEP if half >= RANK_STEP else half
    _check_positive("rank", rank)
    if rank > min(out_features, in_features):
        raise PatternError(
            f"a {out_features}x{in_features} matrix has no rank above {min(out_features, in_features)}, got rank {rank}; "
            f"choose a smaller rank, or leave it out for half the parameters"
        )
    return Architecture.of((1, out_features, rank, 1), (1, rank, in_features, 1))


def monarch(out_features: int, in_features: int, nblocks: int = 4) -> Architecture:
    """Monarch with p blocks, ``(1,m/p,k/p,p),(p,k/p,n/p,1)`` with ``k = min(m, n)``.

    Holds ``k*(m+n)/p`` parameters. The rank of the blocks is ``k/p²``, alternating between its two neighbouring integers
    where p² does not divide k.

    Raises:
        OptionError: ``nblocks`` is no positive integer.
        PatternError: ``nblocks`` does not divide both sizes; the message gives both and the nearest that does.

    Source: Dao et al. 2022, arXiv:2204.00595, Appendix C; Gonon et al. 2024, Table 8.
    """
    _check_sizes(out_features, in_features)
    _check_positive("nblocks", nblocks)
    common = gcd(out_features, in_features)
    if common % nblocks:
        nearest = _nearest_divisors(common, nblocks)
        raise PatternError(
            f"nblocks {nblocks} does not divide both sizes of a {out_features}x{in_features} matrix; nearest nblocks that do: {nearest}"
        )
    rows, inner, columns = out_features // nblocks, min(out_features, in_features) // nblocks, in_features // nblocks
    return Architecture.of((1, rows, inner, nblocks), (nblocks, inner, columns, 1))


def gonon(out_features: int, in_features: int) -> Architecture:
    """The ViT-S/16 architectures of Gonon et al., scaled to the width N = min(m, n) of the model.

    | matrix | architecture | ViT-S/16, N = 384 | density | needs |
    |---|---|---|---|---|
    | N×N | (1,N/2,N/8,2),(2,N/8,N/2,1) | (1,192,48,2),(2,48,192,1) | 1/4 | 8 divides N |
    | 4N×N | (1,2N,N/2,2),(6,N/6,N/6,1) | (1,768,192,2),(6,64,64,1) | 13/24 | 6 divides N |
    | N×4N | (1,N/3,N/3,3),(6,N/6,2N/3,1) | (1,128,128,3),(6,64,256,1) | 1/4 | 6 divides N |

    Scaling keeps the numbers of blocks a and d, so that the density and the grid of blocks are those that the paper measured. The last one
    is not chainable.

    Raises:
        PatternError: the matrix is none of N×N, 4N×N, N×4N, or the width does not divide; the message gives both sizes.

    Source: Gonon et al. 2024, arXiv:2405.15013, Appendix B.7, and its authors' code for N×4N.
    """
    _check_sizes(out_features, in_features)
    n = min(out_features, in_features)
    ratio = (out_features // n, in_features // n)
    needs = {(1, 1): 8, (4, 1): 6, (1, 4): 6}.get(ratio)
    if needs is None or (out_features, in_features) != (ratio[0] * n, ratio[1] * n):
        raise PatternError(
            f"the architectures of Gonon et al. are for N×N, 4N×N and N×4N matrices, got {out_features}x{in_features}; "
            f"use monarch or lowrank for this one"
        )
    if n % needs:
        raise PatternError(
            f"the architecture of Gonon et al. for a {out_features}x{in_features} matrix needs a width that is a multiple of {needs}, "
            f"got {n}; use monarch or lowrank for this one"
        )
    if ratio == (1, 1):
        return Architecture.of((1, n // 2, n // 8, 2), (2, n // 8, n // 2, 1))
    if ratio == (4, 1):
        return Architecture.of((1, 2 * n, n // 2, 2), (6, n // 6, n // 6, 1))
    return Architecture.of((1, n // 3, n // 3, 3), (6, n // 6, 2 * n // 3, 1))


def square_dyadic(n: int) -> Architecture:
    """The square dyadic butterfly, ``(2^(l-1), 2, 2, 2^(L-l))`` for l = 1 to L, of an n×n matrix with ``n = 2^L``, n >= 2.

    Raises:
        PatternError: n is no power of two.

    Source: Dao et al. 2019, arXiv:1903.05895.
    """
    if n < 2 or n & (n - 1):
        raise PatternError(f"a square dyadic butterfly needs n = 2^L with L >= 1, got a {n}x{n} matrix; block takes other sizes")
    return deformable(n, n, n // 2)


def kaleidoscope(n: int) -> Architecture:
    """The square dyadic butterfly followed by its transpose: 2L factors of an n×n matrix with ``n = 2^L``.

    Not chainable from n = 4 on, so there is no projection to it.

    Raises:
        PatternError: n is no power of two.

    Source: Gonon et al. 2024, Table 8, which follows the implementation of Dao et al. 2022.
    """
    butterfly = square_dyadic(n)
    return Architecture(butterfly.patterns + butterfly.transpose.patterns)


def deformable(out_features: int, in_features: int, nblocks: int = 4) -> Architecture:
    """The deformable butterfly of an m×n matrix with p blocks a factor; for a square matrix it is the block butterfly.

    The block butterfly is ``(2^(l-1), n/p, n/p, 2^(L-l))`` for l = 1 to L, with ``p = 2^(L-1)``, and holds ``L*n²/p`` parameters. It is the
    butterfly of t×t blocks, ``n = 2^L·t``, up to one permutation of the rows and one of the columns. Two blocks are Monarch's, ``n/2`` are
    the square dyadic butterfly's. A rectangle takes that of ``k = min(m, n)`` with one factor stretched: the blocks of the leftmost factor
    are ``m/p × k/p``, those of the rightmost ``k/p × n/p``. The source calls any list of patterns whose sizes agree a deformable
    butterfly; ``Architecture.of`` takes those.

    Raises:
        OptionError: ``nblocks`` is no positive integer.
        PatternError: ``nblocks`` is no power of two, does not divide the larger size, or its double does not divide the smaller one.

    Source: Dao et al. 2022, arXiv:2112.00029, and Gonon et al. 2024, Lemma C.4, for square matrices; Lin et al. 2021, "Deformable
    Butterfly", for the class; Dao et al. 2022, arXiv:2204.00595, Appendix C, for the stretching.
    """
    _check_sizes(out_features, in_features)
    _check_positive("nblocks", nblocks)
    inner = min(out_features, in_features)
    if nblocks & (nblocks - 1) or inner % (2 * nblocks) or max(out_features, in_features) % nblocks:
        raise PatternError(
            f"nblocks {nblocks} gives no butterfly of a {out_features}x{in_features} matrix: it must be a power of two that divides "
            f"{max(out_features, in_features)}, and its double must divide {inner}"
        )
    depth = nblocks.bit_length()
    rows = [[1 << level, inner // nblocks, inner // nblocks, 1 << (depth - 1 - level)] for level in range(depth)]
    rows[0][1], rows[-1][2] = out_features // nblocks, in_features // nblocks
    return Architecture.of(*rows)


def named(name: str, out_features: int, in_features: int, *, nblocks: int = 4, rank: int | None = None) -> Architecture:
    """Build the architecture of that name, one of ``ARCHITECTURES``, for an ``out x in`` matrix.

    ``nblocks`` is read by those in ``OF_BLOCKS`` only, ``rank`` by ``lowrank`` only.

    Raises:
        OptionError: the name is unknown (the message lists the names), or ``rank`` is given for another name than ``lowrank``.
        PatternError: the sizes do not fit; see the constructor of that name.
    """
    if rank is not None and name != "lowrank":
        raise OptionError(f"rank belongs to the architecture lowrank, got rank {rank} with {name!r}; leave it out")
    if name in SQUARE and out_features != in_features:
        raise PatternError(
            f"the architecture {name} is for square matrices, got {out_features}x{in_features}; "
            f"use deformable, monarch or lowrank for this one"
        )
    if name not in ARCHITECTURES:
        raise OptionError(f"unknown architecture {name!r}; choose one of {', '.join(ARCHITECTURES)}")
    if name == "gonon":
        return gonon(out_features, in_features)
    if name == "lowrank":
        return low_rank(out_features, in_features, rank)
    if name in OF_BLOCKS:
        return (monarch if name == "monarch" else deformable)(out_features, in_features, nblocks)
    return (square_dyadic if name == "dyadic" else kaleidoscope)(in_features)


def family_of(architecture: Architecture) -> str:
    """The family that an architecture belongs to: "low rank" or another name of ``ARCHITECTURES``; "other" if it is of none of them."""
    if len(architecture) == 1:
        return "other"
    if len(architecture) == 2 and all(pattern.a == pattern.d == 1 for pattern in architecture):
        return "low rank"
    for family in ARCHITECTURES:
        with suppress(PatternError):
            if named(family, *architecture.shape, nblocks=architecture.patterns[0].d) == architecture:
                return family
    return "other"


def _check_sizes(out_features: int, in_features: int) -> None:
    if min(out_features, in_features) < 1:
        raise PatternError(f"a matrix has positive sizes, got {out_features}x{in_features}")


def _check_positive(option: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise OptionError(f"{option} must be a positive integer, got {value!r}")


def _nearest_divisors(n: int, wanted: int) -> str:
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    nearest = [d for d in divisors if d < wanted][-1:] + [d for d in divisors if d > wanted][:1]
    return " and ".join(map(str, nearest))
