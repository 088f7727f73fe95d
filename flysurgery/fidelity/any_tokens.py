"""Finds out whether the blocks of a model work on any set of tokens, by running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from flysurgery.errors import SurgeryError
from flysurgery.fidelity.patch_dropout import PatchDropout
from flysurgery.fidelity.stream import Stream
from flysurgery.walker import Cut

KEPT = 0.5
"""The share of an image's tokens that is kept. No other was tried."""

LEAST_TOKENS = 32
"""Fewer tokens than these all stay."""

EXACT = 1e-2
"""The relative error up to which two streams are the same, with products in TF32."""


@torch.no_grad()
def find_patch_dropout(
    model: nn.Module,
    x: Tensor,  # shape: (samples, channels, height, width)
    cuts: Sequence[Cut],
) -> PatchDropout | None:
    """Find out by three forwards whether ``model`` may leave out tokens behind its cut of kind "start"; None where it needs all.

    Tokens that are equal in all samples do not depend on the image, such as a class token; they stay. The others are put into another
    order. Every later stream must then be the same in that order, which fails where blocks have windows, convolutions or relative
    positions. The model must also run with fewer tokens.
    """
    start = next((number for number, cut in enumerate(cuts) if cut.kind == "start" and cut.side == "output"), None)
    if start is None or len(cuts[start].shape) != 3:
        return None

    def streams(change: Callable[[Tensor], Tensor | None]) -> dict[int, Tensor]:
        with Stream(model, cuts, lambda number, tensor: change(tensor) if number == start else None) as stream:
            model(x)
            return dict(stream.values)

    plain = streams(lambda _: None)
    first = plain[start]
    is_fixed = (first == first[:1]).all(2).all(0)
    fixed, others = is_fixed.nonzero()[:, 0], (~is_fixed).nonzero()[:, 0]
    if len(others) < LEAST_TOKENS:
        return None
    order = torch.arange(len(is_fixed), device=first.device)
    order[others] = others[torch.randperm(len(others), device=first.device)]
    found = PatchDropout(fixed, others, round(KEPT * len(others)))
    found.draw(len(x))
    try:
        moved = streams(lambda stream: stream[:, order])
        with Stream(model, cuts) as stream:
            stream.dropout = found
            model(x)
    except (RuntimeError, ValueError, IndexError, AssertionError, SurgeryError):  # the model's own, of sizes that do not fit
        return None
    later = [number for number, cut in enumerate(cuts) if cut.kind in ("block", "tokens")]
    same = all(plain[number].shape == first.shape and _same(moved[number], plain[number][:, order]) for number in later)
    return found if same else None


def _same(given: Tensor, wanted: Tensor) -> bool:
    return bool((given - wanted).norm() <= EXACT * wanted.norm())
