"""A fidelity as the goal of an allocation: the cheapest plan tried that reaches it, and what is refused."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import Tensor, nn

from flysurgery.errors import DataError, OptionError
from flysurgery.surgery import FidelityGoal, Plan, allocate, apply, convert


@pytest.mark.parametrize("goal", [FidelityGoal(0.9), FidelityGoal(0.9, sequential=True, permute=True)])
def test_the_cheapest_plan_tried_that_reaches_the_fidelity_is_taken(
    vit: nn.Module, vit_plan: Plan, many: Tensor, goal: FidelityGoal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flysurgery.surgery.allocation.STEPS", 3)
    vit.eval()
    before = copy.deepcopy(vit.state_dict())
    made, tradeoff = allocate(vit_plan, vit, fidelity=goal, calibrate=many)
    assert all(torch.equal(value, before[name]) for name, value in vit.state_dict().items())
    assert tradeoff.search is not None and tradeoff.unit == "weights"
    trials = dict(tradeoff.search.trials)
    assert 2 <= len(trials) <= 4
    reached = [share for share, cosine in trials.items() if cosine >= goal.target]
    assert tradeoff.chosen.share == min(reached) > min(trials)
    report = apply(made, copy.deepcopy(vit), calibrate=many, sequential=goal.sequential, permute=goal.permute)
    assert report.fidelity is not None
    assert report.fidelity.lowest_cosine == pytest.approx(trials[tradeoff.chosen.share], abs=1e-9)
    assert f"the fewest weights at which output and token cosine reach {goal.target}: " in tradeoff.sentence


def test_a_fidelity_that_the_cheapest_choices_reach_takes_one_trial(vit: nn.Module, vit_plan: Plan, many: Tensor) -> None:
    _, tradeoff = allocate(vit_plan, vit, fidelity=FidelityGoal(0.01), calibrate=many)
    assert tradeoff.search is not None and len(tradeoff.search.trials) == 1
    assert tradeoff.chosen.share == tradeoff.curve[0].share


def test_a_fidelity_out_of_reach_names_the_closest(vit: nn.Module, vit_plan: Plan, many: Tensor) -> None:
    with pytest.raises(
        OptionError, match=r"reaches a fidelity of 0\.9999999999: the closest, at a share of 0\.9\d+ of .* weights"
    ) as caught:
        allocate(vit_plan, vit, fidelity=FidelityGoal(0.9999999999), calibrate=many)
    found = re.search(r"has (0\.\d+); ask for at most that", str(caught.value))
    assert found is not None
    _, tradeoff = allocate(vit_plan, vit, fidelity=FidelityGoal(float(found[1])), calibrate=many)
    assert tradeoff.search is not None
    assert 0 <= max(value for _, value in tradeoff.search.trials) - float(found[1]) < 1e-3


def test_convert_reaches_a_fidelity_and_reports_it(vit: nn.Module, many: Tensor) -> None:
    batches = iter(many.split(16))  # which can be read once
    report = convert(vit, fidelity=0.8, calibrate=batches)
    assert report.fidelity is not None and report.fidelity.lowest_cosine >= 0.8
    document = report.to_json()
    assert document["tradeoff"]["search"]["target"] == 0.8
    families = {row["family"] for row in document["rows"] if row["status"] == "replace"}
    assert families == {name for name, _ in document["tradeoff"]["families"]} - {"dense"}
    with pytest.raises(OptionError, match="fidelity choose the architectures, so arch cannot"):
        convert(vit, "gonon", fidelity=0.8, calibrate=many)


def test_a_fidelity_needs_data_a_cosine_and_no_other_goal(vit: nn.Module, vit_plan: Plan, many: Tensor) -> None:
    with pytest.raises(OptionError, match="a fidelity is measured on samples; give data"):
        allocate(vit_plan, vit, fidelity=FidelityGoal(0.9))
    for target in (0.0, 1.0, -0.5, float("nan")):
        with pytest.raises(OptionError, match="fidelity is the cosine to reach, above 0 and below 1"):
            FidelityGoal(target)
    with pytest.raises(OptionError, match=r"budget and fidelity are different goals, .* give one of them"):
        allocate(vit_plan, vit, budget=0.5, fidelity=FidelityGoal(0.9), calibrate=many)


def test_a_fidelity_that_is_no_number_ends_the_search(vit: nn.Module, vit_plan: Plan, many: Tensor) -> None:
    class Overflowing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if self.training else x + float("inf")

    vit.head_drop = Overflowing()
    with pytest.raises(DataError, match="the fidelity is no number: one of the two models gives outputs that are not finite"):
        allocate(vit_plan, vit, fidelity=FidelityGoal(0.5), calibrate=many)
