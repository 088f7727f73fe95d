"""Budgets for a whole model: what they keep to, what they are measured by, and what is refused."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise, product
from math import sqrt
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flysurgery.errors import DataError, OptionError, PlanError
from flysurgery.factors import factors_to_dense
from flysurgery.inference import convert
from flysurgery.patterns import Architecture, low_rank, monarch
from flysurgery.projection import project
from flysurgery.surgery import FidelityGoal, Plan, Split, allocate, apply, plan
from flysurgery.surgery.lagrangian import cost_of, hull_points, least_cost, least_error
from tests.surgery.conftest import unchanged


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
    assert Plan.from_json(made.to_json()) == made
    kept = [layer for layer in made.layers if layer.reason is not None and layer.reason.code == "budget"]
    assert (kept or budget < 0.75) and all(layer.weights_after == layer.weights_before for layer in kept)
    if budget == 0.4:
        first, second = (sum(each.weights_after for each in made.layers if f"blocks.{i}.m" in each.fqn) for i in (0, 1))
        assert first > 1.5 * second


def test_max_error_is_kept_and_the_curve_falls(vit: nn.Module, vit_plan: Plan) -> None:
    _, tradeoff = allocate(vit_plan, vit, max_error=0.5)
    assert tradeoff.chosen.error <= 0.5
    cheaper = [point for point in tradeoff.curve if point.share < tradeoff.chosen.share - 0.05]
    assert cheaper and all(point.error > 0.5 for point in cheaper)
    assert 8 <= len(tradeoff.curve) <= 12
    assert all(a.share < b.share and a.error > b.error for a, b in zip(tradeoff.curve, tradeoff.curve[1:], strict=False))
    assert (tradeoff.curve[-1].share, tradeoff.curve[-1].error) == (1, 0)
    assert "chosen" in str(tradeoff)


@torch.no_grad()
def test_each_family_wins_where_the_weights_are_of_it_and_one_sentence_says_so(vit: nn.Module) -> None:
    only = plan(vit, "lowrank", include="mlp")
    for layer in only.replaced:
        made = low_rank(256, 64, 16) if layer.role == "ffn_in" else monarch(64, 256, 4)
        weight = vit.get_parameter(f"{layer.fqn}.weight")
        weight.copy_(factors_to_dense(project(weight.double(), made).factors))
    made, tradeoff = allocate(only, vit, budget=0.3125)
    assert {(layer.role, layer.family) for layer in made.replaced} == {("ffn_in", "low rank"), ("ffn_out", "monarch")}
    assert dict(tradeoff.families) == {"low rank": 2, "monarch": 2}
    assert tradeoff.chosen.error < 1e-6
    monarchs, ranks = (dict(tradeoff.alone)[family] for family in ("monarch", "low rank"))
    assert monarchs is not None and ranks is not None
    assert max(monarchs.share, ranks.share) <= 0.3125 and min(monarchs.error, ranks.error) > 0.1
    start, end = (
        "chosen for the least predicted error within 0.3125 of the dense weights: ",
        f"low rank alone has {ranks.error:.4f} at 31.2%",
    )
    assert tradeoff.sentence.startswith(start) and tradeoff.sentence.endswith(end) and str(tradeoff).endswith(tradeoff.sentence)


def table(made: Plan, file: Path, fast: Architecture | None = None) -> Path:
    """Dense takes 2 ms, monarch 4 half as long, monarch 8 a fourth; ``fast`` none to speak of."""
    lines = ["batch,ms,fqn,architecture"]
    for layer in made.replaced:
        size = (layer.parts[0].stop - layer.parts[0].start, layer.in_features)
        lines += [f"1,2.0,{layer.fqn},dense", f'1,1.0,{layer.fqn},"{monarch(*size, 4)}"', f'1,0.5,{layer.fqn}, "{monarch(*size, 8)}"']
        if fast is not None and fast.shape == size:
            lines.append(f'1,0.01,{layer.fqn},"{fast}"')
    file.write_text("\n".join([*lines, "1,bad,another.layer,dense"]) + "\n")
    return file


def test_a_table_bounds_the_milliseconds_and_names_the_candidates(vit: nn.Module, vit_plan: Plan, tmp_path: Path) -> None:
    fast = low_rank(64, 256, 1)
    times = table(vit_plan, tmp_path / "t.csv", fast)
    made, tradeoff = allocate(vit_plan, vit, budget=0.4, latency=times)
    assert tradeoff.unit == "ms" and tradeoff.chosen.cost <= 0.4 * 2 * len(vit_plan.replaced)
    allowed = {monarch(*size, nblocks) for size in ((64, 64), (256, 64), (64, 256)) for nblocks in (4, 8)} | {fast}
    assert {part.architecture for layer in made.replaced for part in layer.parts} <= allowed
    slow, _ = allocate(vit_plan, vit, max_error=0.99, latency=times)
    assert all(layer.parts[0].architecture == fast for layer in slow.replaced if layer.fqn.endswith("fc2"))
    only = plan(vit, "lowrank", include="mlp.fc2")
    _, tradeoff = allocate(only, vit, budget=0.24, latency=times)
    assert dict(tradeoff.alone)["monarch"] is None
    assert "; monarch alone costs more, low rank alone has" in tradeoff.sentence


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("2.0,blocks.1.mlp.fc2,dense", "2.0,other,dense"), "no dense row of layer blocks.1.mlp.fc2"),
        (lambda text: text.replace("blocks.0.mlp.fc1", "other"), "no rows of layer blocks.0.mlp.fc1"),
        (lambda text: text.replace("1,2.0,blocks.0.attn.qkv", "1,-2,blocks.0.attn.qkv"), "line 2: ms must be a positive number"),
        (lambda text: text.replace("ms,fqn", "time,fqn"), "line 2: expected a row with fqn, architecture, ms, and ms is missing"),
        (lambda text: text + "1,3,blocks.0.attn.qkv,dense\n", "line 21: a second row of layer blocks.0.attn.qkv with dense"),
        (lambda text: text + '1,3,blocks.0.mlp.fc1,"(1,8,8,1)"\n', "line 21: .*is 8x8, and layer blocks.0.mlp.fc1 is 256x64"),
        (lambda text: text + "1,3,blocks.0.mlp.fc1,fast\n", "line 21: expected patterns"),
        (lambda _: '{"rows": [{"fqn": "a"}]}', "row 1: expected a row with fqn, architecture, ms, and architecture, ms is missing"),
        (lambda _: '{"rows": [', "no valid JSON, line 1"),
    ],
)
def test_wrong_tables_are_refused(vit: nn.Module, vit_plan: Plan, tmp_path: Path, change: Callable[[str], str], words: str) -> None:
    file = table(vit_plan, tmp_path / "t.csv")
    assert len(file.read_text().splitlines()) == 20
    file.write_text(change(file.read_text()))
    with pytest.raises(DataError, match=words):
        allocate(vit_plan, vit, budget=0.5, latency=file)


def test_bounds_that_cannot_be_kept_or_contradict_each_other(vit: nn.Module, vit_plan: Plan, many: Tensor) -> None:
    for kind, message, options in (
        (OptionError, r"smallest reachable share of the dense layers' weights is 0\.\d+", {"budget": 0.01}),
        (PlanError, "every layer does best dense", {"budget": 1.0}),
        (OptionError, "needs a budget, max-error or fidelity", {}),
        (OptionError, "different goals", {"budget": 0.4, "max_error": 0.1}),
        (OptionError, r"budget and fidelity are different goals, .* give one of them", {"budget": 0.5, "fidelity": FidelityGoal(0.9)}),
        (OptionError, "budget is the share", {"budget": 0.0}),
        (OptionError, "budget is the share", {"budget": float("nan")}),
        (OptionError, "max-error is a relative error", {"max_error": 1.0}),
        (OptionError, "fidelity needs data", {"fidelity": FidelityGoal(0.9)}),
        (DataError, "at least 3 samples, to fit to, to choose by and to report on; there are 2", {"budget": 0.4, "calibrate": many[:2]}),
    ):
        with pytest.raises(kind, match=message):
            allocate(vit_plan, vit, **options)
    for target in (0.0, 1.0, -0.5, float("nan")):
        with pytest.raises(OptionError, match="fidelity is the cosine to reach, above 0 and below 1"):
            FidelityGoal(target)
    assert allocate(vit_plan, vit, budget=0.4, calibrate=many[:3])[1].samples == Split(1, 1, 1)


def test_what_is_reported_is_measured_on_samples_that_were_not_chosen_by(vit: nn.Module, many: Tensor) -> None:
    many, only = many[:50], plan(vit, include=r"blocks.1.mlp")
    made, tradeoff = allocate(only, vit, budget=0.3, calibrate=many)
    assert tradeoff.samples == Split(fitted=32, chosen=8, reported=10)
    assert "chosen by their errors on 8 others" in str(tradeoff) and "on 10 that had no part in it, so few" in str(tradeoff)
    others = many.clone()
    others[4::5] = others[4::5].flip(0) * 2 + 1
    again, other = allocate(only, vit, budget=0.3, calibrate=others)
    assert again.layers == made.layers and other.chosen.error == tradeoff.chosen.error
    assert other.chosen.held_out_error != tradeoff.chosen.held_out_error
    assert all(point.held_out_error is not None for point in tradeoff.curve)
    assert (tradeoff.curve[-1].held_out_error, tradeoff.curve[-1].reported) == (0, 0)
    assert allocate(only, vit, budget=0.3)[1].chosen.held_out_error is None


@pytest.mark.gpu
def test_a_gpu_finds_the_trade_off_of_the_cpu(vit: nn.Module, vit_plan: Plan, many: Tensor) -> None:
    _, expected = allocate(vit_plan, vit, budget=0.4, calibrate=many)
    _, found = allocate(vit_plan, copy.deepcopy(vit).cuda(), budget=0.4, calibrate=many.cuda())
    assert found.chosen.error == pytest.approx(expected.chosen.error, rel=1e-2)
    assert [point.error for point in found.curve] == pytest.approx([point.error for point in expected.curve], rel=1e-2, abs=1e-6)


@pytest.mark.parametrize("goal", [FidelityGoal(0.9), FidelityGoal(0.96, sequential=True, permute=True)])
def test_the_cheapest_plan_tried_that_reaches_the_fidelity_is_taken(
    vit: nn.Module, many: Tensor, goal: FidelityGoal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flysurgery.surgery.allocation.STEPS", 2)
    only = plan(vit, include=r"blocks\.1")
    with unchanged(vit):
        made, tradeoff = allocate(only, vit, fidelity=goal, calibrate=many)
    assert tradeoff.search is not None and tradeoff.unit == "weights"
    trials = dict(tradeoff.search.trials)
    assert 2 <= len(trials) <= 3
    reached = [share for share, cosine in trials.items() if cosine >= goal.target]
    assert tradeoff.chosen.share == min(reached) > min(trials)
    report = apply(made, copy.deepcopy(vit), calibrate=many, sequential=goal.sequential, permute=goal.permute)
    assert report.fidelity is not None
    assert report.fidelity.lowest_cosine == pytest.approx(trials[tradeoff.chosen.share], abs=1e-9)
    assert f"the fewest weights at which output and token cosine reach {goal.target}: " in tradeoff.sentence


def test_a_fidelity_out_of_reach_names_the_closest(vit: nn.Module, many: Tensor) -> None:
    only = plan(vit, include=r"blocks.1.mlp")
    words = r"reaches a fidelity of 0\.9999999999: the closest, at a share of 0\.\d+ of .* weights"
    with pytest.raises(OptionError, match=words) as caught:
        allocate(only, vit, fidelity=FidelityGoal(0.9999999999), calibrate=many)
    found = re.search(r"has (0\.\d+); ask for at most that", str(caught.value))
    assert found is not None
    _, tradeoff = allocate(only, vit, fidelity=FidelityGoal(float(found[1])), calibrate=many)
    assert tradeoff.search is not None
    assert 0 <= max(value for _, value in tradeoff.search.trials) - float(found[1]) < 1e-3


def test_convert_reaches_a_fidelity_and_reports_it(vit: nn.Module, many: Tensor) -> None:
    batches = iter(many.split(16))  # which can be read once
    report = convert(copy.deepcopy(vit), fidelity=0.2, calibrate=batches)
    assert report.fidelity is not None and report.fidelity.lowest_cosine >= 0.2
    assert report.tradeoff is not None and report.tradeoff.search is not None
    assert len(report.tradeoff.search.trials) == 1  # the cheapest choices reach it
    document = report.to_json()
    assert document["tradeoff"]["search"]["target"] == 0.2
    families = {row["family"] for row in document["rows"] if row["status"] == "replace"}
    assert families == {name for name, _ in document["tradeoff"]["families"]} - {"dense"}
    with pytest.raises(OptionError, match="fidelity choose the architectures, so arch cannot"):
        convert(vit, "gonon", fidelity=0.8, calibrate=many)


class Overflowing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x + float("inf")


def test_a_fidelity_that_is_no_number_ends_the_search(vit: nn.Module, vit_plan: Plan, many: Tensor) -> None:
    vit.head_drop = Overflowing()
    with pytest.raises(DataError, match="the fidelity is no number: one of the two models gives outputs that are not finite"):
        allocate(vit_plan, vit, fidelity=FidelityGoal(0.5), calibrate=many)


NAMES = ("dense", "fine", "coarse", "odd")


def error_of(picks: Iterable[Choice]) -> float:
    return sum(choice.error for choice in picks)


@dataclass(frozen=True)
class Choice:
    name: str
    cost: float
    error: float


def units_of(seed: int, count: int = 3) -> list[list[Choice]]:
    """Units of different sizes whose dense choice has no error; "odd" ones may be bad, and not every unit has them."""
    draw = random.Random(seed)
    found: list[list[Choice]] = []
    for _ in range(count):
        size = draw.choice([4, 8, 16])
        rest = [Choice(name, draw.randint(1, 10) * size, size * draw.random()) for name in NAMES[1 : draw.choice([3, 4])]]
        found.append([Choice("dense", 10.0 * size, 0.0), *rest])
    return found


def every(units: list[list[Choice]]) -> list[tuple[float, float]]:
    return [(cost_of(picks), error_of(picks)) for picks in product(*units)]


@pytest.mark.parametrize("seed", range(8))
def test_choices_keep_to_their_bound_and_lie_between_the_hull_and_the_best_of_all(seed: int) -> None:
    units = units_of(seed)
    possible = every(units)
    hull = [(slope, cost_of(picks), error_of(picks)) for slope, picks in hull_points(units)]
    for multiplier, cost, error in hull:
        assert error == pytest.approx(min(e for c, e in possible if c <= cost + 1e-9), abs=1e-12)
        if multiplier < float("inf"):
            assert error + multiplier * cost == pytest.approx(min(e + multiplier * c for c, e in possible))
    assert (hull[0][1], hull[-1][2]) == (min(cost for cost, _ in possible), 0)
    assert all(left[0] >= right[0] for left, right in pairwise(hull))
    for share in (0.2, 0.4, 0.55, 0.8, 1.0):
        limit = share * sum(unit[0].cost for unit in units)
        picks = least_error(units, limit)
        within = [error for cost, error in possible if cost <= limit]
        assert (picks is None) == (not within)
        if picks is not None:
            assert cost_of(picks) <= limit
            assert min(within) - 1e-12 <= error_of(picks) <= min(error for _, cost, error in hull if cost <= limit) + 1e-12
    for name in NAMES:
        alike = [choice for unit in units for choice in unit if choice.name == name]
        if len(alike) == len(units):  # it is never worse than one name for all at equal cost
            picks = least_error(units, sum(choice.cost for choice in alike))
            assert picks is not None and error_of(picks) <= sum(choice.error for choice in alike)
    for limit in (0.0, 1.0, 5.0):
        picks = least_cost(units, limit)
        assert picks is not None and error_of(picks) <= limit
        assert min(c for c, e in possible if e <= limit) <= cost_of(picks) <= min(c for _, c, e in hull if e <= limit)
