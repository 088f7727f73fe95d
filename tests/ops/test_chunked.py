"""What the chunked backend's chunks, scratch memory and operator bring with them."""

import csv
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from flysurgery.ops import BACKENDS, Problem, explain, ks_linear
from flysurgery.ops.backends import chunked
from flysurgery.patterns import Architecture
from tests.support.levels import check_layer
from tests.support.problems import ARCHITECTURES, make_factors, make_input, make_vector
from tests.support.tolerance import FP32, FP64, MIN_OUTPUTS, assert_bounded, assert_equal


@pytest.mark.parametrize("threads", [1, 16])  # batched products, and one after the other
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_many_chunks(architecture: Architecture, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "SCRATCH_BYTES", 1)  # then a chunk has its smallest number of rows, 64
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    rows = max(150, 1 + MIN_OUTPUTS // architecture.out_features)
    run = partial(ks_linear, backend="chunked")
    check_layer(run, BACKENDS["bmm"].linear, architecture, rows, FP32, bias_apart=True)


def test_scratch_made_in_inference_mode_serves_outside_it() -> None:
    factors, x = make_factors(ARCHITECTURES[0], FP64), make_input(5, 384, FP64)
    results = []

    def work() -> None:  # a new thread has no scratch memory yet
        with torch.inference_mode():
            ks_linear(x, factors, backend="chunked")
        with torch.no_grad():
            results.append(ks_linear(x, factors, backend="chunked"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert_bounded(results[0], x, factors, None, FP64)


def test_chosen_where_it_is_fastest() -> None:
    """Of the ways to multiply by factors, in every layer that was timed."""
    times: dict[tuple[str, str, str], dict[str, float]] = {}
    with (Path(__file__).parents[2] / "recipes/results/cpu_multiply.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["candidate"] in ("chunked", "bmm", "einsum"):
                times.setdefault((row["architecture"], row["rows"], row["mode"]), {})[row["candidate"]] = float(row["median_ms"])
    assert len(times) == 12
    for (architecture, rows, mode), own in times.items():
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[mode]
        choice = explain(Problem(Architecture.parse(architecture), int(rows), dtype, "cpu")).choice
        assert choice == min(own, key=lambda name: own[name]), (architecture, mode, own)


@pytest.mark.parametrize("rows", [5, 700])  # few rows take bmm, within the operator
def test_a_compiled_graph_calls_one_operator(rows: int) -> None:
    called = []

    def record(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    architecture = ARCHITECTURES[0]
    factors, bias = make_factors(architecture, FP32), make_vector(architecture.out_features, FP32)
    x = make_input(rows, architecture.in_features, FP32)
    torch.compiler.reset()
    with torch.no_grad():
        y = torch.compile(lambda x: ks_linear(x, factors, bias).relu(), backend=record, fullgraph=True)(x)
    assert sum("chunked_linear" in name for name in called) == 1
    assert not any("bmm" in name for name in called)
    assert_equal(y, ks_linear(x, factors, bias).relu())


def test_the_operator_keeps_the_rules_of_operators() -> None:
    architecture = ARCHITECTURES[0]
    factors, bias = make_factors(architecture, FP32), make_vector(architecture.out_features, FP32)
    x = make_input(600, architecture.in_features, FP32)
    torch.library.opcheck(torch.ops.flysurgery.chunked_linear.default, (x, factors, bias), test_utils=("test_schema", "test_faketensor"))
