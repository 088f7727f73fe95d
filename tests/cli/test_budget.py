"""Converting under a budget as a user does: what is printed, drawn and refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from flysurgery.checkpoint import build_base, load
from flysurgery.surgery import Plan, plan_of
from tests.cli.conftest import TINY, TINY_ARGUMENTS, TINY_BASE, Refused, Run

RANDOM = (*TINY, "--no-pretrained")


def test_a_budget_prints_the_trade_off_and_saves_a_model_within_it(run: Run, tmp_path: Path) -> None:
    outcome = run("convert", *RANDOM, "--budget", 0.4)
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    head = next(index for index, line in enumerate(lines) if line.split()[:2] == ["lambda", "weights"])
    chosen = next(line.split() for line in lines[head:] if line.endswith("chosen"))
    assert 0.3 < float(chosen[1].rstrip("%")) / 100 <= 0.4
    assert lines[-1] == "saved in checkpoints/vit_tiny_patch16_224.budget"
    made = plan_of(load(tmp_path / "checkpoints" / "vit_tiny_patch16_224.budget"))
    assert made is not None
    selected = [layer for layer in made.layers if layer.is_replaced or (layer.reason is not None and layer.reason.code == "budget")]
    assert len(selected) == 6
    assert sum(layer.weights_after for layer in selected) <= 0.4 * sum(layer.weights_before for layer in selected)


def test_a_dry_run_gives_the_plan_with_the_trade_off_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    outcome = run("convert", *RANDOM, "--max-error", 0.6, "--dry-run", "--json")
    document = json.loads(outcome.out)
    assert Plan.from_json(document["plan"]).replaced
    assert document["tradeoff"]["chosen"]["error"] <= 0.6
    assert document["tradeoff"]["curve"][-1]["error"] == 0
    assert list(tmp_path.iterdir()) == []


def test_the_report_file_has_the_trade_off_and_the_plot_is_drawn(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    outcome = run("convert", *RANDOM, "--budget", 0.5, "--plot", "curve.svg", "--out", "o")
    assert outcome.code == 0, outcome.err
    assert json.loads((tmp_path / "o" / "report.json").read_text())["tradeoff"]["unit"] == "weights"
    assert "<svg" in (tmp_path / "curve.svg").read_text()


def test_without_matplotlib_one_sentence(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused("convert", *RANDOM, "--budget", 0.5, "--plot", "curve.png", words=("matplotlib", "flysurgery[bench]"), code=2)


def test_a_picture_that_cannot_be_written_is_noticed_before_any_work(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    refused(
        "convert", *RANDOM, "--budget", 0.5, "--plot", "file/curve.png", words=("--plot cannot write file/curve.png", "Not a dir"), code=2
    )
    refused("convert", *RANDOM, "--budget", 0.5, "--plot", "folder.png", words=("--plot takes a file, and folder.png is none",), code=2)


def test_a_budget_with_calibration_says_what_it_chose_and_reported_by(run: Run, tmp_path: Path) -> None:
    outcome = run("convert", *RANDOM, "--budget", 0.4, "--calibrate", "digits", "--samples", 20, "--permute", "--out", "o")
    assert outcome.code == 0, outcome.err
    assert "fitted to 13 samples and chosen by their errors on 3 others" in outcome.out
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    assert report["tradeoff"]["samples"] == {"fitted": 13, "chosen": 3, "reported": 4}
    assert report["tradeoff"]["chosen"]["held_out_error"] > 0
    assert {each["what"] for each in report["permutations"]} == {"heads", "hidden units"}
    assert "in a new order" in outcome.out or "in their own order" in outcome.out


def test_a_fidelity_is_searched_for_and_the_report_has_it(run: Run, refused: Refused, tmp_path: Path) -> None:
    data = ("--calibrate", "digits", "--samples", 30)
    outcome = run("convert", *RANDOM, "--arch", "auto", "--fidelity", 0.95, *data, "--out", "o")
    assert outcome.code == 0, outcome.err
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    assert min(report["fidelity"]["output_cosine"], report["fidelity"]["token_cosine"]) >= 0.95
    assert report["tradeoff"]["search"]["target"] == 0.95
    counts = dict(report["tradeoff"]["families"])
    assert sum(counts.values()) == 6 and sum(row["status"] == "replace" for row in report["rows"]) == 6 - counts.get("dense", 0)
    assert "search by the lowest cosine, to meet 0.95: " in outcome.out
    assert "chosen for the fewest weights at which output and token cosine reach 0.95: " in outcome.out
    far = ("convert", *RANDOM, "--fidelity", 0.999999999999, *data)
    refused(*far, words=("no choice of architectures that was tried reaches a fidelity", "the closest"), code=2)


def test_a_table_of_times_decides_in_milliseconds(run: Run, refused: Refused, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build_base(TINY_BASE, TINY_ARGUMENTS)
    layers = [name for name, _ in model.named_modules() if name.endswith(("attn.qkv", "fc1", "fc2"))]
    fits = {"attn.qkv": "(1,16,16,4),(4,16,16,1)", "mlp.fc1": "(1,64,16,4),(4,16,16,1)", "mlp.fc2": "(1,16,16,4),(4,16,64,1)"}
    rows = [{"fqn": fqn, "architecture": "dense", "ms": 1.0} for fqn in layers]
    rows += [{"fqn": fqn, "architecture": fits[fqn.split(".", 2)[2]], "ms": 0.2 if "qkv" in fqn else 1.5} for fqn in layers]
    (tmp_path / "t.json").write_text(json.dumps({"rows": rows}))
    outcome = run("convert", *RANDOM, "--budget", 0.8, "--latency", "t.json", "--dry-run", "--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert {layer.role for layer in Plan.from_json(document["plan"]).replaced} == {"qkv"}
    assert document["tradeoff"]["unit"] == "ms" and document["tradeoff"]["chosen"]["cost"] <= 0.8 * 6
    refused("convert", *RANDOM, "--budget", 0.5, "--latency", "t.json", words=("smallest reachable share", "0.7333"), code=2)
    (tmp_path / "t.json").write_text(json.dumps(rows[1:]))
    refused("convert", *RANDOM, "--budget", 0.8, "--latency", "t.json", words=("no dense row", "blocks.0.attn.qkv"))
    refused("convert", *RANDOM, "--budget", 0.8, "--latency", "none.csv", words=("none.csv cannot be read",))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--budget", 0.4, "--max-error", 0.1), "give one of them"),
        (("--latency", "t.csv"), "needs a budget"),
        (("--plot", "p.png"), "--budget, --max-error or --fidelity"),
        (("--fidelity", 0.9), "--fidelity needs data to calibrate with"),
        (("--fidelity", 1.5, "--calibrate", "digits"), "above 0 and below 1"),
        (("--fidelity", 0.9, "--budget", 0.4, "--calibrate", "digits"), "give one of them"),
        (("--fidelity", 0.9, "--rank", 8, "--calibrate", "digits"), "--rank"),
        (("--budget", 0.4, "--nblocks", 8), "--nblocks"),
        (("--budget", 0.4, "--arch", "gonon"), "--arch"),
        (("--budget", 1.5), "at most 1"),
        (("--budget", 0.001), "smallest reachable share"),
        (("--max-error", 0), "above 0"),
        (("--budget", 0.4, "--dry-run", "--plot", "p.png"), "--dry-run"),
    ],
)
def test_options_that_contradict_each_other_or_ask_too_much(refused: Refused, options: tuple[object, ...], word: str) -> None:
    refused("convert", *RANDOM, *options, words=(word,), code=2)
