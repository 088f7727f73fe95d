"""Which architecture a matrix of a given size gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from flysurgery.errors import OptionError, PatternError
from flysurgery.patterns import ARCHITECTURES, Architecture, named
from flysurgery.surgery.layer_plan import Reason

DEFAULT_NBLOCKS = 4


@dataclass(frozen=True)
class Rule:
    """How architectures are chosen: a family and its options, or the architectures themselves.

    Without a budget the family's own options decide: ``nblocks`` for "monarch", ``rank`` for "lowrank". With a
    budget, a share of the dense weights in (0, 1], each matrix gets the family's densest architecture whose density
    is at most the budget, by the fewest blocks or the largest rank; "gonon" has one architecture a size, which
    either fits the budget or not. A matrix with explicit ``architectures`` gets the first of its size.

    Raises:
        OptionError: an option out of its range, or two that contradict each other.
    """

    arch: str = "monarch"
    nblocks: int = DEFAULT_NBLOCKS
    rank: int | None = None
    budget: float | None = None
    architectures: tuple[Architecture, ...] = ()

    def __post_init__(self) -> None:
        if self.arch not in ARCHITECTURES:
            raise OptionError(f"arch must be one of {', '.join(ARCHITECTURES)}, got {self.arch!r}")
        for name, value in (("nblocks", self.nblocks), ("rank", self.rank)):
            if value is not None and (type(value) is not int or value < 1):
                raise OptionError(f"{name} must be a positive integer, got {value!r}")
        if self.budget is not None and not (isinstance(self.budget, int | float) and 0 < self.budget <= 1):
            raise OptionError(f"budget is the share of the dense weights to keep, above 0 and at most 1; got {self.budget!r}")
        given = {"nblocks": self.nblocks != DEFAULT_NBLOCKS, "rank": self.rank is not None, "budget": self.budget is not None}
        if self.architectures and any(given.values()):
            raise OptionError(f"patterns name the architecture, so {_names(given)} cannot be given with them")
        if self.budget is not None and (given["nblocks"] or given["rank"]):
            raise OptionError("a budget chooses the number of blocks or the rank; give one of them")
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
        if self.budget is None:
            return named(self.arch, out_features, in_features, nblocks=self.nblocks, rank=self.rank)
        if self.arch == "lowrank":
            found = _largest_low_rank(out_features, in_features, self.budget)
        elif self.arch == "monarch":
            found = _densest_monarch(out_features, in_features, self.budget)
        else:
            found = named(self.arch, out_features, in_features)
            found = found if found.density <= self.budget else None
        return found or Reason("over-budget", f"no {self.arch} architecture of size {size} has a density of at most {self.budget:g}")


def _densest_monarch(out_features: int, in_features: int, budget: float) -> Architecture | None:
    common = gcd(out_features, in_features)
    for nblocks in (n for n in range(1, common + 1) if common % n == 0):
        architecture = named("monarch", out_features, in_features, nblocks=nblocks)
        if architecture.density <= budget and architecture.density < 1:
            return architecture
    return None


def _largest_low_rank(out_features: int, in_features: int, budget: float) -> Architecture | None:
    nearest = int(budget * out_features * in_features / (out_features + in_features))
    for rank in (nearest + 1, nearest):  # the division may have been rounded down
        if 0 < rank * (out_features + in_features) <= budget * out_features * in_features:
            return named("lowrank", out_features, in_features, rank=rank)
    return None


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
