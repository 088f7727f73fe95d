"""scikit-learn's handwritten digits, a small real data set that needs no download."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset

from flysurgery.errors import DataError

SPLIT_SEED = 0
"""The one order of the images by which they are split, in training and in evaluation."""

WHITE = 16
"""Largest value of a pixel."""


def digits(
    part: Literal["train", "held-out"],
    size: tuple[int, int],
    *,
    mean: Sequence[float],
    std: Sequence[float],
) -> TensorDataset:
    """Two thirds of the 1797 digits for training, or the held-out third, as pairs of an image and its class.

    Images are scaled to [0, 1], resized bilinearly from 8x8 to ``size``, given one equal channel for each ``mean``, and
    normalized. They are float32 of shape (channels, height, width).

    Raises:
        DataError: scikit-learn is not installed.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998.
    """
    pixels, classes = _read()
    order = np.random.RandomState(SPLIT_SEED).permutation(len(pixels))
    third = len(pixels) // 3
    chosen = torch.from_numpy(order[:third] if part == "held-out" else order[third:])
    images = functional.interpolate(pixels[chosen][:, None] / WHITE, size=size, mode="bilinear", align_corners=False, antialias=True)
    return TensorDataset(normalize(images, mean, std), classes[chosen])


def normalize(
    images: Tensor,  # shape: (batch, 1, height, width)
    mean: Sequence[float],
    std: Sequence[float],
) -> Tensor:  # shape: (batch, channels, height, width)
    """Copy the grey channel once for each ``mean``, subtract it, and divide by ``std``."""
    shape = (1, len(mean), 1, 1)
    return (images - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)


def _read() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("the digits come with scikit-learn, which is not installed: pip install 'flysurgery[train]'") from error
    found: Any = load_digits()
    return torch.tensor(found.images, dtype=torch.float32), torch.tensor(found.target, dtype=torch.int64)
