"""The modes that a device has, and that dense runs in the one that is stated."""

from __future__ import annotations

import pytest
import torch

from flysurgery.bench import TIMED_MODES, in_mode, modes_of
from flysurgery.errors import OptionError

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), ("fp32", "fp16")), ((8, 0), tuple(TIMED_MODES)), ((10, 0), tuple(TIMED_MODES))]
)
def test_all_are_those_that_the_gpu_computes_in(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert modes_of("all", CUDA) == expected
    if "tf32" not in expected:
        with pytest.raises(OptionError, match=r"there is no mode 'tf32' on cuda; choose from fp32, fp16$"):
            modes_of("fp32,tf32", CUDA)


@pytest.mark.parametrize("mode", TIMED_MODES)
def test_tf32_is_on_in_its_own_mode_alone_and_set_back(mode: str) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        for allowed in (True, False):
            matmul.allow_tf32 = allowed
            with in_mode(mode) as dtype:
                assert (matmul.allow_tf32, dtype) == (mode == "tf32", TIMED_MODES[mode])
            assert matmul.allow_tf32 is allowed
    finally:
        matmul.allow_tf32 = before
