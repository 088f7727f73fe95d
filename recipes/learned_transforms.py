"""Butterflies and permutations that gradient steps find, as Dao et al. 2019 learn fast transforms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flysurgery.ops import ks_linear
from flysurgery.patterns import square_dyadic

RATE = 0.05
ROUNDED = 0.5
"""The share of the steps after which each choice of the permutations is rounded; the rest fits the factors alone."""


def permute(
    x: Tensor,  # shape: (rows, starts, n)
    choices: Tensor,  # shape: (starts, levels, 3), between 0 and 1
) -> Tensor:  # shape: (rows, starts, n)
    """Apply a relaxed permutation. Level l cuts a row into ``2**l`` blocks and makes three choices, the same for all blocks.

    a: the even entries before the odd ones. b: the first half reversed. c: the second half reversed. A choice between 0 and 1 mixes the
    two outcomes linearly. Where all are 0 or 1, this is a permutation; a = 1 and b = c = 0 on all levels is bit reversal.

    Source: Dao et al. 2019, arXiv:1903.05895.
    """
    for level in range(choices.shape[1]):
        a, b, c = choices[:, level, :, None, None].unbind(1)
        blocks = x.unflatten(-1, (1 << level, -1))
        blocks = a * torch.cat((blocks[..., ::2], blocks[..., 1::2]), -1) + (1 - a) * blocks
        first, second = blocks.chunk(2, -1)
        x = torch.cat((b * first.flip(-1) + (1 - b) * first, c * second.flip(-1) + (1 - c) * second), -1).flatten(-2)
    return x


def learn(
    target: Tensor,  # shape: (n, n)
    products: int,
    *,
    starts: int,
    steps: int,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:  # shapes: (starts,), (starts,), (starts, products, levels, 3)
    """Fit products of a complex butterfly and a permutation to a matrix, by Adam on the mean squared error of its entries.

    A real matrix is compared with the real part. All starts are fitted together, as blocks on the diagonal of one product, and do not
    affect each other. Gives the root mean squared error of each start with the relaxed permutations, that at the end with
    rounded ones, and the rounded choices.
    """
    n, generator = len(target), torch.Generator().manual_seed(seed)
    shapes = [(starts * pattern.a, pattern.b, pattern.c, pattern.d) for pattern in square_dyadic(n)]
    drawn = [[torch.randn(shape, generator=generator, dtype=torch.complex64) / 2**0.5 for shape in shapes] for _ in range(products)]
    butterflies = [[nn.Parameter(factor) for factor in factors] for factors in drawn]
    logits = nn.Parameter(torch.zeros(starts, products, len(shapes) - 1, 3))
    optimizer = torch.optim.Adam([logits, *(factor for factors in butterflies for factor in factors)])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1, cycle_momentum=False)
    identity = torch.eye(n, dtype=torch.complex64)[:, None].expand(n, starts, n)
    wanted = target.mT.to(torch.complex64)[:, None]

    def errors(choices: Tensor) -> Tensor:
        y = identity
        for place in reversed(range(products)):
            y = ks_linear(permute(y, choices[:, place]).flatten(1), butterflies[place]).unflatten(1, (starts, n))
        difference = y - wanted
        return (difference if target.is_complex() else difference.real).abs().square().mean((0, 2))

    relaxed = squared = torch.zeros(starts)
    for step in range(steps):
        rounded = step >= ROUNDED * steps
        squared = errors((logits.detach() > 0).float() if rounded else logits.sigmoid())
        relaxed = relaxed if rounded else squared.detach()
        optimizer.zero_grad()
        squared.sum().backward()
        optimizer.step()
        schedule.step()
    return relaxed.sqrt(), squared.detach().sqrt(), (logits.detach() > 0).int()
