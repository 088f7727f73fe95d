"""Kernels that other processes search for and compile are those that this process would find."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flysurgery.bench import compiled_ahead
from flysurgery.bench.factor import prepared
from flysurgery.gpu import single_choice
from flysurgery.gpu.cubins import cubin_folder
from flysurgery.gpu.single_choice import candidates, remember
from flysurgery.patterns import Pattern

SMALL, LIMIT = Pattern(2, 16, 24, 3), 99 * 1024


def test_cases_keep_their_order_without_cuda() -> None:
    cases = [(SMALL, "fp16"), (Pattern(1, 8, 8, 1), "fp32")]
    assert list(compiled_ahead(cases, 64, torch.device("cpu"))) == cases


def test_a_case_is_prepared_once_for_all_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLYSURGERY_CACHE", str(tmp_path))
    found = prepared((SMALL, "fp16"), rows=64, shared_limit=LIMIT, arch="sm_80")
    assert found and found == candidates(SMALL, "fp16", LIMIT)
    assert any(path.is_file() for path in cubin_folder().rglob("*"))
    monkeypatch.setattr(single_choice, "_found_elsewhere", {})
    candidates.cache_clear()
    remember(SMALL, "fp16", LIMIT, found[:1])
    assert candidates(SMALL, "fp16", LIMIT) == found[:1], "it is not searched for again"
    candidates.cache_clear()
