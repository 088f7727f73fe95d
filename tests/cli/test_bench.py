"""``flysurgery bench``."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flysurgery.cli import main

SMALL = ["bench", "multiply", "--quick", "--arch", "lowrank", "--width", "16", "--rows", "8", "--rounds", "2", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_multiply_prints_a_table_and_writes_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    assert main([*SMALL, "--threads", "1", "--out", str(path)]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    titles = ["arch", "layer", "mode", "candidate", "backend", "launch", "median ms", "iqr ms", "/ dense", "of bound", "error", "status"]
    assert title.split() == " ".join(titles).split()
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(lines) == len(rows)
    assert {row["threads"] for row in rows} == {"1"}
    assert {row["architecture"] for row in rows if row["layer"] == "square"} == {"(1,16,4,1),(1,4,16,1)"}
    for line, row in zip(lines, rows, strict=True):
        assert line.split()[:3] == [row["arch"], row["layer"], row["mode"]]
        assert row["candidate"] in line
        assert line.endswith(row["status"])


def test_multiply_prints_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--mode", "bf16", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["stamp"]["torch"] == torch.__version__
    assert {row["mode"] for row in document["rows"]} == {"bf16"}
    assert [row["ratio_to_dense"] for row in document["rows"] if row["candidate"] == "linear"] == [1.0, 1.0, 1.0]


def test_a_width_that_fits_no_layer_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "multiply", "--arch", "gonon", "--width", "7", "--rows", "8", "--device", "cpu"]) == 1
    assert capsys.readouterr().err.startswith("flysurgery: no layer of width 7 has an architecture 'gonon'")


@pytest.mark.parametrize(("option", "value"), [("--arch", "butterfly"), ("--rounds", "1"), ("--rows", "0"), ("--seed", "x")])
def test_a_value_that_is_refused_is_named(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "multiply", option, value]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and option in line and value in line.partition(option)[2]


def test_rows_that_fit_no_memory_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    assert main([*SMALL, "--rows", str(10**13), "--out", str(out)]) == 1
    line = capsys.readouterr().err
    assert line.startswith("flysurgery: this does not fit into this machine's memory; take fewer") and line.count("\n") == 1
    assert not out.exists()


def test_other_errors_of_pytorch_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("flysurgery.bench.bench_multiply", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(SMALL)


def test_a_full_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore")

    monkeypatch.setattr("flysurgery.bench.bench_multiply", fail)
    assert main(SMALL) == 1
    assert "does not fit into the memory of the GPU" in capsys.readouterr().err


TINY_VIT = ("vit_tiny_patch16_224", "--model-args", '{"embed_dim": 48, "depth": 1, "num_heads": 2, "img_size": 32, "patch_size": 8}')


def test_layer_measures_the_parts_that_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "layer", *TINY_VIT, "--quick", "--batch", "2", "--part", "FFN,qkv*", "--device", "cpu", "--json"]
    assert main([*command, "--out", str(tmp_path / "rows.csv"), "--plot", str(tmp_path / "bars.svg")]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["unit"] for row in rows} == {"FFN", "qkv + bias"}
    assert all(row["error"] < 1e-5 for row in rows if row["error"] is not None)
    assert (tmp_path / "bars.svg").read_text().startswith("<?xml")
    assert main([*command, "--part", "tail"]) == 2
    assert "no part of vit_tiny_patch16_224 is called tail" in capsys.readouterr().err


def test_layer_without_anything_to_measure_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layer", *TINY_VIT, "--launch", "graph", "--device", "cpu"]) == 2
    assert "nothing to measure by launches graph and protocols today: there are graphs on CUDA alone" in capsys.readouterr().err
    assert main(["bench", "layer", *TINY_VIT, "--launch", "grph", "--device", "cpu"]) == 2
    assert "there is no launch 'grph'; choose from graph, eager" in capsys.readouterr().err


def test_a_quick_look_at_layers_takes_one_image_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layer", *TINY_VIT, "--quick", "--part", "qkv*", "--device", "cpu", "--json"]) == 0
    rows = {row["candidate"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert {row["batch"] for row in rows.values()} == {1}
    assert rows["bsr"]["median_ms"] is None and "left out by --quick" in rows["bsr"]["status"]


def test_model_measures_each_architecture_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second run with the same file goes on where it stopped, and takes no row of another architecture for its own."""
    out = tmp_path / "rows.csv"
    command = ["bench", "model", *TINY_VIT, "--quick", "--rounds", "2", "--device", "cpu", "--out", str(out)]
    assert main([*command, "--arch", "gonon"]) == 0
    gonon = out.read_text()
    assert main([*command, "--arch", "monarch"]) == 0
    assert out.read_text().startswith(gonon)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    converted = [row["architecture"] for row in rows if row["candidate"] == "converted" and row["layer"] == "blocks.0.mlp.fc1"]
    assert converted == ["(1,96,24,2),(6,8,8,1)", "(1,48,12,4),(4,12,12,1)"]
    assert sum((row["layer"], row["candidate"]) == ("(model)", "converted") for row in rows) == 2
    both = out.read_text()
    capsys.readouterr()
    assert main([*command, "--arch", "gonon"]) == 0
    assert out.read_text() == both
    printed = capsys.readouterr()
    assert "the converted model takes" in printed.out
    assert main([*command, "--arch", "gonon", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["answer"] == printed.out.splitlines()[-1] and {row["model"] for row in document["rows"]} == {rows[0]["model"]}
    slow = [row["layer"] for row in document["rows"] if row["candidate"] == "converted" and row["ratio_to_dense"] >= 1]
    assert document["stay_dense"] == [name for name in slow if name != "(model)"]
    assert {row["architecture"] for row in document["rows"]} < {row["architecture"] for row in rows}
    assert printed.err == f"{out}: {len(rows)} rows are there already and stay; --fresh measures them again\n"


def test_a_table_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "model", *TINY_VIT, "--device", "cpu", "--table", str(tmp_path)]) == 2
    assert "--table takes a file" in capsys.readouterr().err


def test_after_a_quick_run_all_architectures_are_timed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, table = tmp_path / "rows.csv", tmp_path / "latency.csv"
    command = ["bench", "model", *TINY_VIT, "--rounds", "2", "--device", "cpu", "--out", str(out), "--table", str(table)]
    assert main([*command, "--quick"]) == 0
    quick, few = out.read_text(), table.read_text()
    assert main(command) == 0
    both, many = out.read_text(), table.read_text()
    assert both.startswith(quick) and len(many.splitlines()) > len(few.splitlines())
    printed = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("blocks.0.mlp.fc1 ") and " converted " in line for line in printed) == 2, "once in each answer"
    assert main(command) == 0
    assert (out.read_text(), table.read_text()) == (both, many), "all is there"


def test_one_file_for_two_things_is_refused_before_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, same = tmp_path / "rows.svg", tmp_path / "." / "rows.svg"
    assert main([*SMALL, "--out", str(rows), "--plot", str(same)]) == 2
    assert "--out and --plot name the same file" in capsys.readouterr().err
    assert main(["bench", "model", *TINY_VIT, "--device", "cpu", "--out", str(rows), "--table", str(same)]) == 2
    assert "--out and --table name the same file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_model_answers_and_writes_the_table_of_latencies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "latency.csv"
    assert (
        main(
            [
                "bench",
                "model",
                *TINY_VIT,
                "--quick",
                "--batch",
                "2",
                "--device",
                "cpu",
                "--table",
                str(table),
                "--plot",
                str(tmp_path / "bars.png"),
            ]
        )
        == 0
    )
    assert "the converted model takes" in capsys.readouterr().out.splitlines()[-1]
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["fqn"] for row in rows} == {"blocks.0.attn.qkv", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"}
    assert all(float(row["ms"]) > 0 for row in rows)
    assert [row["architecture"] for row in rows[:2]] == ["dense", "(1,12,12,4),(4,12,12,1)"]
    text = "".join(f'{row["fqn"]},"{row["architecture"]}",{2 if row["architecture"] == "dense" else 1}\n' for row in rows)
    table.write_text("fqn,architecture,ms\n" + text)  # the times of a machine on which conversion pays
    assert main(["convert", *TINY_VIT, "--no-pretrained", "--budget", "0.6", "--latency", str(table), "--dry-run"]) == 0
    assert "chosen" in capsys.readouterr().out


def test_projection_tells_seconds_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "projection", "--arch", "monarch", "--arch", "gonon", "--width", "16", "--quick", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    square = {(row["arch"], row["matrix"]): row for row in rows if row["layer"] == "square"}
    gaussian, falling = square["monarch", "gaussian"], square["monarch", "falling spectrum"]
    assert 0 < falling["relative_error"] < gaussian["relative_error"] < 1
    assert any(row["status"].startswith("no: ") and row["seconds"] is None for row in rows if row["arch"] == "gonon")


def test_projection_draws_a_line_for_each_family_and_kind_of_matrix(tmp_path: Path) -> None:
    plot = tmp_path / "lines.svg"
    assert main(["bench", "projection", "--arch", "monarch", "--width", "16", "--quick", "--plot", str(plot)]) == 0
    drawn = plot.read_text()
    assert all(f"<!-- monarch, {kind} -->" in drawn for kind in ("gaussian", "falling spectrum"))


def test_rows_of_another_verb_are_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.csv"
    assert main([*SMALL, "--out", str(out)]) == 0
    before = out.read_text()
    assert main(["bench", "projection", "--arch", "lowrank", "--width", "16", "--quick", "--out", str(out)]) == 2
    assert "a table of other measurements" in capsys.readouterr().err
    assert out.read_text() == before


def test_what_cannot_be_drawn_is_refused_before_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.csv"
    assert main([*SMALL, "--out", str(out), "--plot", str(tmp_path / "bars.doc")]) == 2
    assert "--plot takes a file that ends in" in capsys.readouterr().err
    assert not out.exists()
