"""Budgets for a whole model: what they keep to, what they are measured by, and what is refused."""

import copy
from collections.abc import Sequence
from itertools import pairwise, product
from math import sqrt
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flysurgery.errors import DataError, OptionError, PlanError
from flysurgery.factors import factors_to_dense
from flysurgery.patterns import low_rank, monarch
from flysurgery.projection import project
from flysurgery.surgery import Plan, allocate, apply, convert
from flysurgery.surgery.allocation import cost_of, least_error
from flysurgery.surgery.option_errors import Option
from tests.support.models import unchanged
from tests.surgery.conftest import Planned


@pytest.fixture
@torch.no_grad()
def uneven(vit: nn.Module) -> nn.Module:
    """The ViT with larger weights in the first block, so that layers differ in what their errors cost."""
    for name, parameter in vit.named_parameters():
        if "blocks.0." in name:
            parameter.mul_(3)
    return vit


@pytest.mark.parametrize("budget", [0.12, 0.4, 0.75])
def test_the_weights_keep_to_the_budget_and_the_prediction_is_what_apply_measures(uneven: nn.Module, vit_plan: Plan, budget: float) -> None:
    with unchanged(uneven):
        made, tradeoff = allocate(vit_plan, uneven, budget=budget)
    planned = {layer.fqn: layer for layer in vit_plan.replaced}
    after = sum(layer.weights_after for layer in made.layers if layer.fqn in planned)
    share = after / sum(layer.weights_before for layer in planned.values())
    assert 0.8 * budget < share <= budget
    assert tradeoff.chosen.cost == after and tradeoff.chosen.share == pytest.approx(share)
    norms = {fqn: float(uneven.get_parameter(f"{fqn}.weight").detach().double().norm()) for fqn in planned}
    lost = sum((row.relative_error or 0.0) ** 2 * norms[row.fqn] ** 2 for row in apply(made, copy.deepcopy(uneven)).replaced)
    assert tradeoff.chosen.error == pytest.approx(sqrt(lost / sum(norm**2 for norm in norms.values())), rel=1e-4)
    assert 8 <= len(tradeoff.curve) <= 12
    assert all(a.share < b.share and a.error > b.error for a, b in pairwise(tradeoff.curve))
    assert (tradeoff.curve[-1].share, tradeoff.curve[-1].error) == (1, 0)
    kept = [layer for layer in made.layers if layer.reason and layer.reason.code == "budget"]
    assert (kept or budget < 0.75) and all(layer.weights_after == layer.weights_before for layer in kept)
    if budget == 0.4:
        first, second = (sum(each.weights_after for each in made.layers if f"blocks.{i}.m" in each.fqn) for i in (0, 1))
        assert first > 1.5 * second


@torch.no_grad()
def test_each_family_wins_where_the_weights_are_of_it(vit: nn.Module, planned: Planned) -> None:
    only = planned("lowrank", include="mlp")
    for layer in only.replaced:
        made = low_rank(256, 64, 16) if layer.role == "ffn_in" else monarch(64, 256, 4)
        weight = vit.get_parameter(f"{layer.fqn}.weight")
        weight.copy_(factors_to_dense(project(weight.double(), made).factors))
    made, tradeoff = allocate(only, vit, budget=0.3125)
    assert {(layer.role, layer.family) for layer in made.replaced} == {("ffn_in", "low rank"), ("ffn_out", "monarch")}
    assert dict(tradeoff.families) == {"low rank": 2, "monarch": 2}
    assert tradeoff.chosen.error < 1e-6
    assert "least predicted error within 0.3125 of the dense weights" in tradeoff.sentence and str(tradeoff).endswith(tradeoff.sentence)


def test_what_apply_holds_out_has_no_part_in_the_choice(vit: nn.Module, planned: Planned, many: Tensor) -> None:
    many, only = many[:50], planned(include=r"blocks.1.mlp")
    made, tradeoff = allocate(only, vit, budget=0.3, calibrate=many)
    assert tradeoff.judged_on == 8
    others = many.clone()
    others[4::5] = others[4::5].flip(0) * 2 + 1
    assert allocate(only, vit, budget=0.3, calibrate=others) == (made, tradeoff)
    report = convert(copy.deepcopy(vit), include=r"blocks.1.mlp", budget=0.3, calibrate=iter(many.split(16)))  # which can be read once
    assert report.tradeoff == tradeoff and report.to_json()["tradeoff"]["judged_on"] == 8


@pytest.mark.gpu
def test_a_gpu_finds_the_trade_off_of_the_cpu(vit: nn.Module, vit_plan: Plan, many: Tensor) -> None:
    _, expected = allocate(vit_plan, vit, budget=0.4, calibrate=many)
    _, found = allocate(vit_plan, copy.deepcopy(vit).cuda(), budget=0.4, calibrate=many.cuda())
    assert found.chosen.error == pytest.approx(expected.chosen.error, rel=1e-2)
    assert [point.error for point in found.curve] == pytest.approx([point.error for point in expected.curve], rel=1e-2, abs=1e-6)


REST = st.lists(st.tuples(st.integers(1, 10), st.floats(0, 1)), min_size=2, max_size=3)
"""The costs and errors of a unit's options beside the dense one, which has no error; not every unit has the third."""


def cost_and_error(picks: Sequence[Option]) -> tuple[float, float]:
    return cost_of(picks), sum(pick.error for pick in picks)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from([4, 8, 16]), REST), min_size=3, max_size=3), st.floats(0.1, 1))
def test_options_keep_to_their_bound_and_are_near_the_best_of_all_and_no_worse_than_one_for_all(drawn: Any, share: float) -> None:
    units = []
    for size, rest in drawn:
        others = [Option(str(number), cost * size, (), error * size) for number, (cost, error) in enumerate(rest)]
        units.append([Option("dense", 10.0 * size, ()), *others])
    possible, uniform = ([*map(cost_and_error, each)] for each in (product(*units), zip(*units, strict=False)))
    for limit in (share * uniform[0][0], *(cost for cost, _ in uniform)):
        picks = least_error(units, limit)
        within, rivals = ([error for cost, error in each if cost <= limit] for each in (possible, uniform))
        assert (picks is None) == (not within)
        if picks is not None:
            cost, error = cost_and_error(picks)
            assert cost <= limit and min(within) - 1e-12 <= error <= min(rivals, default=max(within)) + 1e-12


NEEDED: list[tuple[list[list[tuple[str, int, int]]], int, str]] = [
    ([[("a", 5, 6), ("b", 5, 8), ("c", 7, 4)], [("a", 8, 4), ("b", 4, 7), ("c", 5, 8)]], 14, "aa"),  # one name for all
    ([[("a", 3, 9), ("b", 1, 9), ("c", 9, 3)], [("a", 8, 2), ("b", 8, 5), ("c", 4, 5)]], 9, "ba"),  # single changes
    ([[("a", 8, 3), ("b", 4, 8)], [("a", 9, 1), ("b", 1, 8), ("c", 5, 3)], [("a", 8, 5), ("b", 3, 5)]], 19, "acb"),  # the dearest start
]
"""Units with the names, costs and errors of their options, limits, and choices that are not found without one part of the search."""


@pytest.mark.parametrize(("units", "limit", "best"), NEEDED)
def test_each_part_of_the_search_is_needed(units: list[list[tuple[str, int, int]]], limit: int, best: str) -> None:
    picks = least_error([[Option(name, cost, (), error) for name, cost, error in unit] for unit in units], limit)
    assert picks is not None and "".join(pick.name for pick in picks) == best


def test_a_fidelity_gets_as_few_weights_as_reach_it(vit: nn.Module, many: Tensor) -> None:
    sizes = []
    for goal in (0.9, 0.97):
        report = convert(copy.deepcopy(vit), fidelity=goal, calibrate=many[:20], sequential=True, include="mlp")
        assert report.fidelity.lowest_cosine >= goal
        sizes.append(report.tradeoff.chosen.share)
    assert sizes[0] < sizes[1] < 0.95


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"budget": 0.01}, OptionError, r"smallest reachable share of the dense layers' weights is 0\.\d+"),
        ({"budget": 1.0}, PlanError, "every layer does best dense"),
        ({"budget": float("nan")}, OptionError, "budget is the share"),
        ({"budget": 0.4, "calibrate": 2}, DataError, "at least 3 samples, to fit to, to choose by and to report on; there are 2"),
        ({"budget": 0.5, "arch": "gonon", "nblocks": 8}, OptionError, "choose the architectures, so nblocks and arch cannot"),
        ({"fidelity": 1.5, "calibrate": 4}, OptionError, "above 0 and below 1; got 1.5"),
        ({"fidelity": 0.9, "budget": 0.5, "calibrate": 4}, OptionError, "leave budget and measure out"),
        ({"fidelity": 0.9, "per_layer": {"mlp": "dense"}, "calibrate": 4}, OptionError, "so per_layer cannot be given"),
        ({"fidelity": 0.9}, OptionError, "fidelity needs data to calibrate with"),
        ({"fidelity": 1 - 1e-9, "calibrate": 10, "include": "mlp"}, PlanError, r"the closest has 0\.\d{4}; give --reconstruct"),
    ],
)
def test_what_cannot_be_reached_or_looked_for_is_one_sentence(
    vit: nn.Module, many: Tensor, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    given = options | {"calibrate": many[: options["calibrate"]] if "calibrate" in options else None}
    with unchanged(vit), pytest.raises(kind, match=message):
        convert(vit, **given)
