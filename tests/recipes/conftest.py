"""Running a recipe as a user does, in the test's process and in an empty folder."""

import csv
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

RECIPES = Path(__file__).parents[2] / "recipes"

RunRecipe = Callable[..., list[dict[str, str]]]


@pytest.fixture(autouse=True)
def _recipes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Recipes import their neighbours, and some set how many threads their process has."""
    monkeypatch.syspath_prepend(str(RECIPES))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Run a recipe with the given arguments in an empty folder. The name of one with several tables has that of the table behind it."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", [*name.split(), *map(str, arguments)])
        runpy.run_path(str(RECIPES / sys.argv[0]), run_name="__main__")

    return run


@pytest.fixture
def run_recipe(run_program: Callable[..., None], tmp_path: Path) -> RunRecipe:
    """Run a recipe with ``--quick --device cpu`` and further arguments, and give the rows that it wrote."""
    out = tmp_path / "rows.csv"

    def run(name: str, *arguments: object) -> list[dict[str, str]]:
        run_program(name, "--quick", "--device", "cpu", "--out", out, *arguments)
        with out.open(newline="") as file:
            return list(csv.DictReader(file))

    return run


def picture(seed: int, size: tuple[int, int] = (300, 240)) -> Image.Image:
    """Smooth noise in colour."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)
