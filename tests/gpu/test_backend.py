"""What the CUDA backend says that it can run, in which arithmetic, what its operator and launches refuse; no GPU is needed."""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import multiprocessing
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flysurgery.errors import BackendError, PatternError
from flysurgery.gpu import device, factor_product, tensor_map
from flysurgery.gpu import kernel as kernels
from flysurgery.gpu.gradients import check_operands
from flysurgery.gpu.kernel import Kernel
from flysurgery.ops import BACKENDS, Problem, ks_linear
from flysurgery.ops.backend import problem_of
from flysurgery.ops.backends import cuda as cuda_backend
from flysurgery.ops.backends.cuda import CudaBackend
from flysurgery.ops.multiply import ks_linear_group
from flysurgery.patterns import Architecture, monarch
from flysurgery.torch_state import tf32_allowed
from tests.support.composed import Composed
from tests.support.problems import make_factors, make_input, make_vector
from tests.support.tolerance import FP32, assert_bounded, assert_equal

SQUARE = Architecture.of((1, 192, 48, 2), (2, 48, 192, 1))
DEEP = Architecture.of((3, 2, 4, 2), (2, 3, 5, 4), (2, 5, 6, 4))
MONARCH = Architecture.of((1, 96, 96, 4), (4, 96, 96, 1))
HOPPER_SHARED_BYTES = 227 * 1024


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that a Hopper GPU is the current device, and that the CUDA backend comes first."""
    monkeypatch.setattr(cuda_backend, "device_obstacle", lambda: None)
    monkeypatch.setattr(cuda_backend, "shared_limit_of", lambda index: HOPPER_SHARED_BYTES)
    monkeypatch.setattr(factor_product, "shared_limit_of", lambda index: HOPPER_SHARED_BYTES)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    before = dict(BACKENDS)
    BACKENDS.clear()
    BACKENDS.update({"cuda": CudaBackend()} | before)
    yield
    BACKENDS.clear()
    BACKENDS.update(before)


def problem(architecture: Architecture = SQUARE, dtype: torch.dtype = torch.float16, **fields: object) -> Problem:
    return Problem(architecture, dtype=dtype, **{"rows": 25088, "device_type": "cuda", **fields})  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("hopper")
def test_says_what_it_cannot_run_and_which_way_it_goes() -> None:
    backend, one = CudaBackend(), Architecture.of((1, 1024, 1024, 4))
    for architecture, dtype in itertools.product((SQUARE, DEEP, DEEP.transpose, one), (torch.float32, torch.float16, torch.bfloat16)):
        assert backend.can_run(problem(architecture, dtype, requires_grad=True)) is None
    assert "not torch.float64" in str(backend.can_run(problem(dtype=torch.float64)))
    assert "these are on cpu" in str(backend.can_run(problem(device_type="cpu")))
    assert backend.remark(problem()) is None
    assert "has 3" in str(backend.remark(problem(DEEP)))
    assert "(1,1024,1024,4) by PyTorch's product" in str(backend.remark(problem(one)))
    assert backend.remark(problem(one, torch.float32)) is backend.remark(problem(one, rows=1)) is None
    for width, nblocks in ((192, 2), (384, 8), (768, 4), (1280, 8), (1408, 2), (1664, 4)):  # of timm's models
        for sizes in ((width, width), (4 * width, width), (width, 4 * width)):
            assert backend.can_run(problem(monarch(*sizes, nblocks), torch.float32)) is None


@pytest.mark.parametrize(
    ("available", "capability", "said"),
    [
        (False, (9, 0), "no CUDA device"),
        (True, (8, 9), "capability 9.0, such as an H100, Some GPU has 8.9"),
        (True, (10, 0), "Some GPU has 10.0"),
        (True, (9, 0), "NVRTC is not here"),
    ],
)
def test_says_that_a_device_is_missing_or_another_or_has_no_compiler(
    available: bool, capability: tuple[int, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> tuple[int, ...]:
        raise BackendError("NVRTC is not here")

    for name in ("is_initialized", "is_available"):
        monkeypatch.setattr(torch.cuda, name, lambda: available)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(device, "nvrtc_version", missing)
    monkeypatch.setattr(device, "_device_obstacle", functools.cache(device._device_obstacle.__wrapped__))
    assert said in str(CudaBackend().can_run(problem()))
    assert "none" in {state for _, state, _ in device.cuda_facts()}


@pytest.mark.usefixtures("hopper")
def test_linears_that_share_x_are_one_operator_in_compiled_graphs() -> None:
    operators: list[str] = []

    def look(graph: torch.fx.GraphModule, example: object) -> Callable[..., Any]:
        operators.extend(str(node.target) for node in graph.graph.nodes if "flysurgery" in str(node.target))
        return graph.forward

    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 7, SQUARE.in_features, device="cuda")
        linears = [[torch.empty(pattern.factor_shape, device="cuda") for pattern in SQUARE] for _ in range(3)]
        compiled = torch.compile(lambda x: ks_linear_group(x, linears, [None] * 3), fullgraph=True, dynamic=True, backend=look)
        with torch.no_grad():
            assert compiled(x).shape == (2, 7, 3 * SQUARE.out_features)
    assert operators == ["flysurgery.ks_linear"]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("strict", [False, True])
def test_exports_hold_plain_operators_alone(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    described = partial(replace, device_type="cuda")
    multiply = importlib.import_module("flysurgery.ops.multiply")
    monkeypatch.setattr(multiply, "problem_of", lambda *operands: described(problem_of(*operands)))
    factors = nn.ParameterList(make_factors(SQUARE, FP32)).requires_grad_(False)
    layer, x = Composed(lambda self, x: ks_linear(x, tuple(self.factors)), factors=factors), make_input(5, SQUARE.in_features, FP32)
    exported = torch.export.export(layer, (x,), strict=strict)
    assert {str(node.target).split(".")[0] for node in exported.graph.nodes if node.op == "call_function"} <= {"aten"}
    assert_bounded(exported.module()(x), x, tuple(factors), None, FP32)


def test_the_operator_refuses_what_does_not_fit() -> None:
    x, factors, bias = make_input(3, SQUARE.in_features, FP32), make_factors(SQUARE, FP32), make_vector(SQUARE.out_features, FP32)
    check_operands(x, factors, [bias], 1, "fp32")
    check_operands(x, factors * 3, [bias] * 3, 3, "tf32")
    for arguments, said in (
        ((x[:, :-1], factors, [bias], 1, "fp32"), "take rows of 384 features, got x of shape (3, 383)"),
        ((x[0], factors, [bias], 1, "fp32"), "got x of shape (384,)"),
        ((x, factors, [bias[:-1]], 1, "fp32"), "got shapes [(383,)]"),
        ((x, factors, [bias], 3, "fp32"), "2 factors and 1 biases"),
        ((x, [], [], 1, "fp32"), "0 factors"),
        ((x, [*factors, *make_factors(MONARCH, FP32)], [], 2, "fp32"), "of one architecture"),
        ((x, factors, [bias], 1, "fp16"), "mode 'fp16' takes torch.float16, got x of torch.float32"),
        ((x, factors, [bias], 1, "fp8"), "modes fp16, bf16, tf32, fp32, got 'fp8'"),
        ((x, [factor.to("meta") for factor in factors], [bias], 1, "fp32"), "expected all tensors on cpu"),
    ):
        with pytest.raises((BackendError, PatternError), match=re.escape(said)):
            check_operands(*arguments)


def test_a_group_equals_its_parts() -> None:
    x, linears = make_input(5, SQUARE.in_features, FP32), [make_factors(SQUARE, FP32), make_factors(MONARCH, FP32)]
    biases = [make_vector(SQUARE.out_features, FP32), None]
    parts = [ks_linear(x, factors, bias) for factors, bias in zip(linears, biases, strict=True)]
    assert_equal(ks_linear_group(x, linears, biases), torch.cat(parts, dim=-1))


def _answer(setting: str, answers: multiprocessing.Queue[bool]) -> None:
    exec(setting, {"torch": torch})
    answers.put(tf32_allowed())


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ("pass", False),
        ("torch.set_float32_matmul_precision('high')", True),
        ("torch.set_float32_matmul_precision('medium')", True),
        ("torch.backends.cuda.matmul.allow_tf32 = True", True),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", True),
        ("torch.backends.cuda.matmul.fp32_precision = 'ieee'", False),
        ("torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cuda.matmul.fp32_precision = 'ieee'", False),
    ],
)
def test_every_switch_for_tf32_is_read(setting: str, allowed: bool) -> None:
    if "fp32_precision" in setting and not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this PyTorch has no fp32_precision")
    forks = multiprocessing.get_context("fork")  # the old and the new names of the switch cannot be mixed in one process
    answers = forks.Queue()
    process = forks.Process(target=_answer, args=(setting, answers))
    process.start()
    assert answers.get(timeout=60) is allowed
    process.join(60)


def test_compiled_code_follows_the_switch() -> None:
    compiled = torch.compile(lambda x: x + 1 if tf32_allowed() else x, fullgraph=True, backend="eager")
    before = torch.get_float32_matmul_precision()
    found = []
    try:
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            found.append(compiled(torch.zeros(1)).item())
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == [0.0, 1.0, 0.0]


def test_a_wrong_number_of_arguments_is_refused() -> None:
    with pytest.raises(BackendError, match="some takes 2 arguments, got 3"):
        Refused().launch((1, 1, 1), (1, 1, 1), 0, 0, 1, 2, 3)


class Refused(Kernel):
    """Whose launches the driver refuses with these results, one after the other."""

    def __init__(self, *names: str) -> None:
        super().__init__("some", {}, 3)
        self.function, self.words = 0, [1, 1]
        self.results = [SimpleNamespace(name=name) if name else 0 for name in names]
        self._launch_as = lambda *arguments: (self.results.pop(0),)


def test_a_refused_launch_is_told_and_a_missing_context_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(kernels, "make_context_current", made.append)
    config = SimpleNamespace(gridDimX=1, gridDimY=2, gridDimZ=3, blockDimX=4, blockDimY=5, blockDimZ=6, sharedMemBytes=7)
    Refused("CUDA_ERROR_INVALID_CONTEXT", "").queue(config, 0)
    assert made == [3]
    for names in (["CUDA_ERROR_INVALID_VALUE"], ["CUDA_ERROR_INVALID_CONTEXT", "CUDA_ERROR_INVALID_VALUE"]):
        with pytest.raises(BackendError, match=r"some was not launched: CUDA_ERROR_INVALID_VALUE with grid \(1, 2, 3\), .* 7 bytes"):
            Refused(*names).queue(config, 0)


def test_a_map_for_the_copy_engine_is_made_in_a_thread_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    words, made = (ctypes.c_int64 * tensor_map.WORDS)(*range(tensor_map.WORDS)), list[int]()
    driver, refused = MagicMock(), SimpleNamespace(name="CUDA_ERROR_INVALID_CONTEXT")
    driver.cuTensorMapEncodeTiled.side_effect = [(refused, None), (0, SimpleNamespace(getPtr=lambda: ctypes.addressof(words)))]
    monkeypatch.setattr(tensor_map, "cuda_module", lambda name: driver)
    monkeypatch.setattr(tensor_map, "make_context_current", made.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert tensor_map.boxes(torch.zeros(8, 64).half(), 8).words(256) == (*range(tensor_map.WORDS),) and made == [2]


@pytest.mark.gpu
def test_the_first_launch_of_a_thread_may_be_one_by_the_copy_engine() -> None:
    x = torch.zeros(64, 64, dtype=torch.float16, device="cuda")
    with ThreadPoolExecutor(1) as thread:
        assert any(thread.submit(tensor_map.boxes(x, 64).words, x.data_ptr()).result())
