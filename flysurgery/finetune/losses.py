"""What the training brings down: the classes' loss, and the distances to a teacher's scores and blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from timm.loss.cross_entropy import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn
from torch.nn import functional

from flysurgery.errors import TrainingError
from flysurgery.finetune.settings import Settings


@dataclass(frozen=True)
class Losses:
    """One batch's losses, each a mean over its images; ``total`` is what the gradient is taken of."""

    total: Tensor
    classes: Tensor
    logits: Tensor
    blocks: Tensor


def class_loss(settings: Settings) -> nn.Module:
    """timm's cross-entropy for mixed classes or smoothed ones, PyTorch's for plain ones."""
    if settings.mixes:
        return SoftTargetCrossEntropy()
    return LabelSmoothingCrossEntropy(settings.smoothing) if settings.smoothing else nn.CrossEntropyLoss()


def logits_loss(
    scores: Tensor,  # shape: (batch, classes)
    wanted: Tensor,  # shape: (batch, classes)
    temperature: float,
) -> Tensor:
    """Kullback-Leibler divergence of the softened scores from the teacher's, times the squared temperature.

    Source: G. Hinton, O. Vinyals, J. Dean, Distilling the Knowledge in a Neural Network, arXiv:1503.02531.
    """
    mine, theirs = (functional.log_softmax(each.float() / temperature, dim=-1) for each in (scores, wanted))
    return functional.kl_div(mine, theirs, reduction="batchmean", log_target=True) * temperature**2


def blocks_loss(outputs: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Tensor:
    """Squared distance of each block's output from the teacher's, relative to the teacher's; the mean over the blocks.

    Zero is perfect and 1 what an output of zeros would get, whatever the scale of a block.

    Raises:
        TrainingError: the teacher's blocks are of another width.
    """
    errors, sizes = [], []
    for name, theirs in wanted.items():
        if outputs[name].shape != theirs.shape:
            raise TrainingError(
                f"block {name} gives {tuple(outputs[name].shape)} and the teacher's {tuple(theirs.shape)}; "
                "give --blocks-weight 0 to imitate its scores alone"
            )
        theirs = theirs.float()
        errors.append(functional.mse_loss(outputs[name].float(), theirs))
        sizes.append(torch.linalg.vector_norm(theirs) / theirs.numel() ** 0.5)
    return (torch.stack(errors) / torch.stack(sizes).square().clamp_min(1e-12)).mean()
