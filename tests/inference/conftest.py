"""Kernels that take everything, made of PyTorch's operators, so that fused modules can be tested on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flysurgery import ops
from flysurgery.inference import clock
from flysurgery.ops import composed

OPERATORS = ("attention", "ffn", "norm_linear", "linear_residual", "patch_embedding")
FFN_LAUNCHES = ("half of the block", "the other half")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kernels that are always there and faster; the names of those that were called, in order."""
    names: list[str] = []

    def counted(name: str) -> Any:
        def run(*arguments: Any) -> Any:
            names.append(name)
            return getattr(composed, name)(*arguments)

        return run

    for name in OPERATORS:
        monkeypatch.setattr(ops, name, counted(name))
        monkeypatch.setattr(ops, f"{name}_reason", lambda *arguments: None)
    monkeypatch.setattr(ops, "ffn_launches", lambda *arguments: FFN_LAUNCHES)
    monkeypatch.setattr(clock, "medians_ms", lambda ways, inputs, **_: (2.0, 1.0))
    yield names


@pytest.fixture
def compilable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``called``, without the list, which a compiled graph could not hold."""
    for name in OPERATORS:
        monkeypatch.setattr(ops, name, getattr(composed, name))
        monkeypatch.setattr(ops, f"{name}_reason", lambda *arguments: None)
    monkeypatch.setattr(clock, "medians_ms", lambda ways, inputs, **_: (2.0, 1.0))
