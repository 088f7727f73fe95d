"""Packed weights that graphs take as they are: when they are right no more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flysurgery.gpu.taken import present_taken, taking
from flysurgery.gpu.weight_cache import forget_derived


def move(weight: Tensor) -> None:
    weight.data = weight.data.clone()


CHANGES = {"written": lambda weight: weight.mul_(2), "moved": move, "forgotten": lambda weight: forget_derived()}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_source_are_told(change: str) -> None:
    sources = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    with taking() as taken:
        assert present_taken() is taken
        for source in sources:
            taken.add([source * 2], [source])
            taken.add([source * 3], [*sources])
    assert present_taken() is None
    assert taken.right()
    with torch.no_grad():
        CHANGES[change](sources[1])
    assert not taken.right()


def test_fused_optimizers_are_told() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    with taking() as taken:
        taken.add([weight * 2], [weight])
    torch.optim.SGD([weight], 0.5, fused=True).step()
    assert not taken.right()


def test_frozen_ones_outlast_the_steps_of_others() -> None:
    frozen, weight = nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    with taking() as taken:
        taken.add([frozen * 2], [frozen])
    torch.optim.SGD([weight], 0.5, fused=True).step()
    assert taken.right()
