"""``flysurgery bench``."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Document, Refused, Run

SMALL = ("bench", "multiply", "--quick", "--arch", "lowrank", "--width", 16, "--rows", 8, "--rounds", 2, "--device", "cpu")


TINY_VIT = ("vit_tiny_patch16_224", "--model-args", '{"embed_dim": 48, "depth": 1, "num_heads": 2, "img_size": 32, "patch_size": 8}')


MODEL = ("bench", "model", *TINY_VIT, "--rounds", 2, "--device", "cpu")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows_of(file: Path | str) -> list[dict[str, str]]:
    with Path(file).open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_multiply_prints_a_table_and_writes_the_rows(run: Run, refused: Refused) -> None:
    title, *lines = run(*SMALL, "--threads", 1, "--out", "rows.csv").out.splitlines()
    titles = ["arch", "layer", "mode", "candidate", "backend", "launch", "median ms", "iqr ms", "/ dense", "error", "status"]  # no bound
    assert title.split() == " ".join(titles).split()
    rows = rows_of("rows.csv")
    assert {row["threads"] for row in rows} == {"1"}
    assert {row["architecture"] for row in rows if row["layer"] == "square"} == {"(1,16,4,1),(1,4,16,1)"}
    for line, row in zip(lines, rows, strict=True):
        assert line.split()[:3] == [row["arch"], row["layer"], row["mode"]]
        assert row["candidate"] in line and line.endswith(row["status"])
    refused(*MODEL, "--out", "rows.csv", words=("a table of other measurements",), code=2)


def test_what_cannot_be_measured_or_written_is_one_line(refused: Refused) -> None:
    refused("bench", "multiply", "--arch", "gonon", "--width", 7, "--rows", 8, "--device", "cpu", words=("no layer of width 7 has",))
    refused(*SMALL, "--rows", 10**13, "--out", "rows.csv", words=("this does not fit into this machine's memory; take fewer",))
    refused(*MODEL, "--mode", "fp32,bf16", words=("bench model takes one mode at a time",), code=2)


def test_model_measures_each_architecture_once(run: Run, document: Document) -> None:
    """A second run with the same file goes on where it stopped, and takes no row of another architecture for its own."""
    command = (*MODEL, "--quick", "--out", "rows.csv")
    assert run(*command, "--arch", "gonon").code == 0
    gonon = Path("rows.csv").read_text()
    assert run(*command, "--arch", "monarch").code == 0
    both, rows = Path("rows.csv").read_text(), rows_of("rows.csv")
    assert both.startswith(gonon)
    converted = [row["architecture"] for row in rows if row["candidate"] == "converted" and row["layer"] == "blocks.0.mlp.fc1"]
    assert converted == ["(1,96,24,2),(6,8,8,1)", "(1,48,12,4),(4,12,12,1)"]
    assert sum((row["layer"], row["candidate"]) == ("(model)", "converted") for row in rows) == 2
    printed = run(*command, "--arch", "gonon")
    assert Path("rows.csv").read_text() == both
    assert printed.err == f"rows.csv: {len(rows)} rows are there already and stay; --fresh measures them again\n"
    assert "the converted model takes" in printed.out
    found = document(*command, "--arch", "gonon")
    assert found["answer"] == printed.out.splitlines()[-1] and {row["model"] for row in found["rows"]} == {rows[0]["model"]}
    slow = [row["layer"] for row in found["rows"] if row["candidate"] == "converted" and row["ratio_to_dense"] >= 1]
    assert found["stay_dense"] == [name for name in slow if name != "(model)"]
