"""Converting on the command line: under a budget, by times measured with a clock of our own, and in two processes."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flysurgery.checkpoint import load
from flysurgery.cli.processes import device_of_process
from flysurgery.errors import OptionError
from flysurgery.inference import clock
from flysurgery.layers import ButterflyLinear
from flysurgery.patterns import Architecture, monarch
from flysurgery.surgery import Plan, convert, plan_of
from tests.checkpoint.conftest import snapshot
from tests.cli.conftest import RANDOM, TINY, TINY_ARGUMENTS, Document, Refused, Run
from tests.support.models import VIT, vit
from tests.support.processes import two_processes


def test_a_dry_run_prints_the_plan_and_leaves_nothing(run: Run, document: Document, tmp_path: Path) -> None:
    outcome = run("convert", *TINY, "--dry-run")
    assert (outcome.code, outcome.err) == (0, "")
    lines = {line.split()[0]: line.split() for line in outcome.out.splitlines() if line.strip()}
    assert lines["blocks.*.attn.qkv"][1:4] == ["2", "qkv", "192x64"] and lines["head"][1] == "1"
    chosen = ("--include", r"mlp\.fc", "--exclude", r"blocks\.0", "--exclude", "fc2", "--patterns", "(1,64,16,4),(4,16,16,1)")
    plan = Plan.from_json(document("convert", *TINY, "--dry-run", *chosen)["plan"])
    assert [(layer.fqn, layer.architecture) for layer in plan.replaced] == [("blocks.1.mlp.fc1", "(1,64,16,4),(4,16,16,1)")]
    assert plan.base == VIT and plan.base_args == TINY_ARGUMENTS
    named = ("--per-layer", "qkv.v$=dense", "--per-layer", "qkv.[qk]$=monarch:8")
    plan = Plan.from_json(document("convert", *TINY, "--dry-run", *named)["plan"])
    assert [part.architecture for part in plan.replaced[0].parts] == [monarch(64, 64, 8), monarch(64, 64, 8), None]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arch", "given", "options"),
    [
        ("lowrank", ("--rank", 4, "--roles", "ffn"), {"rank": 4, "roles": "ffn"}),
        ("deformable", ("--nblocks", 8), {"nblocks": 8}),
        ("kaleidoscope", ("--init", "random"), {"init": "random"}),
    ],
)
def test_the_default_folder_holds_the_model_that_the_library_converts(
    document: Document, tmp_path: Path, arch: str, given: tuple[object, ...], options: dict[str, Any]
) -> None:
    found = document("convert", *RANDOM, "--seed", 0, "--arch", arch, *given)
    assert (found["folder"], found["accuracy"]) == (f"checkpoints/vit_tiny_patch16_224.{arch}", None)
    expected = vit(**TINY_ARGUMENTS)
    report = convert(expected, arch, **options)
    assert [row["relative_error"] for row in found["rows"]] == [row.relative_error for row in report.rows]
    folder, images = tmp_path / found["folder"], torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(load(folder)(images), expected(images))


def test_weights_come_from_a_checkpoint_file_and_force_replaces_the_folder(run: Run, tmp_path: Path) -> None:
    dense = vit(**TINY_ARGUMENTS)
    torch.save(dense.state_dict(), tmp_path / "weights.pt")
    assert run("convert", *TINY, "--checkpoint", "weights.pt", "--out", "a").code == 0
    first = load("a").state_dict()
    assert torch.equal(first["blocks.0.attn.proj.weight"], dense.state_dict()["blocks.0.attn.proj.weight"])
    assert run("convert", *RANDOM, "--seed", 2, "--out", "a", "--force").code == 0
    before = snapshot(tmp_path)
    assert run("convert", "weights.pt", "--base", *TINY, "--out", "a", "--force").code == 0
    after, second = snapshot(tmp_path), load("a").state_dict()
    assert before.keys() == after.keys() and before["a/model.safetensors"] != after["a/model.safetensors"]
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_calibration_says_its_errors_and_the_images_that_it_left_out(run: Run, refused: Refused, images: Path) -> None:
    (images / "03.png").write_text("broken")
    outcome = run("convert", *RANDOM, "--calibrate", images, "--sequential", "--out", "o")
    assert outcome.code == 0
    assert outcome.err == f"flysurgery: 1 images in {images} cannot be read and are left out: 03.png\n"
    assert f"calibrated with 11 samples of {images}, of which 2 were held out" in outcome.out
    report = json.loads(Path("o/report.json").read_text())
    rows = [row["calibration"] for row in report["rows"] if row["status"] == "replace"]
    assert all(0 < row["output_error"] < row["plain_output_error"] for row in rows)
    assert report["calibration"]["sequential"] is True and report["calibration"]["skipped"] == ["03.png"]
    load("o")
    refused("convert", *RANDOM, "--out", "p", "--calibrate", images, "--samples", 13, words=("13 samples are needed, and only 11",))


def test_a_budget_prints_the_trade_off_draws_it_and_saves_a_model_within_it(run: Run) -> None:
    pytest.importorskip("matplotlib")
    fit = ("--calibrate", "digits", "--samples", 20, "--permute")
    outcome = run("convert", *RANDOM, "--budget", 0.4, *fit, "--plot", "curve.svg")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    chosen = next(line.split() for line in lines if line.endswith("chosen"))
    assert 0.3 < float(chosen[1].rstrip("%")) / 100 <= 0.4
    folder = Path("checkpoints/vit_tiny_patch16_224.chosen")
    assert lines[-1] == f"saved in {folder}" and "<svg" in Path("curve.svg").read_text()
    report = json.loads((folder / "report.json").read_text())
    assert report["tradeoff"]["judged_on"] == 3 and {each["what"] for each in report["permutations"]} == {"heads", "hidden units"}
    selected = [layer for layer in plan_of(load(folder)).layers if layer.is_replaced or layer.reason.code == "budget"]
    assert len(selected) == 6 and sum(layer.weights_after for layer in selected) <= 0.4 * sum(layer.weights_before for layer in selected)


def test_a_fidelity_is_reached_with_fewer_weights(document: Document) -> None:
    found = document("convert", *RANDOM, "--fidelity", 0.9, "--calibrate", "digits", "--samples", 20, "--out", "close")
    assert min(found["fidelity"]["output_cosine"], found["fidelity"]["token_cosine"] or 1) >= 0.9
    assert found["tradeoff"]["chosen"]["share"] < 0.95


MEASURE = (*RANDOM, "--device", "cpu", "--measure")


def is_monarch_4(architecture: Architecture) -> bool:
    return architecture == monarch(*architecture.shape, 4)


@pytest.fixture
def fast_monarchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which Monarch products of 4 blocks take half of dense's time, all others twice, and whole models what they like."""

    def ms(way: Any) -> float:
        owner: nn.Module = getattr(way, "__self__", way)
        first = next((each for each in owner.modules() if isinstance(each, ButterflyLinear)), None)
        if first is None:
            return 1.0
        if hasattr(owner, "blocks"):
            return 0.9
        return 0.5 if is_monarch_4(first.architecture) else 2.0

    monkeypatch.setattr(clock, "medians_ms", lambda ways, inputs, **_: tuple(ms(way) for way in ways))


@pytest.mark.usefixtures("fast_monarchs")
def test_the_times_that_it_chose_by_are_printed_and_kept(run: Run) -> None:
    outcome = run("convert", *MEASURE, "--batch", 3, "--dtype", "bfloat16")
    lines = [line.split() for line in outcome.out.splitlines()]
    assert ["blocks.*.attn.qkv", "2", "dense", "1", "1.00"] in lines and ["monarch", "4", "0.5", "0.50", "2"] in lines
    assert "batch 3 in bfloat16 on cpu, the whole model: dense 1 ms, converted 0.9 ms" in outcome.out
    folder = Path("checkpoints/vit_tiny_patch16_224.chosen")
    measurement = json.loads((folder / "report.json").read_text())["measurement"]
    assert measurement["batch"] == 3 and set(measurement["chosen"]) == {"monarch 4"}
    assert "one forward took 1 ms dense and 0.9 ms with these" in (folder / "README.md").read_text()
    made = load(folder)
    assert all(is_monarch_4(part.architecture) for each in plan_of(made).replaced for part in each.parts)
    assert {parameter.dtype for parameter in made.parameters()} == {torch.bfloat16}


@pytest.mark.usefixtures("fast_monarchs")
def test_a_dry_run_measures_and_nothing_is_written_where_nothing_is_faster(
    document: Document, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = document("convert", *MEASURE, "--budget", 0.8, "--optimize", "--dry-run")
    assert [len(group["fqns"]) for group in found["measurement"]["groups"]] == [1, 2, 1, 2]
    assert found["measurement"]["dense_optimized_ms"] is not None and found["tradeoff"]["unit"] == "ms"
    assert 0.5 <= found["tradeoff"]["chosen"]["share"] <= 0.8 and Plan.from_json(found["plan"]).replaced
    refused("convert", *MEASURE, "--budget", 0.4, words=("smallest reachable share", "0.5000"), code=2)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(clock, "medians_ms", lambda ways, inputs, **_: (1.0, 1.0, *[1.5] * (len(ways) - 2)))
    nearest = "1.5 ms beside 1 ms (+50.0%, and less than -2.0% would count as faster)"
    refused("convert", *MEASURE, words=("nothing would be replaced", "comes nearest", nearest))


PROGRAM = """
import os, signal, sys
from flysurgery.cli import main
from flysurgery.errors import DataError
from flysurgery.fidelity import reconstruction
how, measure, calls = sys.argv[1], reconstruction.measure_fidelity, []
def fails(*arguments):
    calls.append(arguments)
    if len(calls) == 3 and os.environ["RANK"] == "1":
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise DataError("this process has bad luck")
    return measure(*arguments)
reconstruction.affordable = lambda *_: 4
if how != "well":
    reconstruction.measure_fidelity = fails
sys.exit(main(sys.argv[2:]))
"""

FIT = ("convert", *RANDOM, "--device", "cpu", "--out", "o", "--calibrate", "images", "--minutes", 60, "--reconstruct")


def told(stderr: str) -> list[str]:
    """What the command itself said there."""
    return [line for line in stderr.splitlines() if line.startswith("flysurgery: ")]


def test_two_processes_make_one_folder_and_one_report(images: Path, tmp_path: Path) -> None:
    (images / "broken.png").write_text("no image")
    first, second = two_processes(tmp_path, PROGRAM, "well", *FIT, "--json")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    found = json.loads(first.stdout)["reconstruction"]
    assert found["updates"] == 4 and found["after"]["relative_error"] <= found["before"]["relative_error"]
    assert second.stdout == ""
    assert told(first.stderr + second.stderr) == ["flysurgery: 1 images in images cannot be read and are left out: broken.png"]
    assert {path.name for path in tmp_path.iterdir()} == {"images", "o", "program.py"}
    load(tmp_path / "o")


@pytest.mark.usefixtures("images")
@pytest.mark.parametrize("how", ["unlucky", "killed"])
def test_where_one_fails_both_end_and_nothing_is_written(how: str, tmp_path: Path) -> None:
    first, second = two_processes(tmp_path, PROGRAM, how, *FIT)
    assert first.stdout == second.stdout == "" and {path.name for path in tmp_path.iterdir()} == {"images", "program.py"}
    said = told(first.stderr + second.stderr)
    assert first.returncode == 1 and len(said) == 1, said
    if how == "killed":
        assert second.returncode == -signal.SIGKILL and "another process of this run has ended" in said[0]
    else:
        assert second.returncode == 1 and said[0].startswith("flysurgery: this process has bad luck")


def test_each_process_has_a_gpu_of_its_own_and_work_to_share(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr("flysurgery.cli.processes._are_several", lambda: True)
    work = "several processes share the work of --reconstruct only"
    refused("convert", *RANDOM, "--device", "cpu", "--out", "o", words=(work,), code=2)
    monkeypatch.setattr("flysurgery.cli.options.device_of", lambda text: torch.device(text or "cuda"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device_of_process(None) == device_of_process("cuda") == torch.device("cuda", 1) and taken == [1, 1]
    assert device_of_process("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "2")
    for device, words in (("cuda:0", "a GPU of its own, got --device cuda:0"), (None, "has 2; start no more processes than that")):
        with pytest.raises(OptionError, match=words):
            device_of_process(device)
