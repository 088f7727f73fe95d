"""The architectures that an allocation chooses from."""

from __future__ import annotations

from collections.abc import Callable

from flysurgery.errors import PatternError
from flysurgery.patterns import Architecture, gonon, low_rank, monarch

NBLOCKS = (2, 4, 8, 16)


def named_candidates(out_features: int, in_features: int) -> dict[str, Architecture]:
    """Monarch of 2, 4, 8 and 16 blocks and gonon where they fit, then low rank with at most as many weights as each; all below dense.

    The names say what is alike in matrices of different sizes, such as "monarch 4" and "low rank as monarch 4".
    """
    found: dict[str, Architecture] = {}

    def add(name: str, make: Callable[..., Architecture], *options: int) -> None:
        try:
            architecture = make(out_features, in_features, *options)
        except PatternError:
            return
        if architecture.density < 1:
            found[name] = architecture

    for nblocks in NBLOCKS:
        add(f"monarch {nblocks}", monarch, nblocks)
    add("gonon", gonon)
    if not found:  # a matrix whose sides have no common divisor can still be of low rank
        add("low rank", low_rank)
    for name, architecture in tuple(found.items()):
        rank = architecture.num_parameters // (out_features + in_features)
        if rank and name != "low rank":
            add(f"low rank as {name}", low_rank, rank)
    return found
