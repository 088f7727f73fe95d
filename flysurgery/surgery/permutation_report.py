"""What another order of shared features won, and which had to stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flysurgery.surgery.table import grouped, text_table

MOVED = ("in a new order", "role", "layers", "fit error before", "after")
STAYED = ("in their own order", "n", "what", "why")


@dataclass(frozen=True)
class PermutedLayer:
    """A layer's relative errors ``sqrt(tr(D G Dᵀ) / tr(W G Wᵀ))`` in the old order and in the new one.

    G is the metric that it was fitted in; of several parts the root of the mean square.
    """

    fqn: str
    role: str
    before: float
    after: float


@dataclass(frozen=True)
class Permutation:
    """One attention's heads, or one block's hidden units (``what``), which the ``linears`` share.

    ``moved``: a new order was better than their own and was taken; it is in the weights, and the model computes the same but for the
    projection. ``layers`` are those for which the order counts, with the errors of the two orders. ``tied`` says why heads, entries of
    query and key, or entries of value keep their order.
    """

    what: str
    linears: tuple[str, ...]
    layers: tuple[PermutedLayer, ...] = ()
    moved: bool = False
    tied: Mapping[str, str] = field(default_factory=dict)


def permutation_tables(permutations: Sequence[Permutation]) -> str:
    """What was won in each role, as the mean over its layers, and what was tied, with the reasons."""
    by_role: dict[tuple[str, str], list[tuple[Permutation, PermutedLayer]]] = {}
    for each in permutations:
        for layer in each.layers:
            by_role.setdefault((each.what, layer.role), []).append((each, layer))
    moved = []
    for (what, role), found in by_role.items():
        before, after = (sum(getattr(layer, name) for _, layer in found) / len(found) for name in ("before", "after"))
        count = sum(each.moved for each, _ in found)
        moved.append((what, role, f"{count} of {len(found)}", f"{before:.4f}", f"{after:.4f}"))
    tied = [(each.linears[0], what, why) for each in permutations for what, why in each.tied.items()]
    stayed = [
        (name, str(len(members)), members[0][1], members[0][2])
        for name, members in grouped(tied, lambda each: each[0], lambda each: each[1:])
    ]
    tables = [text_table(MOVED, moved, right=MOVED[2:])] if moved else []
    return "\n\n".join([*tables, *([text_table(STAYED, stayed, right=("n",))] if stayed else [])])
