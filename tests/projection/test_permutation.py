"""Orders of hidden units: found where one is hidden, never worse than the units' own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flysurgery.patterns import Architecture, gonon, low_rank, monarch
from flysurgery.projection import Side, choose_hidden_order
from flysurgery.projection.block_cycling import block_cycling
from tests.projection.oracle import random_matrix, random_product
from tests.projection.test_block_cycling import random_gram

WIDTH, HIDDEN = 12, 48


def squared_error(side: Side) -> float:
    return block_cycling(side.matrix, side.architecture, side.gram)[1][-1] ** 2


def shuffled(first: Side, second: Side, order: Tensor) -> tuple[Side, Side]:
    return (
        Side(first.matrix[order], first.architecture, first.gram),
        Side(second.matrix[:, order], second.architecture, second.gram[order][:, order]),
    )


def test_an_order_that_was_lost_is_made_up_for() -> None:
    up, down = monarch(HIDDEN, WIDTH, 2), monarch(WIDTH, HIDDEN, 2)
    exact = Side(random_product(up), up, torch.eye(WIDTH).double()), Side(random_product(down), down, torch.eye(HIDDEN).double())
    lost = torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(3))
    found = choose_hidden_order(*shuffled(*exact, lost))
    assert found.error_before > 0.1 and found.error_after < 0.5 * found.error_before
    assert torch.equal(found.order.sort().values, torch.arange(HIDDEN))


@pytest.mark.parametrize(
    ("up", "down"), [(monarch(HIDDEN, WIDTH, 4), monarch(WIDTH, HIDDEN, 4)), (gonon(HIDDEN, WIDTH), gonon(WIDTH, HIDDEN))]
)
def test_stated_errors_are_those_of_the_orders_and_never_rise(up: Architecture, down: Architecture) -> None:
    first, second = Side(random_matrix(up), up, random_gram(WIDTH)), Side(random_matrix(down, 1), down, random_gram(HIDDEN))
    found = choose_hidden_order(first, second)
    after = sum(squared_error(side) for side in shuffled(first, second, found.order))
    assert found.error_before == pytest.approx(squared_error(first) + squared_error(second), rel=1e-6)
    assert found.error_after == pytest.approx(after, rel=1e-6)
    assert found.error_after < found.error_before


def test_units_stay_where_their_order_does_not_matter() -> None:
    up, down = low_rank(HIDDEN, WIDTH, 3), low_rank(WIDTH, HIDDEN, 3)
    found = choose_hidden_order(Side(random_matrix(up), up, random_gram(WIDTH)), Side(random_matrix(down, 1), down, random_gram(HIDDEN)))
    assert found.error_after <= found.error_before
    assert found.error_after == pytest.approx(found.error_before, rel=1e-6)
