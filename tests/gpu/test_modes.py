"""Which arithmetic the kernels use, by dtype and by PyTorch's switches."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from flysurgery.gpu.modes import dtype_of, mode_of
from flysurgery.torch_state import tf32_allowed


@pytest.mark.parametrize(
    ("dtype", "allow_tf32", "mode"),
    [
        (torch.float32, False, "fp32"),
        (torch.float32, True, "tf32"),
        (torch.float16, True, "fp16"),
        (torch.bfloat16, False, "bf16"),
        (torch.float64, False, None),
        (torch.int32, False, None),
    ],
)
def test_modes(dtype: torch.dtype, allow_tf32: bool, mode: str | None) -> None:
    assert mode_of(dtype, allow_tf32=allow_tf32) == mode
    if mode is not None:
        assert dtype_of(mode) == dtype


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
