"""Orders of shared features: found where one is hidden, never worse than the features' own, within what groups allow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flysurgery.patterns import Architecture, Pattern, gonon, low_rank, monarch
from flysurgery.projection import Features, Orders, Sharing, Side, choose_orders
from flysurgery.projection.block_cycling import cycle_together
from tests.projection.oracle import random_gram, random_matrix, random_product

WIDTH, HIDDEN, GROUPS = 12, 48, 4


def total(errors: tuple[tuple[float, ...], ...]) -> float:
    return sum(map(sum, errors))


def chosen(*features: Features, groups: int = 1, swap_groups: bool = False) -> Orders:
    """The orders that are found, whose stated errors are checked."""
    (found,) = choose_orders([Sharing(features, groups, swap_groups)])

    def squared_error(side: Side) -> float:
        return cycle_together([side.matrix], side.architecture, [side.gram])[0].errors[-1] ** 2

    for each, order, before, after in zip(features, found.orders, found.before, found.after, strict=True):
        assert torch.equal(order.sort().values, torch.arange(each.count))
        assert before == pytest.approx([squared_error(side) for side in each.sides], rel=1e-6, abs=1e-12)
        assert after == pytest.approx([squared_error(side.reordered(order)) for side in each.sides], rel=1e-6, abs=1e-12)
    assert total(found.after) <= total(found.before)
    return found


def hidden_units(up: Architecture, down: Architecture) -> Features:
    first = Side(random_matrix(up), up, random_gram(WIDTH))
    return Features(HIDDEN, (first, Side(random_matrix(down, 1), down, random_gram(HIDDEN), columns=True)))


def attention(out: Architecture) -> tuple[Features, Features]:
    """Query and key; value and what reads it."""
    square, gram = monarch(HIDDEN, HIDDEN, 4), random_gram(HIDDEN)
    rows = [Side(random_matrix(square, seed), square, gram) for seed in range(3)]
    last = Side(random_matrix(out, 4), out, random_gram(HIDDEN), columns=True)
    return Features(HIDDEN, (rows[0], rows[1])), Features(HIDDEN, (rows[2], last))


def test_an_order_that_was_lost_is_made_up_for() -> None:
    up, down = monarch(HIDDEN, WIDTH, 2), monarch(WIDTH, HIDDEN, 2)
    first = Side(random_product(up), up, torch.eye(WIDTH).double())
    second = Side(random_product(down), down, torch.eye(HIDDEN).double(), columns=True)
    lost = torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(3))
    found = chosen(Features(HIDDEN, (first.reordered(lost), second.reordered(lost))))
    assert total(found.before) > 0.1 and total(found.after) < 0.5 * total(found.before)


def test_an_order_of_heads_that_was_lost_is_found_again() -> None:
    """Row classes of two heads each: with their neighbours, heads are products, and with others not."""
    pairs = Architecture((Pattern(2, 24, 3, 1), Pattern(1, 6, 48, 1)))
    side = Side(random_product(pairs), pairs, torch.eye(HIDDEN).double())
    lost = torch.tensor([2, 0, 3, 1])[:, None].mul(12).add(torch.arange(12)).flatten()
    found = chosen(Features(HIDDEN, (side.reordered(lost),), free=False), groups=GROUPS, swap_groups=True)
    assert total(found.before) > 0.05 and total(found.after) < 1e-9


@pytest.mark.parametrize("build", [lambda m, n: monarch(m, n, 4), gonon])
def test_hidden_units_are_put_in_a_better_order(build: type) -> None:
    assert chosen(hidden_units(build(HIDDEN, WIDTH), build(WIDTH, HIDDEN))).lowers


def test_features_stay_where_their_order_does_not_matter() -> None:
    features = hidden_units(low_rank(HIDDEN, WIDTH, 3), low_rank(WIDTH, HIDDEN, 3))
    assert all(side.is_indifferent for side in features.sides) and not chosen(features).lowers


@pytest.mark.parametrize("swap", [False, True])
def test_heads_keep_together_and_move_alike(swap: bool) -> None:
    features = attention(monarch(HIDDEN, HIDDEN, 4))
    found = chosen(*features, groups=GROUPS, swap_groups=swap)
    assert found.lowers
    first, second = (order.reshape(GROUPS, -1) // (HIDDEN // GROUPS) for order in found.orders)
    assert torch.equal(first, first[:, :1].expand_as(first)) and torch.equal(first, second)
    assert torch.equal(first[:, 0].sort().values if swap else first[:, 0], torch.arange(GROUPS))
    tied = chosen(replace(features[0], free=False), features[1], groups=GROUPS, swap_groups=swap)
    entries = tied.orders[0].reshape(GROUPS, -1) % (HIDDEN // GROUPS)
    assert torch.equal(entries, torch.arange(HIDDEN // GROUPS).expand_as(entries)), "entries that are not free move with their head"


def test_blocks_that_are_searched_together_get_the_orders_that_they_get_alone() -> None:
    sharings = [
        Sharing((hidden_units(monarch(HIDDEN, WIDTH, 4), monarch(WIDTH, HIDDEN, 4)),)),
        Sharing(attention(gonon(HIDDEN, HIDDEN)), GROUPS, swap_groups=True),
        Sharing((hidden_units(low_rank(HIDDEN, WIDTH, 3), low_rank(WIDTH, HIDDEN, 3)),)),
    ]
    for one, other in zip(choose_orders(sharings), (choose_orders([each])[0] for each in sharings), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.orders, other.orders, strict=True))
        assert [*one.before, *one.after] == [pytest.approx(errors, rel=1e-9) for errors in (*other.before, *other.after)]
    assert choose_orders([]) == []
