"""A ViT as Gonon et al. 2024 time it: separate q, k and v, attention written out, no class token, patches averaged at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Make = Callable[[int, int, bool], nn.Module]
"""Makes the linear layer of ``(out_features, in_features, bias)``."""


@dataclass(frozen=True)
class VitSizes:
    """The sizes of a ViT. ``tokens`` are those of its patches alone."""

    width: int
    heads: int
    depth: int
    image: int
    patch: int
    classes: int = 1000

    @property
    def tokens(self) -> int:
        """Patches of one image."""
        return (self.image // self.patch) ** 2


def dense_layer(out_features: int, in_features: int, bias: bool) -> nn.Module:
    """What stays dense in the paper's models: the projection after attention, the patch embedding and the head."""
    return nn.Linear(in_features, out_features, bias=bias)


class PaperAttention(nn.Module):
    """Norm, q, k and v by ``make``, softmax of q kᵀ, and a dense projection; no biases. Shapes: (batch, tokens, width), unchanged."""

    def __init__(self, sizes: VitSizes, make: Make) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.scale = (sizes.width // sizes.heads) ** -0.5
        self.norm = nn.LayerNorm(sizes.width)
        self.q, self.k, self.v = (make(sizes.width, sizes.width, False) for _ in range(3))
        self.out = dense_layer(sizes.width, sizes.width, False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.mT * self.scale, dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class PaperFeedForward(nn.Sequential):
    """Norm, linear to four times the width, GELU, linear back. Shapes: (batch, tokens, width), unchanged."""

    def __init__(self, sizes: VitSizes, make: Make) -> None:
        width = sizes.width
        super().__init__(nn.LayerNorm(width), make(4 * width, width, True), nn.GELU(), make(width, 4 * width, True))


class PaperBlock(nn.Module):
    """Attention and feed-forward, each added to its input. Shapes: (batch, tokens, width), unchanged."""

    def __init__(self, sizes: VitSizes, make: Make) -> None:
        super().__init__()
        self.attention, self.feed_forward = PaperAttention(sizes, make), PaperFeedForward(sizes, make)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.feed_forward(x)


class PaperVit(nn.Module):
    """The whole model: (batch, 3, image, image) to (batch, classes)."""

    def __init__(self, sizes: VitSizes, make: Make) -> None:
        super().__init__()
        self.patch = sizes.patch
        inputs = 3 * sizes.patch**2
        self.embed = nn.Sequential(nn.LayerNorm(inputs), dense_layer(sizes.width, inputs, True), nn.LayerNorm(sizes.width))
        self.position = nn.Parameter(torch.randn(sizes.tokens, sizes.width) * 0.02)
        self.blocks = nn.Sequential(*(PaperBlock(sizes, make) for _ in range(sizes.depth)))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = dense_layer(sizes.classes, sizes.width, True)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unfold(2, self.patch, self.patch).unfold(3, self.patch, self.patch)  # shape: (batch, 3, down, across, patch, patch)
        patches = rows.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)
        x = self.embed(patches) + self.position
        return self.head(self.norm(self.blocks(x)).mean(dim=1))
