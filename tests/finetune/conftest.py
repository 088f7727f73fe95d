"""A Vision Transformer of two tiny blocks, dense and converted, for the digits; the same without a head; pictures; and runs that stop."""

import copy
import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from flysurgery import convert
from tests.support.models import VIT, VIT_ARGUMENTS, vit

ARGUMENTS = VIT_ARGUMENTS | {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 10}
HEADLESS = ARGUMENTS | {"num_classes": 0}


def built(**changes: object) -> nn.Module:
    """A dense model, always with the same weights."""
    return vit(**ARGUMENTS | changes)


@pytest.fixture
def dense() -> nn.Module:
    return built()


@pytest.fixture(scope="session")
def converted() -> Callable[..., nn.Module]:
    """Gives the same converted model anew with each call."""
    found = {classes: built(num_classes=classes) for classes in (10, 0)}
    for classes, model in found.items():
        convert(model, base=VIT, base_args=ARGUMENTS | {"num_classes": classes})
    return lambda classes=10: copy.deepcopy(found[classes])


@pytest.fixture(scope="session")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 pictures of different sizes, some of them a folder deeper."""
    folder = tmp_path_factory.mktemp("photographs")
    (folder / "deep" / "er").mkdir(parents=True)
    drawn = np.random.default_rng(0)
    for number in range(40):
        pixels = Image.fromarray(drawn.integers(0, 255, (3, 4), dtype=np.uint8))
        pixels.resize((20 + number % 7, 18), Image.Resampling.BICUBIC).save(folder / ("deep/er" if number % 3 else "") / f"{number:02}.png")
    return folder


class StoppedError(Exception):
    """Stands for a kill."""


def stop_at(update: int) -> Callable[[int, int, str], None]:
    """A progress that ends the run."""

    def progress(done: int, total: int, text: str) -> None:
        if done == update:
            raise StoppedError

    return progress


def rows(folder: Path) -> list[dict[str, str]]:
    """The log without what depends on the clock."""
    with (folder / "log.csv").open() as file:
        return [{name: value for name, value in row.items() if name != "images_per_second"} for row in csv.DictReader(file)]


def states(folder: Path) -> list[str]:
    """The folders that a run has left."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def check_same(one: nn.Module, other: nn.Module) -> None:
    """Check that two models have the same weights, bit by bit."""
    for (name, mine), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
