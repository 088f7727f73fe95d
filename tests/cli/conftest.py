"""Running the command line in the test's process, in an empty folder, and looking at what it left behind."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from flysurgery.checkpoint import build_base, save
from flysurgery.cli import main
from flysurgery.surgery import convert


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
        for word in words:
            assert word in self.err, self.err


Run = Callable[..., Outcome]
Refused = Callable[..., None]

TINY_BASE = "vit_tiny_patch16_224"
TINY_ARGUMENTS = {"embed_dim": 64, "depth": 2, "num_heads": 2, "img_size": 32, "patch_size": 8, "num_classes": 10}
TINY = (TINY_BASE, "--model-args", json.dumps(TINY_ARGUMENTS))
"""A ViT of two small blocks, as MODEL and its options."""


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


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, converted and saved; to be read only."""
    folder = tmp_path_factory.mktemp("converted") / "tiny"
    torch.manual_seed(0)
    model = build_base(TINY_BASE, TINY_ARGUMENTS).eval()
    save(model, folder, report=convert(model, base=TINY_BASE, base_args=TINY_ARGUMENTS))
    return folder


@pytest.fixture
def refused(run: Run, tmp_path: Path) -> Refused:
    """Check that a command ends in one sentence with the given words, and that no file appeared, vanished or changed."""

    def check(*arguments: object, words: tuple[str, ...], code: int = 1) -> None:
        before = snapshot(tmp_path)
        run(*arguments).check_refused(*words, code=code)
        assert snapshot(tmp_path) == before

    return check


def snapshot(folder: Path) -> dict[str, str]:
    """Every file and folder below ``folder`` with a hash of its content."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }
