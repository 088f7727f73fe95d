"""The entry point, options and tables: every end of a command is an exit code and at most one line, and bad input changes nothing."""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flysurgery
from flysurgery import surgery
from flysurgery.cli import app
from flysurgery.cli.options import model_arguments
from flysurgery.cli.source import check_available
from flysurgery.errors import ModelError, OptionError, PatternError, SelectionError
from flysurgery.tables import text_table
from tests.cli.conftest import RANDOM, TINY, Refused, Run

SCRIPT = Path(sysconfig.get_path("scripts")) / "flysurgery"

HEAVY = {"torch", "timm", "numpy", "transformers"}
VERBS = ("inspect", "convert", "evaluate", "finetune", "densify", "doctor", "autotune")
MEASUREMENTS = ("multiply", "model")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ((), (*VERBS, "bench")),
        (("bench",), MEASUREMENTS),
        *(((verb, "--help"), ("Usage",)) for verb in VERBS),
        *((("bench", each, "--help"), ("Usage",)) for each in MEASUREMENTS),
    ],
)
def test_help_lists_options_in_named_groups_and_without_types_of_switches(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = run(*command)
    assert (outcome.code, outcome.err) == (0, "") and all(word in outcome.out for word in (*words, "─ Output ─"))
    assert not any(word in outcome.out for word in ("<bool>", "BOOLEAN", "─ Options ─"))
    assert max(map(len, outcome.out.splitlines())) <= 80


@pytest.mark.parametrize(("arguments", "said"), [(["--version"], f"{flysurgery.__version__}\n"), (["bench", "model", "--help"], "Usage")])
def test_help_and_version_import_nothing_heavy(arguments: list[str], said: str) -> None:
    code = f"import sys; from flysurgery.cli import main; main({arguments}); sys.stderr.write(' '.join({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and said in done.stdout


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("transmogrify",), "transmogrify"),
        (("convert",), "MODEL"),
        *((("convert", "x", *given), given[-1]) for given in (("--no-such-option",), ("--nblocks", "many"), ("--arch", "toeplitz"))),
        (("bench", "multiply", "--rounds", "1"), "--rounds"),
    ],
)
def test_usage_errors_are_one_line_and_exit_code_2(run: Run, arguments: tuple[str, ...], word: str) -> None:
    run(*arguments).check_refused(word, code=2)


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
        with pytest.raises(OptionError, match=re.escape(text)):
            model_arguments([text])


ROWS = [("blocks.*.attn.qkv", "12", "0.612", "(1,96,96,4), (4,96,96,1)"), ("blocks.*.mlp.fc1", "2", "0.7", "(1,384,96,4), (4,96,96,1)")]


@pytest.mark.parametrize("width", [120, None, 61, 43, 32])
def test_tables_keep_to_the_width_and_lose_nothing(monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
    monkeypatch.setenv("COLUMNS", str(width)) if width else monkeypatch.delenv("COLUMNS")
    width = width or 80  # without a terminal
    found = text_table(("layer", "n", "worst error", "architecture"), ROWS, right=("n", "worst error")).splitlines()
    assert max(map(len, found)) <= width and found == [line.rstrip() for line in found]
    words = "\n".join(found).replace(";", "").split()
    assert all(word in words for row in ROWS for cell in row for word in cell.split())
    if width > 32:  # else each row is a paragraph
        assert [line.index("0.") + 5 for line in found if "0.612" in line] == [line.index("0.7") + 3 for line in found if "0.7" in line]
        assert all(found[0].index("arch") == line.index("(") for line in found if "(" in line)


VIT_S = "vit_small_patch16_224"


@pytest.fixture
def no_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is refused in a test with this fixture is refused before the expensive work."""

    def too_late(*_: object, **__: object) -> None:
        raise AssertionError("the work began before the check")

    monkeypatch.setattr(surgery, "apply", too_late)


MODELS: list[tuple[tuple[object, ...], int, tuple[str, ...]]] = [
    (("vit_smal_patch16_224",), 1, ("vit_smal_patch16_224", "nearest names", VIT_S)),
    (("models/vit",), 1, ("no file or folder models/vit",)),
    (("vit_pytorch:ViT",), 1, ("--checkpoint FILE", "--no-pretrained")),
    ((*TINY, "--checkpoint", "missing.pt"), 1, ("missing.pt",)),
    ((*TINY, "--base", VIT_S), 2, ("--base",)),
]

OPTIONS: list[tuple[tuple[object, ...], int, tuple[str, ...]]] = [
    (("--model-args", "deppth=3"), 1, ("deppth",)),
    (("--model-args", "depth"), 2, ("key=value", "'depth'")),
    (("--model-args", '{"depth": ' + 700 * "[" + 700 * "]" + "}"), 2, ("--model-args", "more than 32 levels")),
    (("--roles", " , "), 2, ("--roles",)),
    (("--device", "abacus"), 2, ("'abacus'",)),
    (("--evaluate", "no/such/data"), 1, ("no/such/data",)),
    (("--calibrate", "nowhere"), 1, ("there is no data set 'nowhere'",)),
    (("--out", "model.safetensors"), 1, ("model.safetensors is the name of a file", "give a folder, such as", "/model")),
    (("--out", "", "--force"), 1, ("the folder that this runs in",)),
    (("--plot", "p.png"), 2, ("--budget, --fidelity or --measure",)),
    (("--per-layer", "qkv"), 2, ("--per-layer takes REGEX=CHOICE, as in 'qkv.v$=dense', got 'qkv'",)),
    (("--fidelity", 0.9, "--calibrate", "digits", "--dry-run"), 2, ("--dry-run", "leave one out")),
    (("--budget", 0.4, "--dry-run", "--plot", "p.png"), 2, ("--dry-run",)),
    (("--minutes", 1), 2, ("--minutes is the budget of --reconstruct",)),
    *((given, 2, (given[0], "--measure")) for given in (("--batch", 2), ("--optimize",))),
    (("--device", "cpu", "--measure", "--nblocks", 8), 2, ("so nblocks cannot", "measure")),
]


@pytest.mark.usefixtures("no_projection")
@pytest.mark.parametrize(("arguments", "code", "words"), [*MODELS, *(((*RANDOM, *given), code, words) for given, code, words in OPTIONS)])
def test_convert_refuses(refused: Refused, arguments: tuple[object, ...], code: int, words: tuple[str, ...]) -> None:
    refused("convert", "--out", "made/here", *arguments, words=words, code=code)


@pytest.mark.usefixtures("no_projection")
def test_folders_and_pictures_that_cannot_be_written(refused: Refused, converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(converted, "old")
    for verb in (("convert", *RANDOM), ("densify", converted)):
        refused(*verb, "--out", "old", words=("old", "--force"))
    Path("photos").mkdir()
    Path("photos/cat.jpg").write_bytes(b"miaow")
    refused("convert", *RANDOM, "--force", "--out", "photos", words=("photos", "no flysurgery checkpoint"))
    if sys.platform == "linux":  # a folder in which not even root may write
        refused("convert", *RANDOM, "--out", "/sys/made", words=("/sys/made could not be written", "in /sys"))
    plot = ("convert", *RANDOM, "--budget", 0.5, "--plot")
    refused(*plot, "photos/cat.jpg/curve.png", words=("--plot cannot write photos/cat.jpg/curve.png", "Not a dir"), code=2)
    Path("folder.png").mkdir()
    refused(*plot, "folder.png", words=("--plot takes a file, and folder.png is none",), code=2)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(*plot, "curve.png", words=("matplotlib", "flysurgery[bench]"), code=2)


def test_folders_that_are_no_models_for_a_verb(refused: Refused, converted: Path, tmp_path: Path) -> None:
    refused("convert", *RANDOM, "--arch", "kaleidoscope", "--out", "p", words=("layer blocks.0.attn.qkv", "--init random"))
    for verb in ("convert", "inspect"):
        refused(verb, converted, words=("converted already", "densify"))
    (tmp_path / "empty").mkdir()
    for verb in (("convert",), ("inspect",), ("densify", "--out", "o"), ("evaluate", "--data", "digits")):
        refused(*verb, "empty", words=("empty", "config.json"))
    refused("evaluate", "empty", "--data", "digits", "--checkpoint", "empty/config.json", words=("--checkpoint names no file",))
    shutil.copytree(converted, tmp_path / "damaged")
    file = tmp_path / "damaged" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for verb in (("densify", "--out", "o"), ("evaluate", "--data", "digits"), ("finetune", "--data", "digits", "--out", "o")):
        refused(*verb, "damaged", words=("model.safetensors is no safetensors file",))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An address that refuses every connection, and an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("no_network")
def test_without_network_it_says_what_to_do_and_writes_nothing(refused: Refused) -> None:
    refused("convert", VIT_S, "--arch", "monarch", words=(VIT_S, "--checkpoint FILE", "--no-pretrained"))
    refused("convert", "transformers:someone/vit", words=("someone/vit cannot be downloaded: no connection", "--no-pretrained"))


def test_it_says_so_within_seconds_and_without_the_client_s_retries(tmp_path: Path) -> None:
    """A process of its own, because the hub client reads its settings when it is imported."""
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    code = f"import sys; from flysurgery.cli import main; sys.exit(main(['evaluate', '{VIT_S}', '--data', 'digits']))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=40, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "--no-pretrained" in done.stderr, done.stderr


@pytest.mark.usefixtures("no_network")
def test_cached_weights_need_no_network_and_models_without_published_weights_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repo, file: f"/{repo}/{file}")
    check_available(VIT_S)
    name = "vit_small_patch16_36x1_224"
    with pytest.raises(ModelError, match=f"publishes no weights for {name}; .*--checkpoint FILE"):
        check_available(name)
