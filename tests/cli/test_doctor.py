"""What doctor says of the machine that the tests run on."""

from __future__ import annotations

import platform
from importlib.metadata import version

from flysurgery.ops import BACKENDS
from tests.cli.conftest import Document, Run


def test_doctor_tells_versions_and_every_backend(run: Run, document: Document) -> None:
    found = document("doctor")
    facts = {fact["what"]: fact for fact in found["facts"]}
    assert facts["python"]["here"].startswith(platform.python_version())
    assert (facts["torch"]["here"], facts["timm"]["here"]) == (version("torch"), version("timm"))
    on_cpu = [row for row in found["backends"] if row["device"] == "cpu" and row["dtype"] == "float32"]
    assert {row["backend"] for row in on_cpu} == set(BACKENDS)
    assert [row["runs"] for row in on_cpu].count("chosen") == 1
    assert all(row["reason"] for row in found["backends"] if row["runs"] != "yes")
    outcome = run("doctor")
    assert (outcome.code, outcome.err) == (0, "")
    assert "einsum" in outcome.out and "timm" in outcome.out


def test_a_cache_folder_s_parent_that_is_a_file_is_an_obstacle(document: Document, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLYSURGERY_CACHE", str(tmp_path / "file" / "cache"))
    facts = {fact["what"]: fact for fact in document("doctor")["facts"]}
    assert "not a folder" in facts["kernel cache"]["obstacle"]
