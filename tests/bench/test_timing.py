"""What the timer calls, and the modes it calls in. Durations are not tested."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flysurgery.bench import TIMED_MODES, in_mode, modes_of, time_interleaved
from flysurgery.bench import timing as module
from flysurgery.errors import OptionError

X = torch.ones(3)


def test_every_candidate_is_sampled_in_every_round_in_changing_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_MS", 0.0)  # one call a sample
    calls: list[str] = []
    names = ["a", "b", "c"]
    runs: dict[str, Callable[[Tensor], None]] = {name: lambda x, name=name: calls.append(name) for name in names}
    assert list(time_interleaved(runs, X, rounds=20)) == names
    samples = calls[12::2]  # four calls of each come before the rounds, and one that is not timed before each sample
    rounds = [tuple(samples[start : start + 3]) for start in range(0, len(samples), 3)]
    assert len(rounds) == 20 and all(sorted(order) == names for order in rounds) and len(set(rounds)) > 1


def test_a_long_call_on_a_cpu_is_not_called_again_before_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONG_MS", 0.0)
    calls: list[str] = []
    time_interleaved({"a": lambda x: calls.append("a")}, X, rounds=4)
    assert len(calls) == 2 + 4


def test_samples_are_summed_up_by_quartiles_and_a_slow_candidate_gets_few(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [5.0, 1.0, 2.0, 4.0, 3.0]
    monkeypatch.setattr(module, "cpu_sampler", lambda run, x: lambda: samples.pop(0))
    timing = time_interleaved({"a": torch.clone}, X, rounds=5)["a"]
    assert (timing.lower_ms, timing.median_ms, timing.upper_ms, timing.iqr_ms) == (2.0, 3.0, 4.0, 2.0)
    clock = iter(range(10**6))  # every look at the clock is a second later
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    samples += [1.0] * 20
    time_interleaved({"a": torch.clone}, X, rounds=20, seconds=0.5)
    assert len(samples) == 20 - module.FEWEST_ROUNDS


@pytest.mark.gpu
def test_what_a_graph_cannot_hold_is_launched_one_by_one() -> None:
    x = torch.randn(512, 384, device="cuda")
    timings = time_interleaved({"waits": lambda x: x * float(x.sum()), "product": lambda x: x @ x.mT}, x, rounds=3)
    assert (timings["waits"].launch, timings["product"].launch) == ("eager", "graph")
    assert 0 < timings["product"].lower_ms <= timings["product"].median_ms <= timings["product"].upper_ms


@pytest.mark.gpu
@pytest.mark.parametrize("made_in_inference_mode", [False, True])
def test_a_compiler_makes_one_graph_for_all_inputs_of_a_sample(made_in_inference_mode: bool) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, example: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    with torch.inference_mode(made_in_inference_mode):
        x = torch.ones(3, device="cuda")
    with torch.inference_mode():
        timing = time_interleaved({"a": torch.compile(lambda x: x.sin(), backend=keep)}, x, rounds=2)["a"]
    assert timing.launch == "graph" and len(graphs) == 1


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), ("fp32", "fp16")), ((8, 0), tuple(TIMED_MODES))])
def test_all_are_those_that_the_gpu_computes_in(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert modes_of("all", torch.device("cuda")) == expected
    if "tf32" not in expected:
        with pytest.raises(OptionError, match=r"there is no mode 'tf32' on cuda; choose from fp32, fp16$"):
            modes_of("fp32,tf32", torch.device("cuda"))


@pytest.mark.parametrize("mode", TIMED_MODES)
def test_tf32_is_on_in_its_own_mode_alone_and_set_back(mode: str) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        for allowed in (True, False):
            matmul.allow_tf32 = allowed
            with in_mode(mode) as dtype:
                assert (matmul.allow_tf32, dtype) == (mode == "tf32", TIMED_MODES[mode])
            assert matmul.allow_tf32 is allowed
    finally:
        matmul.allow_tf32 = before
