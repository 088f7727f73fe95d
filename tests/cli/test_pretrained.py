"""Published weights: found out early and quickly where they cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flysurgery.cli.source import check_available
from flysurgery.errors import ModelError
from tests.cli.conftest import Refused, Run

NAME = "vit_small_patch16_224"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An address that refuses every connection, and an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("no_network")
def test_without_network_convert_says_what_to_do_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    outcome = run("convert", NAME, "--arch", "monarch")
    outcome.check_refused(NAME, "--checkpoint FILE", "--no-pretrained")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_network")
def test_without_network_a_name_of_transformers_gets_its_own_advice(refused: Refused) -> None:
    advice = ("someone/vit cannot be downloaded: no connection", "save_pretrained", "transformers:ViTModel --no-pretrained")
    refused("convert", "transformers:someone/vit", words=advice)


def test_it_says_so_within_seconds_and_without_the_client_s_retries(tmp_path: Path) -> None:
    """A process of its own, because the hub client reads its settings when it is imported."""
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    code = f"import sys; from flysurgery.cli import main; sys.exit(main(['evaluate', '{NAME}', '--data', 'digits']))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=40, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "--no-pretrained" in done.stderr, done.stderr


@pytest.mark.usefixtures("no_network")
def test_cached_weights_need_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repo, file: f"/{repo}/{file}")
    check_available(NAME)


@pytest.mark.parametrize("name", ["vit_pytorch:ViT", "vit_small_patch16_36x1_224"])
def test_models_without_published_weights_are_named(name: str) -> None:
    with pytest.raises(ModelError, match=r"publishes no weights|no weights are published") as caught:
        check_available(name)
    assert name in str(caught.value) and "--checkpoint FILE" in str(caught.value)
