"""Small modules whose names say nothing, or the wrong thing, about what they do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, HEADS, TOKENS, BATCH = 24, 3, 5, 2


def tokens(width: int = WIDTH) -> Tensor:
    """An example: a batch of token sequences."""
    return torch.zeros(BATCH, TOKENS, width)


def heads(x: Tensor, count: int = HEADS) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


class FusedAttention(nn.Module):
    """A fused projection, the fused operator, an output projection."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.apple = nn.Linear(width, 3 * width)
        self.pear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part) for part in self.apple(x).chunk(3, -1))
        return self.pear(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class WrittenOutAttention(nn.Module):
    """Three projections, two products and a softmax over the keys, which stand first: scores are k qᵀ."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.one = nn.Linear(width, width)
        self.two = nn.Linear(width, width)
        self.three = nn.Linear(width, width)
        self.four = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        k, q, v = heads(self.one(x)), heads(self.two(x)), heads(self.three(x))
        weights = ((k @ q.mT) * 0.3).softmax(dim=-2)
        return self.four((weights.mT @ v).transpose(1, 2).flatten(2))


class MisnamedMlp(nn.Module):
    """A feed-forward block that calls its linears as attention would."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.relu(self.qkv(x)))


class Gated(nn.Module):
    """A gated feed-forward block with a norm inside; the gate multiplies without an activation."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.left = nn.Linear(width, 2 * width)
        self.right = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.left(x) * self.right(x)))


class Stack(nn.Module):
    """Blocks with residual connections between an embedding and a mean-pooled classifier."""

    def __init__(self, *blocks: nn.Module, width: int = WIDTH):
        super().__init__()
        self.first = nn.Linear(7, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in blocks)
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.last(x.mean(1))
