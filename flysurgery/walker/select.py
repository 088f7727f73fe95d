"""Choose targets by role, by name, by size, and by the numbers of a model's blocks."""

import difflib
import re
from collections.abc import Iterable, Sequence

from flysurgery.errors import OptionError, SelectionError
from flysurgery.walker.linears import PARTS, ROLES, Target


def block_names(targets: Iterable[Target]) -> tuple[str, ...]:
    """Names of the model's blocks, in the order of execution: block 0 is the first.

    A block is the smallest numbered module (``blocks.3``, ``layers.0.blocks.1``) that holds linears of attention and of a feed-forward
    part; in a model that has no such module, the smallest numbered one that holds several linears of either.
    """
    members: dict[str, list[Target]] = {}
    for target in targets:
        if target.role in PARTS:
            parts = target.fqn.split(".")
            for end in (i + 1 for i, part in enumerate(parts[:-1]) if part.isdigit()):
                members.setdefault(".".join(parts[:end]), []).append(target)
    both = [name for name, held in members.items() if len({PARTS[target.role] for target in held}) == 2]
    found = both or [name for name, held in members.items() if len(held) > 1]
    return tuple(name for name in found if not any(other.startswith(f"{name}.") for other in found))


def _in_blocks(targets: Sequence[Target], numbers: str) -> set[str]:
    """Names of the targets within the blocks that a text such as ``0-5,8`` lists (OptionError, SelectionError)."""
    names = block_names(targets)
    chosen: set[str] = set()
    for part in str(numbers).split(","):
        found = _RANGE.fullmatch(part)
        first, last = (0, -1) if found is None else (int(found[1]), int(found[2] or found[1]))
        if last < first:
            raise OptionError(f"blocks are numbers and ranges separated by commas, such as 0-5,8; got {numbers!r}")
        if last >= len(names):
            there = f"0 to {len(names) - 1}, {names[0]} to {names[-1]}" if names else "none"
            raise SelectionError(f"the model has no block {part.strip()}; its blocks are {there}")
        chosen.update(names[first : last + 1])
    return {target.fqn for target in targets if any(target.fqn.startswith(f"{name}.") for name in chosen)}


_RANGE = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", re.ASCII)
_GROUPS = {"ffn": ("ffn_in", "ffn_out")}


def select(
    targets: Iterable[Target],
    *,
    roles: str | Sequence[str] | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    blocks: str | None = None,
    min_size: int | None = None,
) -> tuple[Target, ...]:
    """The targets of one of ``roles`` whose name matches one of ``include`` and none of ``exclude``, in their order.

    ``blocks`` leaves those within the blocks of these numbers (``"0-5,8"``, as ``block_names`` numbers them), ``min_size`` those whose
    smaller side is at least so long. Patterns are regular expressions, found anywhere in ``fqn`` (``re.search``). ``"ffn"`` stands for
    ``ffn_in`` and ``ffn_out``. None sets no condition. Blocked targets can be selected, and the caller reports why they are kept.

    Raises:
        OptionError: an unknown role, a pattern that is no regular expression, or blocks that are no numbers.
        SelectionError: a role, pattern, block or size that matches no target, with the nearest names; or nothing is left.
    """
    everything = tuple(targets)
    chosen = everything
    if min_size is not None and (type(min_size) is not int or min_size < 0):
        raise OptionError(f"min_size is a whole number of features, got {min_size!r}")
    if roles is not None:
        wanted = {role for selector in _listed(roles) for role in _matching_roles(selector, everything)}
        chosen = tuple(target for target in chosen if target.role in wanted)
    if include is not None:
        hits = set[str]().union(*(_hits(pattern, chosen, everything) for pattern in _listed(include)))
        chosen = tuple(target for target in chosen if target.fqn in hits)
    if exclude is not None:
        hits = set[str]().union(*(_hits(pattern, everything, everything) for pattern in _listed(exclude)))
        chosen = tuple(target for target in chosen if target.fqn not in hits)
    if blocks is not None:
        inside = _in_blocks(everything, blocks)
        if chosen and not any(target.fqn in inside for target in chosen):
            raise SelectionError(f"blocks {blocks} hold none of the {len(chosen)} linears selected, such as {chosen[0].fqn}")
        chosen = tuple(target for target in chosen if target.fqn in inside)
    if min_size is not None and chosen:
        largest = max(chosen, key=_smaller_side)
        if _smaller_side(largest) < min_size:
            size = f"{largest.out_features}x{largest.in_features}"
            raise SelectionError(f"no selected linear has both sides of at least {min_size}; the largest is {largest.fqn} with {size}")
        chosen = tuple(target for target in chosen if _smaller_side(target) >= min_size)
    if not chosen:
        raise SelectionError(f"nothing is left of the {len(everything)} linears found: every one is excluded")
    return chosen


def _smaller_side(target: Target) -> int:
    return min(target.out_features, target.in_features)


def _listed(selectors: str | Sequence[str]) -> Sequence[str]:
    listed = (selectors,) if isinstance(selectors, str) else selectors
    if not isinstance(listed, Sequence) or not all(isinstance(each, str) for each in listed):
        raise OptionError(f"roles, include and exclude are texts, or lists of texts; got {listed!r}")
    return listed


def _matching_roles(selector: str, targets: tuple[Target, ...]) -> tuple[str, ...]:
    roles = _GROUPS.get(selector, (selector,))
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        raise OptionError(f"unknown role {selector!r}; choose among {', '.join((*_GROUPS, *ROLES))}")
    if not any(target.role in roles for target in targets):
        counts = {role: sum(target.role == role for target in targets) for role in ROLES}
        present = ", ".join(f"{role} ({count})" for role, count in counts.items() if count) or "none"
        raise SelectionError(f"no linear of this model has the role {selector!r}; the roles found are {present}")
    return roles


def _hits(pattern: str, candidates: tuple[Target, ...], everything: tuple[Target, ...]) -> set[str]:
    """Names of the candidates that match; SelectionError where none does."""
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise OptionError(f"the pattern {pattern!r} is no regular expression: {error}") from error
    names = {target.fqn for target in candidates if expression.search(target.fqn)}
    if names:
        return names
    elsewhere = [target for target in everything if expression.search(target.fqn)]
    if elsewhere:
        listed = ", ".join(f"{target.fqn} ({target.role})" for target in elsewhere[:3])
        raise SelectionError(f"the pattern {pattern!r} matches no linear of the chosen roles, only {listed}; choose its role as well")
    plain = re.sub(r"\\[a-zA-Z]|[\\^$*+?{}\[\]()|]", "", pattern)

    def likeness(name: str) -> float:
        # the pattern may be meant for a part of the name only, so the best aligned part counts
        starts = [0, *(dot.end() for dot in re.finditer(r"\.", name))]
        return max(difflib.SequenceMatcher(None, plain, name[start:]).ratio() for start in starts)

    nearest = sorted((target.fqn for target in everything), key=likeness, reverse=True)[:3]
    raise SelectionError(f"the pattern {pattern!r} matches no linear; the nearest names are {', '.join(nearest)}")
