"""Which architecture a matrix of a given size gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flysurgery.errors import OptionError, PatternError
from flysurgery.patterns import ARCHITECTURES, Architecture, named
from flysurgery.surgery.layer_plan import Reason

DEFAULT_NBLOCKS = 4


@dataclass(frozen=True)
class Rule:
    """How architectures are chosen: a family and its options, or the architectures themselves.

    The family's own options decide: ``nblocks`` for "monarch", ``rank`` for "lowrank". A matrix with explicit
    ``architectures`` gets the first of its size.

    Raises:
        OptionError: an option out of its range, or two that contradict each other.
    """

    arch: str = "monarch"
    nblocks: int = DEFAULT_NBLOCKS
    rank: int | None = None
    architectures: tuple[Architecture, ...] = ()

    def __post_init__(self) -> None:
        if self.arch not in ARCHITECTURES:
            raise OptionError(f"arch must be one of {', '.join(ARCHITECTURES)}, got {self.arch!r}")
        for name, value in (("nblocks", self.nblocks), ("rank", self.rank)):
            if value is not None and (type(value) is not int or value < 1):
                raise OptionError(f"{name} must be a positive integer, got {value!r}")
        given = {"nblocks": self.nblocks != DEFAULT_NBLOCKS, "rank": self.rank is not None}
        if self.architectures and any(given.values()):
            raise OptionError(f"patterns name the architecture, so {_names(given)} cannot be given with them")
        if (given["nblocks"] and self.arch != "monarch") or (given["rank"] and self.arch != "lowrank"):
            raise OptionError(
                f"arch {self.arch!r} takes no {'nblocks' if given['nblocks'] else 'rank'}; nblocks is for monarch, rank for lowrank"
            )

    def choose(self, out_features: int, in_features: int) -> Architecture | Reason:
        """The architecture for an ``out x in`` matrix, or why it stays dense."""
        size = f"{out_features}x{in_features}"
        try:
            found = self._candidate(out_features, in_features)
        except PatternError as error:
            return Reason("no-pattern", str(error))
        if isinstance(found, Architecture) and found.density >= 1:
            return Reason("no-gain", f"{found} has {found.num_parameters} weights, the dense {size} matrix {out_features * in_features}")
        return found

    def _candidate(self, out_features: int, in_features: int) -> Architecture | Reason:
        size = f"{out_features}x{in_features}"
        if self.architectures:
            fitting = [each for each in self.architectures if each.shape == (out_features, in_features)]
            sizes = ", ".join(f"{each} is {each.out_features}x{each.in_features}" for each in self.architectures)
            return fitting[0] if fitting else Reason("no-pattern", f"the matrix is {size}; of the given patterns {sizes}")
        return named(self.arch, out_features, in_features, nblocks=self.nblocks, rank=self.rank)


def _names(given: dict[str, bool]) -> str:
    return " and ".join(name for name, is_given in given.items() if is_given)


def read_architectures(patterns: str | Architecture | Sequence[object] | None) -> tuple[Architecture, ...]:
    """Read ``patterns``: one architecture, its text, its list of four-integer lists, or several of these.

    Raises:
        PatternError: what was given is no architecture.
    """
    if patterns is None:
        return ()
    if isinstance(patterns, Architecture):
        return (patterns,)
    if isinstance(patterns, str):
        return (Architecture.parse(patterns),)
    if patterns and all(isinstance(each, str | Architecture) for each in patterns):
        return tuple(each if isinstance(each, Architecture) else Architecture.parse(str(each)) for each in patterns)
    return (Architecture.from_json(patterns),)
