"""The entry point: every end of a command is an exit code and at most one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import flysurgery
from flysurgery.cli import app
from flysurgery.errors import PatternError, SelectionError
from tests.cli.conftest import Run

SCRIPT = Path(sysconfig.get_path("scripts")) / "flysurgery"
VERBS = ("inspect", "convert", "evaluate", "densify", "doctor", "autotune", "bench")


def test_help_names_every_verb(run: Run) -> None:
    outcome = run("--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert all(verb in outcome.out for verb in VERBS)


@pytest.mark.parametrize(("verb", "word"), [((), "convert"), (("bench",), "multiply")])
def test_no_verb_prints_the_help(run: Run, verb: tuple[str, ...], word: str) -> None:
    outcome = run(*verb)
    assert (outcome.code, outcome.err) == (0, "")
    assert word in outcome.out


def test_version(run: Run) -> None:
    assert run("--version").out.strip() == flysurgery.__version__


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("transmogrify",), "transmogrify"),
        (("convert",), "MODEL"),
        (("convert", "x", "--no-such-option"), "--no-such-option"),
        (("convert", "x", "--nblocks", "many"), "--nblocks"),
        (("convert", "x", "--arch", "toeplitz"), "toeplitz"),
    ],
)
def test_usage_errors_are_one_line_and_exit_code_2(run: Run, arguments: tuple[str, ...], word: str) -> None:
    run(*arguments).check_refused(word, code=2)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (PatternError("sizes\ndiffer"), 1, "sizes differ"),
        (SelectionError("nothing matched"), 2, "nothing matched"),
        (OSError(28, "No space left on device", "model.safetensors"), 1, "No space left on device: model.safetensors"),
        (PermissionError(13, "Permission denied", "out"), 1, "Permission denied: out"),
    ],
)
def test_errors_become_one_line_and_their_exit_code(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, text: str
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(app, "app", fail)
    outcome = run("doctor")
    outcome.check_refused(code=code)
    assert outcome.err == f"flysurgery: {text}\n"


def test_an_error_that_nobody_meant_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(app, "app", fail)
    with pytest.raises(ZeroDivisionError):
        run("doctor")


def test_interruption_is_quiet_and_exit_code_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flysurgery.cli.doctor.print_table", interrupt)
    outcome = run("doctor")
    assert (outcome.code, outcome.out, outcome.err.strip()) == (130, "", "")


def test_a_reader_that_goes_away_is_no_noise() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([SCRIPT, "--version"], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_long_message_is_cut(run: Run) -> None:
    error = run("inspect", "x" * 5000).err
    assert len(error) <= len("flysurgery: \n") + 400 and error.endswith(" ...\n")


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
