"""The entry point, the text forms of options, tables and advice: every end of a command is an exit code and at most one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flysurgery
from flysurgery.cli import app
from flysurgery.cli.options import model_arguments
from flysurgery.cli.tables import print_json, print_table
from flysurgery.errors import OptionError, PatternError, SelectionError
from tests.cli.conftest import RANDOM, TINY, Run, snapshot

SCRIPT = Path(sysconfig.get_path("scripts")) / "flysurgery"

HEAVY = {"torch", "timm", "numpy", "transformers"}
VERBS = ("inspect", "convert", "evaluate", "finetune", "densify", "doctor", "autotune")
MEASUREMENTS = ("multiply", "model")


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ((), (*VERBS, "bench")),
        (("bench",), MEASUREMENTS),
        *(((verb, "--help"), ("Usage",)) for verb in VERBS),
        *((("bench", each, "--help"), ("Usage",)) for each in MEASUREMENTS),
    ],
)
def test_help_lists_options_in_named_groups_and_without_types_of_switches(
    run: Run, monkeypatch: pytest.MonkeyPatch, verb: tuple[str, ...], words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = run(*verb)
    assert (outcome.code, outcome.err) == (0, "") and all(word in outcome.out for word in words)
    assert "<bool>" not in outcome.out and "BOOLEAN" not in outcome.out
    assert "─ Options ─" not in outcome.out and "─ Output ─" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80


@pytest.mark.parametrize(("arguments", "said"), [(["--version"], f"{flysurgery.__version__}\n"), (["bench", "model", "--help"], "Usage")])
def test_help_and_version_import_nothing_heavy(arguments: list[str], said: str) -> None:
    code = f"import sys; from flysurgery.cli import main; main({arguments}); sys.stderr.write(' '.join({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and said in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("transmogrify",), ("transmogrify",)),
        (("convert",), ("MODEL",)),
        (("convert", "x", "--no-such-option"), ("--no-such-option",)),
        (("convert", "x", "--nblocks", "many"), ("--nblocks", "many")),
        (("convert", "x", "--arch", "toeplitz"), ("--arch", "toeplitz")),
        (("bench", "multiply", "--rounds", "1"), ("--rounds", "1")),
    ],
)
def test_usage_errors_are_one_line_and_exit_code_2(run: Run, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    run(*arguments).check_refused(*words, code=2)


def raising(error: BaseException) -> Callable[..., None]:
    """What stands in for a command, or a part of one, that ends so."""

    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


TOO_LARGE = "this does not fit into the memory of the GPU"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (PatternError("sizes\ndiffer"), 1, "sizes differ"),
        (SelectionError("nothing matched"), 2, "nothing matched"),
        (PatternError("x" * 5000 + "!"), 1, "x" * 295 + " ... " + "x" * 99 + "!"),
        (OSError(28, "No space left on device", "model.safetensors"), 1, "No space left on device: model.safetensors"),
        (torch.OutOfMemoryError("CUDA out of memory.\nmore"), 1, f"{TOO_LARGE}; take fewer images or rows, or a smaller model"),
    ],
)
def test_errors_become_one_line_and_exit_codes(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, text: str) -> None:
    monkeypatch.setattr(app, "app", raising(error))
    run("doctor").check_refused(f"flysurgery: {text}\n", code=code)


def test_an_interruption_is_quiet_and_an_error_that_nobody_meant_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flysurgery.cli.tables.show", raising(KeyboardInterrupt()))
    outcome = run("doctor")
    assert (outcome.code, outcome.out, outcome.err.strip()) == (130, "", "")
    for error in (ZeroDivisionError("a bug"), RuntimeError("a bug")):
        monkeypatch.setattr(app, "app", raising(error))
        with pytest.raises(type(error), match="a bug"):
            run("doctor")


def test_a_process_of_its_own_whose_reader_goes_away_is_no_noise() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([SCRIPT, "--version"], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_process_of_its_own_that_is_refused(tmp_path: Path) -> None:
    """The whole way once: the installed command, its streams, its exit code."""
    command = [SCRIPT, "bench", "multiply", "--rounds", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("flysurgery: ") and done.stderr.count("\n") == 1, done.stderr
    assert snapshot(tmp_path) == {}


SLOW = """
import signal, sys, time, types
sys.path.insert(0, {root!r})
class Slow:
    def find_spec(self, name, *rest):
        if name == "flysurgery":
            print("importing", flush=True)
            try:
                time.sleep(60)
            except BaseException:
                pass
sys.meta_path.insert(0, Slow())
import flysurgery_command
sys.exit(flysurgery_command.main())
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows sends no SIGINT to one process")
def test_an_interruption_during_the_import_ends_it_in_silence() -> None:
    code = SLOW.format(root=str(Path(flysurgery.__file__).parents[1]))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == -signal.SIGINT
        assert process.stderr.read() == ""


def test_model_arguments_mix_json_and_pairs_and_the_last_one_wins() -> None:
    texts = ['{"depth": 2, "act": "gelu"}', "depth=3", "img_size=[32, 32]", "qkv_bias=true", "act=silu=x"]
    assert model_arguments(texts) == {"depth": 3, "act": "silu=x", "img_size": [32, 32], "qkv_bias": True}
    assert model_arguments(None) == {}
    for text in ("depth", "{depth: 2}", '{"depth": 2', "1x=2", "=3", "[1]"):
        with pytest.raises(OptionError) as caught:
            model_arguments([text])
        assert text in str(caught.value)


COLUMNS = ("layer", "n", "worst error", "architecture")
ROWS = [("blocks.*.attn.qkv", "12", "0.612", "(1,96,96,4), (4,96,96,1)"), ("blocks.*.mlp.fc1", "2", "0.7", "(1,384,96,4), (4,96,96,1)")]


@pytest.mark.parametrize(("width", "lines"), [(120, 3), (61, 3), (43, 6), (32, 8)])
def test_tables_keep_to_the_width_and_lose_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, lines: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(COLUMNS, ROWS, right=("n", "worst error"))
    found = capsys.readouterr().out.splitlines()
    assert len(found) == lines and max(map(len, found)) <= width and found == [line.rstrip() for line in found]
    words = "\n".join(found).replace(";", "").split()
    assert all(word in words for row in ROWS for cell in row for word in cell.split())
    if lines < 8:  # else each row is a paragraph
        assert [line.index("0.") + 5 for line in found if "0.612" in line] == [line.index("0.7") + 3 for line in found if "0.7" in line]
        assert all(found[0].index("arch") == line.index("(") for line in found if "(" in line)


TABLES = (("inspect", *TINY), ("doctor",), ("convert", *RANDOM, "--budget", 0.4, "--dry-run"))


@pytest.mark.parametrize("command", TABLES, ids=lambda command: command[0])
def test_without_a_terminal_tables_have_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[object, ...]) -> None:
    monkeypatch.delenv("COLUMNS")
    lines = run(*command).out.splitlines()
    tables = [line for line in lines if "   " in line]  # sentences have as many words as they need
    assert tables and max(map(len, tables)) <= 80 and not any("…" in line for line in lines)


def test_json_refuses_what_json_has_not() -> None:
    with pytest.raises(ValueError, match="JSON"):
        print_json({"a": float("nan")})
