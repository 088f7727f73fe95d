"""Small modules whose names say nothing, or the wrong thing, about what they do."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from flysurgery.walker import Target
from tests.support.composed import Composed

WIDTH, HEADS, TOKENS, BATCH = 24, 3, 5, 2


def tokens(width: int = WIDTH) -> Tensor:
    """An example: a batch of token sequences."""
    return torch.zeros(BATCH, TOKENS, width)


def heads(x: Tensor, count: int = HEADS) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by the fused operator, with its heads side by side."""
    return merged(nn.functional.scaled_dot_product_attention(q, k, v))


def attend_by_thirds(self: Any, x: Tensor, fused: Tensor) -> Tensor:
    return attend(*(heads(part) for part in fused.chunk(3, -1)))


class FusedAttention(Composed):
    """A fused projection, what ``step`` makes of it (by default the fused operator), an output projection; and ``more`` modules."""

    def __init__(self, step: Callable[[Any, Tensor, Tensor], Tensor] = attend_by_thirds, rows: int = 3 * WIDTH, **more: Any):
        super().__init__(step, apple=nn.Linear(WIDTH, rows), pear=nn.Linear(WIDTH, WIDTH, bias=False), **more)

    def forward(self, x: Tensor) -> Tensor:
        return self.pear(self.step(self, x, self.apple(x)))


def keys_first(self: Any, k: Tensor, q: Tensor, v: Tensor) -> Tensor:
    return ((k @ q.mT) * 0.3).softmax(dim=-2).mT @ v


class WrittenOutAttention(Composed):
    """Three projections, what ``step`` makes of their heads, by default a softmax over the keys, which stand first, and a fourth."""

    def __init__(self, step: Callable[[Any, Tensor, Tensor, Tensor], Tensor] = keys_first):
        super().__init__(step, **{name: nn.Linear(WIDTH, WIDTH) for name in ("one", "two", "three", "four")})

    def forward(self, x: Tensor) -> Tensor:
        return self.four(merged(self.step(self, heads(self.one(x)), heads(self.two(x)), heads(self.three(x)))))


Targets = Iterable[Target]


def named(targets: Targets) -> dict[str, Target]:
    return {target.fqn: target for target in targets}


def roles(targets: Targets) -> dict[str, str]:
    return {target.fqn: target.role for target in targets}


def codes(targets: Targets) -> dict[str, tuple[str, ...]]:
    """The reasons against each target that has some."""
    return {target.fqn: tuple(each.code for each in target.obstacles) for target in targets if target.obstacles}


class MisnamedMlp(nn.Module):
    """A feed-forward block that calls its linears as attention would."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.relu(self.qkv(x)))


def gated() -> nn.Module:
    """A gated feed-forward block with a norm inside; the gate multiplies without an activation."""
    left, right, down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
    step = lambda self, x: self.down(self.norm(self.left(x) * self.right(x)))  # noqa: E731
    return Composed(step, left=left, right=right, norm=nn.LayerNorm(2 * WIDTH), down=down)


class Stack(nn.Module):
    """Blocks with residual connections between an embedding and a mean-pooled classifier."""

    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.first, self.last = nn.Linear(7, WIDTH), nn.Linear(WIDTH, 10)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in blocks)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.last(x.mean(1))
