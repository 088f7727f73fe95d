"""The architectures that are worth timing for a layer: what ``convert --latency`` may then choose from."""

from __future__ import annotations

from collections.abc import Callable

from flysurgery.errors import PatternError
from flysurgery.patterns import Architecture, gonon, low_rank, monarch
from flysurgery.surgery import LayerPlan

NBLOCKS = (2, 4, 8, 16)


def architectures_for(layer: LayerPlan) -> tuple[Architecture, ...]:
    """Monarch with 2, 4, 8 and 16 blocks and gonon where they fit, and low rank with as many weights; fewer weights than dense.

    A layer in parts gets architectures that every part can take; there are none where its parts differ in size.
    """
    sizes = {part.stop - part.start for part in layer.parts if part.architecture is not None}
    if len(sizes) != 1 or any(part.architecture is None for part in layer.parts):
        return ()
    out_features, in_features = sizes.pop(), layer.in_features
    found = [each for nblocks in NBLOCKS if (each := _or_none(monarch, out_features, in_features, nblocks)) is not None]
    found += [each for each in (_or_none(gonon, out_features, in_features),) if each is not None]
    ranks = [each.num_parameters // (out_features + in_features) for each in found]
    found += [low_rank(out_features, in_features, rank) for rank in ranks if 0 < rank <= min(out_features, in_features)]
    return tuple(dict.fromkeys(each for each in found if each.num_parameters < out_features * in_features))


def _or_none(make: Callable[..., Architecture], *arguments: int) -> Architecture | None:
    try:
        return make(*arguments)
    except PatternError:
        return None
