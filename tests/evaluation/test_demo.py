"""The demo checkpoint is what its card says, and its recipe writes such a folder."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
import timm
import torch

from flysurgery.checkpoint import build_base, load, load_dense, save
from flysurgery.evaluation import evaluate, load_data
from flysurgery.inference import convert

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "checkpoints" / "digits_vit"


def test_accuracy_and_size_are_as_stated() -> None:
    model, base, base_args = load_dense(DEMO)
    found = evaluate(model, load_data("digits", model))
    stated = re.search(r"\*\*([\d.]+)%\*\* top-1", (DEMO / "README.md").read_text())
    assert stated is not None and f"{found.top1:.2%}" == f"{stated[1]}%"
    assert found.top1 >= 0.975 and found.samples == 599
    assert (DEMO / "model.safetensors").stat().st_size <= 4_000_000
    skeleton = build_base(base, base_args, device="meta")
    assert {n: t.shape for n, t in skeleton.state_dict().items()} == {n: t.shape for n, t in model.state_dict().items()}


def test_timm_opens_it() -> None:
    model, _, _ = load_dense(DEMO)
    other = timm.create_model(f"local-dir:{DEMO}", pretrained=True).eval()
    image = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(model(image), other(image))


@pytest.mark.parametrize(("arch", "least"), [("monarch", 0.95), ("gonon", 0.955)])
def test_converted_it_still_reads_digits(arch: str, least: float, tmp_path: Path) -> None:
    model, _, _ = load_dense(DEMO)
    data = load_data("digits", model)
    convert(model, arch)
    save(model, tmp_path / arch)
    assert evaluate(load(tmp_path / arch), data).top1 >= least


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "recipes"))
        return importlib.import_module("train_digits_vit")


def test_distortions_are_small_and_seeded(recipe: ModuleType) -> None:
    model, _, _ = load_dense(DEMO)
    images, classes = load_data("digits", model).dataset[:]
    moved = recipe.distort(images, torch.Generator().manual_seed(0))
    assert torch.equal(moved, recipe.distort(images, torch.Generator().manual_seed(0))) and not torch.equal(moved, images)
    assert moved.abs().max() < 1.01
    with torch.no_grad():
        assert (model(moved).argmax(1) == classes).float().mean() > 0.9, "distorted digits are still digits"


def test_recipe_learns_and_writes_a_folder(recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = timm.create_model(recipe.BASE, **{**recipe.BASE_ARGS, "depth": 1})
    recipe.train(model, recipe.digits("train", (8, 8), mean=[0.5], std=[0.5]), epochs=10)
    data = load_data("digits", model)
    accuracy = evaluate(model, data)
    assert accuracy.top1 > 0.3, "guessing gives 0.1"
    monkeypatch.setattr(recipe, "BASE_ARGS", {**recipe.BASE_ARGS, "depth": 1})
    recipe.write(model, tmp_path / "out", accuracy, 10, 1.0)
    assert evaluate(load_dense(tmp_path / "out")[0], data).top1 == accuracy.top1
    assert f"**{accuracy.top1:.2%}** top-1" in (tmp_path / "out" / "README.md").read_text()
