"""What the training brings down beside the blocks' errors: the classes' loss, and the distance to a teacher's scores or features."""

from __future__ import annotations

from dataclasses import dataclass

from timm.loss.cross_entropy import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn
from torch.nn import functional

from flysurgery.fidelity import relative_error
from flysurgery.finetune.settings import Settings


@dataclass(frozen=True)
class Losses:
    """One batch's losses, each a mean over its images; ``total`` is what the gradient is taken of, with none of the blocks' in it."""

    total: Tensor
    classes: Tensor
    output: Tensor


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


def features_loss(
    features: Tensor,  # shape: (batch, ...)
    wanted: Tensor,  # shape: (batch, ...)
) -> Tensor:
    """Squared distance of the features from the teacher's, relative to how the teacher's differ from each other."""
    return relative_error(features.flatten(1), wanted.flatten(1))[0]
