"""Choices by measured times: what is timed, what is chosen, and that the whole model is never slower than dense."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flysurgery
from flysurgery.errors import InferenceError, OptionError, PlanError
from flysurgery.gpu.operands import FusedFactors
from flysurgery.inference import clock
from flysurgery.inference.standin import StandIn
from flysurgery.layers import ButterflyLinear
from flysurgery.ops import FeedForward
from flysurgery.patterns import Architecture, monarch
from flysurgery.surgery import Plan, Setting, choose_measured, measure_groups
from tests.inference.models import images, left, small
from tests.support.tolerance import assert_equal

pytestmark = pytest.mark.usefixtures("all_tokens")

MONARCH_2 = {monarch(48, 48, 2), monarch(192, 48, 2), monarch(48, 192, 2)}
MONARCH_4 = {monarch(48, 48, 4), monarch(192, 48, 4), monarch(48, 192, 4)}
Price = Callable[[nn.Module, bool, set[Architecture]], float]


@pytest.fixture
def dense() -> nn.Module:
    return small(convert=False)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return flysurgery.plan(small(convert=False), "lowrank")


class Clock:
    """Times by ``price``, which sees what is timed, whether by a fused kernel, and the architectures in it; keeps what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, price: Price) -> None:
        self.price, self.asked = price, list[tuple[int, list[tuple[int, ...]]]]()
        monkeypatch.setattr(clock, "medians_ms", self.medians)

    def medians(self, ways: list[Any], inputs: list[Tensor], **_: object) -> list[float]:
        self.asked.append((len(ways), [tuple(each.shape) for each in inputs]))
        owners = [getattr(way, "__self__", way) for way in ways]
        found = [{each.architecture for each in owner.modules() if isinstance(each, ButterflyLinear)} for owner in owners]
        fused = [getattr(way, "__name__", "") == "fused" for way in ways]
        return [*map(self.price, owners, fused, found)]


def by_architecture(fast: dict[Architecture, float]) -> Price:
    """Dense takes 1 ms, the architectures what ``fast`` says, all others 2 ms; models as long as dense."""

    def price(owner: nn.Module, fused: bool, found: set[Architecture]) -> float:
        if hasattr(owner, "blocks") or not found:
            return 1.0
        return max(fast.get(each, 2.0) for each in found)

    return price


def test_groups_that_are_fused_are_timed_and_chosen_for_together(
    called: list[str], dense: nn.Module, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def price(owner: nn.Module, fused: bool, found: set[Architecture]) -> float:
        return 1.0 if hasattr(owner, "blocks") or not found else 0.5 if fused and found & MONARCH_4 else 2.0

    timer = Clock(monkeypatch, price)
    groups = measure_groups(plan, dense, images(dense, 3), fused=True)
    names = [f"blocks.{i}.{layer}" for i in (0, 1) for layer in ("attn.qkv", "mlp.fc1", "mlp.fc2")]
    assert [group.fqns for group in groups] == [(names[0],), (names[1], names[2]), (names[3],), (names[4], names[5])]
    assert [shapes for _, shapes in timer.asked] == [[(51, 48)], [(51, 48)]], "equal groups are timed once"
    assert all([choice.name for choice in group.faster] == ["monarch 4"] for group in groups)
    assert groups[1].faster[0].fused and groups[1].faster[0].architectures == (monarch(192, 48, 4), monarch(48, 192, 4))
    made, tradeoff, measurement = choose_measured(plan, dense, Setting(3, optimized=True))
    assert {part.architecture for layer in made.replaced for part in layer.parts} == MONARCH_4 and len(made.replaced) == 6
    assert measurement.chosen == ("monarch 4",) * 4 and measurement.dense_optimized_ms == 1.0 and measurement.batch == 3
    assert tradeoff.unit == "ms" and tradeoff.chosen.cost == pytest.approx(4 * 0.5)


def test_of_what_is_faster_the_most_accurate_is_chosen_and_the_model_stays(
    dense: nn.Module, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = dict.fromkeys(MONARCH_2, 0.9) | dict.fromkeys(MONARCH_4, 0.2) | {monarch(48, 192, 2): 0.99}
    Clock(monkeypatch, by_architecture(fast))
    before, modules, state = copy.deepcopy(dense.state_dict()), list(dense.modules()), torch.get_rng_state()
    made, *_ = choose_measured(plan, dense, Setting())
    assert torch.equal(torch.get_rng_state(), state)
    got = {layer.fqn.split(".", 2)[2]: layer.parts[0].architecture for layer in made.replaced}
    # 0.99 is within the noise, so it counts as no faster
    assert got == {"attn.qkv": monarch(48, 48, 4), "mlp.fc1": monarch(192, 48, 2), "mlp.fc2": monarch(48, 192, 4)}
    assert list(dense.modules()) == modules
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.state_dict().items())


def test_what_makes_the_whole_model_slower_goes_back_the_least_gain_first(
    dense: nn.Module, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = {monarch(48, 48, 4): 0.8, monarch(192, 48, 4): 0.5, monarch(48, 192, 4): 0.2}

    def price(owner: nn.Module, fused: bool, found: set[Architecture]) -> float:
        if hasattr(owner, "blocks"):  # a whole model, slower as long as two kinds of layers are converted
            return 10.0 + (len(found) > 1)
        return by_architecture(fast)(owner, fused, found)

    timer = Clock(monkeypatch, price)
    made, tradeoff, measurement = choose_measured(plan, dense, Setting())
    assert {layer.role for layer in made.replaced} == {"ffn_out"} and tradeoff.families == (("monarch", 2), ("dense", 4))
    assert tradeoff.chosen.cost == pytest.approx(4 * 1.0 + 2 * 0.2)
    assert "group by group: monarch for 2 layers, dense for 4 layers" in tradeoff.sentence
    assert measurement.returned == tuple(f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.qkv", "mlp.fc1"))
    assert {layer.reason.code for layer in made.layers if layer.fqn in measurement.returned and layer.reason} == {"slower-model"}
    assert (measurement.dense_ms, measurement.converted_ms) == (10.0, 10.0)
    assert "4 layers went back" in str(measurement)
    assert timer.asked[-3:] == [(2, [(1, 3, 32, 32)])] * 3
    timer.price = lambda owner, fused, found: price(owner, fused, found) if not hasattr(owner, "blocks") else 10.0 + len(found)
    with pytest.raises(
        PlanError, match=r"nothing would be replaced: with it the whole model takes 11 ms here, dense 10 ms \(\+10.0%\), at 1 samples"
    ):
        choose_measured(plan, dense, Setting())


@pytest.mark.parametrize("block", [4, None], ids=["one choice", "all choices"])
def test_kernels_that_fail_leave_the_choice_to_its_own_modules(
    called: list[str], dense: nn.Module, plan: Plan, monkeypatch: pytest.MonkeyPatch, block: int | None
) -> None:
    plainly = FeedForward.plainly

    def fail(operation: FeedForward, x: Tensor) -> Tensor:
        up = operation.up
        of_kernel = not isinstance(up, nn.Module)
        if of_kernel and (block is None or (isinstance(up, FusedFactors) and up.factors[0].shape[::3] == (1, block))):
            raise RuntimeError("the launch failed\nwith details")
        return plainly(operation, x)

    monkeypatch.setattr(FeedForward, "plainly", fail)
    Clock(monkeypatch, lambda owner, fused, found: 1.0 if not found else 0.5 if fused else 0.9 if found & MONARCH_4 else 2.0)
    _, group, *_ = measure_groups(plan, dense, images(dense, 1), fused=True)
    by_name = {choice.name: choice for choice in group.choices}
    assert not by_name["monarch 4"].fused and by_name["monarch 2"].fused == (block == 4)
    assert set(group.failed.values()) == {"the launch failed"}
    assert set(group.failed) == ({"monarch 4"} if block else set(by_name)) and len(by_name) == 11


def test_a_dense_model_that_does_not_run_is_one_sentence(dense: nn.Module, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("out of memory.\nwith details")

    monkeypatch.setattr(type(dense), "forward", lambda self, x: fail(x))
    with pytest.raises(InferenceError, match="measuring with 1 samples in bfloat16 on cpu failed: out of memory; try another"):
        choose_measured(plan, dense, Setting(dtype=torch.bfloat16))
    with pytest.raises(OptionError, match="one tensor"):
        choose_measured(replace(plan, example=None), dense, Setting())


@pytest.mark.gpu
def test_on_a_gpu_every_choice_is_timed_and_the_model_gets_no_slower() -> None:
    model = small(convert=False, embed_dim=64, depth=1).cuda().half()
    made = flysurgery.plan(model, "lowrank")
    try:
        _, _, measurement = choose_measured(made, model, Setting(64, optimized=True))
    except PlanError as error:
        assert "nothing would be replaced" in str(error)
    else:
        for group in measurement.groups:
            assert not group.failed and len(group.choices) > 5 and all(choice.ms > 0 for choice in group.choices)
        assert measurement.converted_ms <= min(measurement.dense_ms, measurement.dense_optimized_ms or measurement.dense_ms)


@pytest.mark.parametrize("ms", [0.1, 200.0])
def test_delayed_calls_do_not_decide(monkeypatch: pytest.MonkeyPatch, ms: float) -> None:
    now, calls = [0.0], {"slow": 0, "fast": 0}

    def way(name: str, own_ms: float, delayed: range) -> Callable[[torch.Tensor], None]:
        def run(_: torch.Tensor) -> None:
            now[0] += (60 * own_ms if calls[name] in delayed else own_ms) / 1e3
            calls[name] += 1

        return run

    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    found = clock.medians_ms((way("slow", 2 * ms, range(0)), way("fast", ms, range(1, 5))), [torch.zeros(1)])
    assert found == pytest.approx((2 * ms, ms))
    assert calls["slow"] == calls["fast"] >= 10 and (ms > 1 or calls["fast"] > 50)


def test_a_slower_kernel_is_left_with_both_times_at_the_given_batch(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, model = set[tuple[int, ...]](), small()

    def medians(ways: tuple[object, ...], inputs: tuple[Tensor, ...], **_: object) -> tuple[float, float]:
        shapes.update(tuple(each.shape) for each in inputs)
        return 1.0, 1.5

    monkeypatch.setattr(clock, "medians_ms", medians)
    report = flysurgery.optimize(model, images(model, 5))
    assert report.fused == () and {*left(report).values()} == {"slower"}
    assert (report.rows[0].plain_ms, report.rows[0].fused_ms) == (1.0, 1.5)
    assert not any(isinstance(module, StandIn) for module in model.modules())
    assert shapes == {(5, 3, 32, 32), (5, 2, 17, 24), (5 * 17, 48)}


def test_groups_that_were_chosen_before_are_fused_and_no_others_and_nothing_is_measured(
    called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, model, other = small(), small(), small()
    wanted = [each for each in flysurgery.optimize(first, images(first)).chosen if each[1] != "qkv"]
    monkeypatch.setattr(clock, "medians_ms", lambda *_, **more: pytest.fail("it is measured"))
    report = flysurgery.optimize(model, images(model), only=json.loads(json.dumps(wanted)))
    assert report.chosen == wanted and report.whole_ms is None
    assert {*left(report).values()} == {"not-chosen"}
    assert_equal(model(images(model)), first(images(first)))
    for wrong, named in (("blocks.9.mlp.fc2", "ffn"), r"\('blocks\.9\.mlp\.fc2', 'ffn'\)"), ("ffn", r"\('f', 'f', 'n'\)"):
        with pytest.raises(InferenceError, match=f"no group {named} to fuse; 'only' takes pairs"):
            flysurgery.optimize(other, images(other), only=[*wanted, wrong])
    assert not any(isinstance(module, StandIn) for module in other.modules())


def test_what_makes_the_whole_model_slower_is_taken_back_the_least_gain_first(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups gain half a millisecond to 4 by themselves; together they lose as long as more than two kinds are fused."""
    gains = {"Attention": 0.5, "NormLinears": 1.0, "LinearResidual": 2.0, "PatchEmbedding": 3.0, "FeedForward": 4.0}
    model = small()
    x = images(model)
    before = model(x)

    def medians(ways: tuple[Any, ...], inputs: tuple[Tensor, ...], **_: object) -> tuple[float, float]:
        if ways[0] is not model:
            return 10.0, 10.0 - gains[type(ways[0].__self__.given).__name__]
        called.clear()
        assert_equal(ways[1](*inputs), ways[0](*inputs))
        return 10.0, 11.0 if len(set(called)) > 2 else 10.0

    monkeypatch.setattr(clock, "medians_ms", medians)
    report = flysurgery.optimize(model, x)
    assert report.whole_ms == (10.0, 10.0) and "takes 10 ms now" in str(report)
    assert {row.group for row in report.fused} == {"patches", "ffn"}
    slower = {row.group for row in report.rows if row.reason and row.reason.code == "slower-model"}
    assert slower == {"qkv", "attention", "attn_out"}
    called.clear()
    assert_equal(model(x), before)
    assert called == ["patch_embedding", "ffn", "ffn"]
    monkeypatch.setattr(clock, "medians_ms", lambda ways, inputs, **_: (1.0, 2.0) if isinstance(ways[0], nn.Module) else (2.0, 1.0))
    flysurgery.restore(model)
    report = flysurgery.optimize(model, x)
    assert not report.fused and report.whole_ms is None
    assert not any(isinstance(module, StandIn) for module in model.modules())
