"""Running the command line in the test's process, in an empty folder, and looking at what it left behind."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flysurgery.checkpoint import save
from flysurgery.cli import main
from flysurgery.surgery import convert
from tests.checkpoint.conftest import snapshot
from tests.support.models import VIT, VIT_ARGUMENTS, vit


@dataclass(frozen=True)
class Outcome:
    """What a user sees of one command."""

    code: int
    out: str
    err: str

    def check_refused(self, *words: str, code: int = 1) -> None:
        """One sentence on stderr that holds each of ``words``, nothing on stdout, and the exit code."""
        assert self.code == code, self
        assert self.out == "", self.out
        assert self.err.startswith("flysurgery: ") and self.err.count("\n") == 1, self.err
        assert all(word in self.err for word in words), self.err


Run = Callable[..., Outcome]
Document = Callable[..., dict[str, Any]]
Refused = Callable[..., None]

TINY_ARGUMENTS = VIT_ARGUMENTS | {"embed_dim": 64, "img_size": 32, "num_classes": 10}
TINY = (VIT, "--model-args", json.dumps(TINY_ARGUMENTS))
"""A ViT of two small blocks, as MODEL and its options."""
RANDOM = (*TINY, "--no-pretrained")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Call ``main`` with arguments, in the test's own empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def document(run: Run) -> Document:
    """Call ``main`` with arguments and ``--json``; what a command that ends well prints."""

    def call(*arguments: object) -> dict[str, Any]:
        outcome = run(*arguments, "--json")
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)

    return call


@pytest.fixture
def refused(run: Run, tmp_path: Path) -> Refused:
    """Check that a command ends in one sentence with the given words, and that no file appeared, vanished or changed."""

    def check(*arguments: object, words: tuple[str, ...], code: int = 1) -> None:
        before = snapshot(tmp_path)
        run(*arguments).check_refused(*words, code=code)
        assert snapshot(tmp_path) == before

    return check


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, converted and saved; to be read only."""
    folder = tmp_path_factory.mktemp("converted") / "tiny"
    model = vit(**TINY_ARGUMENTS)
    save(model, folder, report=convert(model, base=VIT, base_args=TINY_ARGUMENTS))
    return folder


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of twelve images without classes."""
    (tmp_path / "images").mkdir()
    pixels = np.random.default_rng(0)
    for index in range(12):
        Image.fromarray(pixels.integers(0, 255, (8, 8, 3), np.uint8)).resize((40, 40)).save(tmp_path / "images" / f"{index:02}.png")
    return tmp_path / "images"
