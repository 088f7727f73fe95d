"""How much a converted backbone still sees of what the dense one sees: tokens, saliency maps and neighbours on the same crops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from focus_model import FocusModel, tokens_of
from torch import Tensor, nn
from torch.nn import functional

BATCH = 64
THRESHOLD = 0.5
"""What a pixel of a saliency map needs to count as seen."""


@dataclass(frozen=True)
class Sight:
    """Means over crops, each against the dense model; 1 is the dense model itself, and 0 is for ``relative_error``.

    ``cls`` and ``patch`` are cosines of the last tokens, ``relative_error`` is ``norm(ours - dense) / norm(dense)`` of all of them,
    ``iou`` is that of the saliency maps' pixels above ``THRESHOLD`` over the crops where either has one, None where none has.
    ``correlation`` is that of the maps' values. ``nearest`` is the share of crops whose nearest other crop, by class token, stays the same.
    """

    cls: float | None = None
    patch: float | None = None
    relative_error: float | None = None
    iou: float | None = None
    correlation: float | None = None
    nearest: float | None = None


@torch.no_grad()
def seen(backbone: nn.Module, focus: FocusModel, crops: Tensor) -> tuple[Tensor, Tensor]:
    """The last tokens of a backbone, and the saliency maps that the decoder of ``focus`` makes of them."""
    device = next(focus.parameters()).device
    tokens = torch.cat([tokens_of(backbone, batch.to(device)).float() for batch in crops.split(BATCH)])
    return tokens, torch.cat([focus.saliency(batch) for batch in tokens.split(BATCH)])


def compare(ours: tuple[Tensor, Tensor], dense: tuple[Tensor, Tensor]) -> Sight:
    """Both are what ``seen`` gives for the same crops."""
    (tokens, maps), (wanted, wanted_maps) = ours, dense
    cosine = functional.cosine_similarity(tokens, wanted, dim=-1)
    return Sight(
        cls=float(cosine[:, 0].mean()),
        patch=float(cosine[:, 1:].mean()),
        relative_error=float((tokens - wanted).norm() / wanted.norm()),
        iou=overlap(maps, wanted_maps),
        correlation=correlation(maps, wanted_maps),
        nearest=float((nearest(tokens[:, 0]) == nearest(wanted[:, 0])).float().mean()),
    )


def overlap(maps: Tensor, wanted: Tensor) -> float | None:
    """Intersection over union of what is above ``THRESHOLD``, the mean over maps where there is a union; None where there is none."""
    ours, theirs = (each.flatten(1) > THRESHOLD for each in (maps, wanted))
    union = (ours | theirs).sum(1)
    shares = (ours & theirs).sum(1)[union > 0] / union[union > 0]
    return float(shares.mean()) if len(shares) else None


def correlation(maps: Tensor, wanted: Tensor) -> float:
    """Pearson's, the mean over maps; 0 for one of a single value."""
    ours, theirs = (each.flatten(1) - each.flatten(1).mean(1, keepdim=True) for each in (maps, wanted))
    return float(functional.cosine_similarity(ours, theirs, dim=1).mean())


def nearest(features: Tensor) -> Tensor:
    """For each row the number of the other row with the largest cosine."""
    unit = functional.normalize(features, dim=-1)
    return (unit @ unit.T).fill_diagonal_(-2).argmax(1)
