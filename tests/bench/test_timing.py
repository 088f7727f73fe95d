"""What the timer calls, the modes it calls in, and what a row may say. Durations are not tested."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flysurgery.bench import TIMED_MODES, Case, Measured, Protocol, Record, in_mode, measure, modes_of, time_interleaved
from flysurgery.bench import timing as module
from flysurgery.bench.ceilings import Ceilings, Work, work_of
from flysurgery.bench.measuring import checked_rows
from flysurgery.bench.multiply import multiply_jobs
from flysurgery.bench.timing import Timing
from flysurgery.errors import OptionError, PatternError
from flysurgery.gpu.weight_cache import derived
from flysurgery.ops import BACKENDS

X = torch.ones(3)
FOUR = torch.tensor([[1.0], [2.0], [3.0], [4.0]])


def test_every_candidate_is_sampled_in_every_round_in_changing_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_MS", 0.0)  # one call a sample
    calls: list[str] = []
    names = ["a", "b", "c"]
    runs: dict[str, Callable[[Tensor], None]] = {name: lambda x, name=name: calls.append(name) for name in names}
    assert list(time_interleaved(runs, X, rounds=20)) == names
    samples = calls[12::2]  # four calls of each come before the rounds, and one that is not timed before each sample
    rounds = [tuple(samples[start : start + 3]) for start in range(0, len(samples), 3)]
    assert len(rounds) == 20 and all(sorted(order) == names for order in rounds) and len(set(rounds)) > 1


def test_samples_are_summed_up_by_quartiles_and_a_slow_candidate_gets_few(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [5.0, 1.0, 2.0, 4.0, 3.0]
    monkeypatch.setattr(module, "sampler_by_clock", lambda run, x: lambda: samples.pop(0))
    timing = time_interleaved({"a": torch.clone}, X, rounds=5)["a"]
    assert (timing.median_ms, timing.iqr_ms) == (3.0, 2.0)
    samples += [1.0] * 20
    time_interleaved({"a": torch.clone}, X, rounds=20, seconds=1e-9)
    assert len(samples) == 20 - module.FEWEST_ROUNDS


@pytest.mark.gpu
def test_what_a_graph_cannot_hold_is_launched_one_by_one() -> None:
    x = torch.randn(512, 384, device="cuda")
    timings = time_interleaved({"waits": lambda x: x * float(x.sum()), "product": lambda x: x @ x.mT}, x, rounds=3)
    assert (timings["waits"].launch, timings["product"].launch) == ("eager", "graph")
    assert timings["product"].median_ms > 0 <= timings["product"].iqr_ms


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


def test_only_cuda_has_tf32() -> None:
    assert modes_of("all", torch.device("cuda")) == tuple(TIMED_MODES)
    with pytest.raises(OptionError, match=r"there is no mode 'tf32' on cpu; choose from fp32, fp16, bf16$"):
        modes_of("fp32,tf32", torch.device("cpu"))


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


@pytest.fixture
def known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times and ceilings that rows can be told from."""
    times = {"fast": 0.5, "dense again": 2.02, "noisy again": 3.0}
    name = "flysurgery.bench.measuring.time_interleaved"
    monkeypatch.setattr(name, lambda runs, x, **rest: {each: Timing(times.get(each, 2.0), 1.0) for each in runs})
    monkeypatch.setattr("flysurgery.bench.measuring.measure_ceilings", lambda mode, device: Ceilings(1000.0, 100.0))


def not_finite(x: Tensor) -> Tensor:
    return torch.full_like(x, torch.nan)


def right(x: Tensor) -> Tensor:
    return 3 * x * (1 + 1e-6)


def found(runs: dict[str, Any], x: Tensor = FOUR, **more: Any) -> dict[str, Measured]:
    rows = more.get("rows", range(len(x)))
    return measure(Case(runs, x, 3 * x[list(rows)].double(), **more), Protocol(), "fp32")


@pytest.mark.usefixtures("known_times")
def test_ratios_bounds_and_twins() -> None:
    rows = found({"dense": right, "fast": right, "absent": "no: not here"}, works=Work(100, 30))
    assert list(rows) == ["dense", "dense again", "fast", "absent"]
    fast = rows["fast"]
    assert fast.peak_gib is None, "nothing counts a CPU's memory"
    assert (fast.ratio_to_dense, fast.bound_ms, fast.share_of_bound) == (0.25, 0.3, 0.6), "30 operations take longer than 100 bytes"
    assert fast.noise == pytest.approx(0.01) and (fast.status, fast.launch) == ("ok", "eager"), "the CPU knows no graphs"
    noisy = found({"noisy": right, "fast": right}, baseline="noisy")
    assert {row.status for row in noisy.values()} == {"noisy: noisy timed twice differs by 50%"} and noisy["fast"].median_ms == 0.5


@pytest.mark.usefixtures("known_times")
def test_weights_are_counted_with_what_was_packed_of_them() -> None:
    x, thrice, once = torch.ones(2, 1024), nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False)
    for each in (thrice, once):
        nn.init.eye_(each.weight).data.mul_(3)
    derived("packed", (thrice.weight,), lambda: (thrice.weight.repeat(2, 1),))
    rows = found({"dense": once, "thrice": thrice, "function": right}, x)
    assert [rows[name].weights_gib for name in ("dense", "dense again", "thrice", "function")] == [1 / 256, 1 / 256, 3 / 256, None]


@pytest.mark.gpu
@pytest.mark.usefixtures("known_times")
def test_peaks_count_what_a_call_needs_beside_its_input() -> None:
    x = torch.randn(1 << 20, 4, device="cuda")  # 16 MiB
    rows = found({"dense": lambda x: 3 * x, "twice": lambda x: torch.cat((x, x))[: len(x)] * 3}, x)
    assert [rows[name].peak_gib for name in ("dense", "dense again", "twice")] == [1 / 64, 1 / 64, 3 / 64]


@pytest.mark.usefixtures("known_times")
def test_wrong_failing_and_refused_candidates_get_no_time() -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("no kernel\nwith details")

    runs = {"dense": right, "double": lambda x: 6 * x, "nan": not_finite, "shape": lambda x: 3 * x[:2], "fails": fails}
    rows = found({**runs, "absent": "no: not here", "coarse": lambda x: 3.03 * x}, allowed={"coarse": 0.02})
    said = {"double": "wrong: relative error 1", "nan": "wrong: relative error inf", "shape": "wrong: relative error inf"}
    said |= {"fails": "failed: no kernel", "absent": "no: not here"}
    assert {name: row.status for name, row in rows.items() if row.median_ms is None} == said
    rows = found({"dense": not_finite, "double": lambda x: 6 * x, "right": right})
    assert [row.status.partition(":")[0] for row in rows.values()] == ["wrong", "wrong", "ok"], "a wrong baseline excuses nobody"
    assert rows["right"].ratio_to_dense is None


@pytest.mark.usefixtures("known_times")
def test_errors_in_the_last_rows_are_seen() -> None:
    x = torch.arange(1.0, 101.0).unsqueeze(1)
    rows = checked_rows(100, 3)
    assert rows == [0, 1, 2, 97, 98, 99] and checked_rows(6, 3) == list(range(6))
    cut = found({"dense": right, "cut": lambda x: torch.cat((3 * x[:-1], torch.zeros_like(x[-1:])))}, x, rows=rows)
    assert cut["cut"].status.startswith("wrong")


def rows_of(monkeypatch: pytest.MonkeyPatch, arch: str, width: int, rows: int, mode: str = "fp32") -> list[Record]:
    monkeypatch.setattr("flysurgery.bench.measuring.measure_ceilings", lambda mode, device: Ceilings(bytes_per_ms=1e3, flops_per_ms=1e3))
    jobs = multiply_jobs(arch, width, rows, mode, torch.device("cpu"), Protocol(rounds=2))
    return [row for _, make in jobs for row in make()]


def test_every_backend_has_a_row_on_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(monkeypatch, "monarch", 16, 600)
    for layer in ("square", "up", "down"):
        by_name = {row["candidate"]: row for row in rows if row["layer"] == layer}
        assert list(by_name) == ["linear", "linear again", "layer", *BACKENDS]
        assert by_name["linear"]["ratio_to_dense"] == 1.0 and by_name["layer"]["backend"] == "chunked"
        for row in by_name.values():
            timed = [row[name] for name in ("median_ms", "iqr_ms", "ratio_to_dense", "share_of_bound")]
            if row["status"] == "ok" or row["status"].startswith("noisy"):
                assert row["error"] < 1e-6 and None not in timed
            else:
                assert timed == [None] * 4
        assert by_name["cuda"]["status"] == "it needs tensors on a CUDA device, these are on cpu"
    dense, layer = rows[0], rows[2]
    assert (dense["bytes_moved"], dense["flops"]) == (4 * (600 * 32 + 16 + 256), 600 * 512)
    assert (layer["bytes_moved"], layer["flops"]) == (4 * (600 * 32 + 16 + 128), 600 * 256)
    assert layer["bound_ms"] == 600 * 256 / 1e3, "these ceilings make it a matter of arithmetic"


def test_what_does_not_fit_is_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {row["layer"] for row in rows_of(monkeypatch, "gonon", 8, 4)} == {"square"}, "up and down need multiples of 6"
    with pytest.raises(PatternError, match="no layer of width 7 has an architecture 'gonon'"):
        rows_of(monkeypatch, "gonon", 7, 4)
    with pytest.raises(OptionError, match="dense"):
        rows_of(monkeypatch, "dense", 8, 4)


def test_operations_are_those_of_the_products() -> None:
    work = work_of(nn.Linear(48, 10), torch.zeros(3, 16, 48))
    assert work.flops == 2 * 3 * 16 * 48 * 10
    assert work.bytes_moved == 4 * (3 * 16 * (48 + 10) + 490)
