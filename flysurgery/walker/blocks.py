"""The blocks of a model, numbered through: the repeated pieces that hold attention and a feed-forward block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flysurgery.errors import OptionError, SelectionError
from flysurgery.walker.target import Target

_KINDS = {"qkv": "attention", "attn_out": "attention", "ffn_in": "feed-forward", "ffn_out": "feed-forward"}


def block_names(targets: Iterable[Target]) -> tuple[str, ...]:
    """Names of the model's blocks, in the order of execution: block 0 is the first.

    A block is the smallest numbered module (``blocks.3``, ``layers.0.blocks.1``) that holds linears of attention and of a
    feed-forward block; in a model that has no such module, the smallest numbered one that holds several linears of either.
    """
    members: dict[str, list[Target]] = {}
    for target in targets:
        if target.role in _KINDS:
            parts = target.fqn.split(".")
            for end in (i + 1 for i, part in enumerate(parts[:-1]) if part.isdigit()):
                members.setdefault(".".join(parts[:end]), []).append(target)
    both = [name for name, held in members.items() if len({_KINDS[target.role] for target in held}) == 2]
    found = both or [name for name, held in members.items() if len(held) > 1]
    return tuple(name for name in found if not any(other.startswith(f"{name}.") for other in found))


def in_blocks(targets: Sequence[Target], numbers: str) -> set[str]:
    """Names of the targets within the blocks that a text such as ``0-5,8`` lists.

    Raises:
        OptionError: the text is no list of numbers and ranges.
        SelectionError: a number or range that no block has.
    """
    names = block_names(targets)
    chosen: set[str] = set()
    for part in numbers.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise OptionError(f"blocks are numbers and ranges separated by commas, such as 0-5,8; got {numbers!r}")
        picked = names[int(first) : int(last if dash else first) + 1]
        if not picked:
            there = f"0 to {len(names) - 1}, {names[0]} to {names[-1]}" if names else "none"
            raise SelectionError(f"the model has no block {part.strip()}; its blocks are {there}")
        chosen.update(picked)
    return {target.fqn for target in targets if any(target.fqn.startswith(f"{name}.") for name in chosen)}
