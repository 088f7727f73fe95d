"""Autotuning: what is timed, what is kept, what is refused."""

from collections.abc import Iterator
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from flysurgery.cli import main
from flysurgery.errors import BackendError
from flysurgery.gpu import autotune as tuning
from flysurgery.gpu import tuned_table
from flysurgery.gpu.autotune import autotune
from flysurgery.gpu.factor_product import run_product
from flysurgery.gpu.fused_linear import fused_kernel
from flysurgery.gpu.tuned_table import TunedCase, user_table
from tests.gpu.conftest import EmulatedProduct
from tests.gpu.gpu_layer import DEEP, SQUARE, Layer, check, rows_of
from tests.gpu.test_autograd import eager, operands

Times = dict[str, float | Exception]


@pytest.fixture
def times(emulated: type[EmulatedProduct], cache: Path, monkeypatch: pytest.MonkeyPatch) -> Times:
    """Times, or errors, of three candidates for every kernel, of which the second is the fastest and the last does not compile."""
    Candidate = make_dataclass("Candidate", [("name", str)], frozen=True)
    times: Times = {"first": 3.0, "second": 2.0, "third": BackendError("does not compile")}

    def timed(case: TunedCase, config: Any, device_index: int) -> float:
        found = times[config.name]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(tuning, "device_obstacle", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    monkeypatch.setattr(tuning, "_configs", lambda case, index: [Candidate(name) for name in times])
    monkeypatch.setattr(tuning, "_median_us", timed)
    return times


def test_each_case_is_timed_once_and_the_fastest_kept(times: Times) -> None:
    x, factors, biases = operands(SQUARE, 1)

    def step() -> None:
        for _ in range(2):
            eager(x, factors, biases, 1).sum().backward()

    found = autotune(step)
    assert {tuned.entry.case.architecture for tuned in found} == {SQUARE, SQUARE.transpose}
    assert len(found) == 2
    for tuned in found:
        assert tuned.entry.config == {"name": "second"} and tuned.entry.median_us == 2.0 and tuned.default_us == 3.0
        assert tuned.tried == 3 and len(tuned.failures) == 1 and "does not compile" in tuned.failures[0]
    assert {entry.case for entry in tuned_table._read(user_table())} == {tuned.entry.case for tuned in found}


@pytest.mark.parametrize(
    ("left", "error", "words"),
    [
        ({"third": BackendError("does not compile")}, BackendError, "no configuration.*does not compile"),
        ({"first": 1.0, "second": RuntimeError("an illegal memory access was encountered")}, RuntimeError, "illegal memory access"),
    ],
)
def test_no_candidate_left_and_errors_on_the_device_are_errors(times: Times, left: Times, error: type[Exception], words: str) -> None:
    times.clear()
    times.update(left)
    x, factors, biases = operands(SQUARE, 1)
    with pytest.raises(error, match=words):
        autotune(lambda: run_product(x, factors, biases, 1, "fp32"))
    assert not user_table().exists()


def test_without_a_device_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "device_obstacle", lambda: "no CUDA device is available")
    with pytest.raises(BackendError, match="nothing can be autotuned here: no CUDA device is available"):
        autotune(lambda: None)


@pytest.fixture
def few(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fewer candidates, as each is compiled."""
    monkeypatch.setattr(tuning, "_MAX_CANDIDATES", 3)
    tuned_table.forget_choices()
    yield
    tuned_table.forget_choices()


@pytest.mark.gpu
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("architecture", [SQUARE, DEEP], ids=str)
def test_tuned_kernels_are_used_and_right(architecture: object) -> None:
    layer, x = Layer(architecture).requires_grad_(False), rows_of(500, architecture=architecture)  # pyright: ignore[reportArgumentType]
    (first, *rest) = autotune(lambda: layer(x))
    assert len(rest) == (0 if architecture is SQUARE else len(DEEP) - 1)
    assert first.tried > 1 and first.entry.median_us > 0
    check(layer(x), layer, x)
    if architecture is SQUARE:
        assert first.entry.config == vars(fused_kernel(SQUARE, first.entry.case.mode, 1, 500, device_index=0).config)
    with pytest.raises(BackendError, match="while a graph is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        autotune(lambda: layer(x))


@pytest.mark.gpu
@pytest.mark.usefixtures("few")
def test_the_verb_tunes_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["autotune", "vit_tiny_patch16_224", "--batch", "2", "--dtype", "float16", "--roles", "ffn"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "fused_linear" in said and str(user_table()) in said
    assert {entry.case.mode for entry in tuned_table._read(user_table())} == {"fp16"}
