"""Leaves out a random part of an image's tokens."""

from __future__ import annotations

import torch
from torch import Tensor


class PatchDropout:
    """Keeps the tokens ``fixed``, and ``kept`` of ``others``; until the next ``draw`` the same in every stream that it gets.

    Source: Y. Liu et al., PatchDropout: Economizing Vision Transformers Using Patch Dropout, arXiv:2208.07220.
    """

    def __init__(self, fixed: Tensor, others: Tensor, kept: int) -> None:
        self._fixed, self._others, self._kept = fixed, others, kept
        self.tokens = len(fixed) + kept
        self._chosen = fixed

    def draw(self, samples: int) -> None:
        """Choose anew which tokens each sample keeps, by the device's generator."""
        order = torch.rand(samples, len(self._others), device=self._others.device).argsort(1)[:, : self._kept]
        self._chosen = torch.cat([self._fixed.expand(samples, -1), self._others[order]], 1)

    def __call__(
        self,
        stream: Tensor,  # shape: (samples, all tokens, features)
    ) -> Tensor:  # shape: (samples, tokens, features)
        return stream.gather(1, self._chosen[..., None].expand(-1, -1, stream.shape[-1]))
