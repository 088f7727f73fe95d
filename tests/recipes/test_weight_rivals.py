"""The rivals in the table on real weights: what they change, what fails alone, which run counts, and where they stand in the picture."""

from __future__ import annotations

import copy
import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from flysurgery.bench import Measured
from tests.recipes.conftest import RECIPES, RunRecipe
from tests.recipes.test_real_weights import photographs, small_weights


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))


@pytest.fixture
def given(tmp_path: Path) -> tuple[str, ...]:
    files = photographs(tmp_path / "p", 8), small_weights(tmp_path / "w")
    return ("--photographs", str(files[0]), "--weights", str(files[1]), "--judging", "3")


def test_a_rival_that_fails_leaves_the_other_rows(run_recipe: RunRecipe, given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    given = (*given, "--ways", "monarch 4 plain,dense compiled,int8,2:4")
    rows = {row["way"]: row for row in run_recipe("real_weights.py", *given)}
    assert list(rows) == ["dense", "monarch 4 plain", "dense compiled", "int8", "2:4"]
    assert rows.pop("int8")["status"] == "failed: int8 needs torchao: pip install torchao"
    assert all(row["status"] == "ok" and row["timing"] == "not on CUDA" and not row["ms"] for row in rows.values())
    assert float(rows["dense compiled"]["cls"]) == 1 and 0.5 < float(rows["2:4"]["cls"]) < 1
    dense, pruned = (int(rows[way]["params"]) for way in ("dense", "2:4"))
    assert dense - pruned == 2 * (3 + 4 + 4) * 48**2 // 2, "half of q, k, v, fc1 and fc2 of two blocks"
    monkeypatch.setitem(sys.modules, "torchao", torch)
    monkeypatch.setitem(sys.modules, "torchao.quantization", torch)
    again = run_recipe("real_weights.py", *given)
    assert [row["way"] for row in again] == [*rows, "int8"], "what failed is made again"
    assert again[-1]["status"].startswith("failed: ") and "Int8DynamicActivationInt8WeightConfig" in again[-1]["status"]


def test_int8_is_near_the_dense_model(run_recipe: RunRecipe, given: tuple[str, ...]) -> None:
    pytest.importorskip("torchao")
    dense, int8 = run_recipe("real_weights.py", *given, "--ways", "int8")
    assert int8["status"] == "ok" and int8["params"] == dense["params"]
    assert float(int8["cls"]) > 0.99 and 0 < float(int8["relative_error"]) < 0.1


def test_pruning_keeps_the_two_largest_of_four() -> None:
    from weight_rivals import RIVALS

    first, second = layers = [nn.Linear(8, 2), nn.Linear(8, 2)]
    weight = torch.tensor([[1.0, -4, 3, 2, 0.5, 0.1, -0.2, 0.3], [0, 0, 0, 7, -1, 1, -2, 2]])
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(weight)
    model = nn.Sequential(*layers)
    RIVALS["2:4"].convert(model, ["1"])
    assert torch.equal(first.weight, weight)
    assert second.weight[0].tolist() == pytest.approx([0, -4, 3, 0, 0.5, 0, 0, 0.3])
    assert second.weight[1].tolist() == [0, 0, 0, 7, 0, 0, -2, 2]
    assert RIVALS["2:4"].params(model, ["1"]) == 2 * 18 - 8 and RIVALS["int8"].params(model, ["1"]) == 36


def test_the_layers_are_those_that_conversions_replace() -> None:
    from focus_model import BASE, BASE_ARGS
    from timm import create_model
    from weight_rivals import linears_of
    from weight_ways import WAYS, plan_of

    with torch.device("meta"):
        model = create_model(BASE, pretrained=False, **BASE_ARGS, depth=1)
    found = linears_of(model)
    assert found == ("blocks.0.attn.qkv", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2")
    for name in ("monarch 2 plain", "rank 32 plain", "mixed plain"):
        way = next(way for way in WAYS if way.name == name)
        assert tuple(layer.fqn for layer in plan_of(way, model).replaced) == found


def test_the_fastest_run_of_a_rival_counts() -> None:
    from real_weights import _times

    dense = {"dense": Measured("graph", "ok", noise=0.01, median_ms=8.0), "dense optimized": Measured("graph", "ok", median_ms=4.5)}
    runs = {name: nn.Identity() for name in ("not compiled", "torch.compile", "torch.compile, tuned")}
    broken = Measured("graph", "failed: no kernel")
    found = dict(zip(runs, (Measured("eager", "ok", median_ms=9.0), Measured("graph", "ok", median_ms=7.0), broken), strict=True))
    times = _times(dense | found, runs)
    assert (times.ms, times.dense_optimized_ms, times.dense_ms, times.noise) == (7.0, 4.5, 8.0, 0.01)
    assert times.timing == "ok; torch.compile, graph"
    none = _times(dense | dict.fromkeys(runs, broken), runs)
    assert none.ms is None and none.dense_ms == 8.0 and none.timing.startswith("failed: no kernel")
    ours = _times(dense | {"optimized": Measured("graph", "ok", median_ms=2.6)}, {"optimized": nn.Identity()})
    assert (ours.ms, ours.timing) == (2.6, "ok")


def test_a_rival_below_all_families_stands_at_the_lower_edge(
    run_recipe: RunRecipe, given: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run_recipe("real_weights.py", *given, "--ways", "monarch 4 plain,dense compiled,2:4")
    changes: dict[str, dict[str, str]] = {
        "dense": {"ms": "4.5"},
        "monarch 4 plain": {"cls": "0.9", "ms": "2.5"},
        "dense compiled": {"ms": "7"},
        "2:4": {"cls": "0.741", "ms": "6"},
    }
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(made[0]))
        writer.writeheader()
        writer.writerows(row | {"dense_ms": "8", "dense_optimized_ms": "4.6"} | changes[row["way"]] for row in made)
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_args, **_options: figures.append(copy.copy(figure)))
    run_recipe("real_weights.py", "--plot", str(tmp_path / "curve.png"))
    by_ms, by_params = figures[0].axes
    places: dict[Any, Any] = {line.get_label(): (line.get_xdata(), line.get_ydata()) for line in by_ms.lines}
    assert [float(places[name][0][0]) for name in ("dense, optimized", "dense", "dense compiled", "2:4")] == [4.6, 8, 7, 6]
    bottom = by_ms.get_ylim()[0]
    assert 0.8 < bottom < 0.9 and float(places["2:4"][1][0]) == bottom and float(places["dense compiled"][1][0]) == 1
    assert [text.get_text() for text in by_ms.texts] == ["0.74"]
    assert "2:4" in [line.get_label() for line in by_params.lines], "it has fewer parameters"
    assert "dense compiled" not in [line.get_label() for line in by_params.lines], "it has those of the dense one"


@pytest.mark.gpu
def test_sparse_weights_multiply_as_a_dense_matrix_with_zeros() -> None:
    from weight_rivals import RIVALS, _store_sparse

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 192), nn.GELU(), nn.Linear(192, 64)).cuda().half().requires_grad_(False)
    RIVALS["2:4"].convert(model, ["0", "2"])
    x = torch.randn(4, 64, 64, device="cuda", dtype=torch.half)
    with torch.inference_mode():
        wanted = copy.deepcopy(model).double()(x.double())
        _store_sparse(model, ["0", "2"])
        assert model[0](x).is_contiguous()
        assert float((model(x) - wanted).norm() / wanted.norm()) < 5e-3
