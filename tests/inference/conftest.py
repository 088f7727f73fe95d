"""Kernels that take everything, made of PyTorch's operators, so that fused modules can be tested on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from flysurgery import ops
from flysurgery.inference import clock
from flysurgery.ops import Stage, Way, composed

OPERATORS = ("attention", "ffn", "layer_norm", "norm_linear", "linear_residual", "patch_embedding")
FFN_LAUNCHES = ("half of the block", "the other half")


def way(name: str, *arguments: Any) -> Way:
    """The way of an operator that is composed of PyTorch's."""
    composes = Stage(FFN_LAUNCHES if name == "ffn" else (), lambda y, x, given: getattr(composed, name)(x, *given))
    return Way((composes,), arguments[0], ops.Patches(*arguments[1:]) if name == "patch_embedding" else arguments[1:])


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kernels that are always there and faster; the names of those that were called, in order."""
    names: list[str] = []

    def counted(name: str) -> Any:
        def run(y: Tensor, x: Tensor, given: Any) -> Tensor:
            names.append(name)
            return y

        def noting(*arguments: Any) -> Way:
            found = way(name, *arguments)
            return found._replace(stages=(Stage((), run), *found.stages))

        return noting

    for name in OPERATORS:
        monkeypatch.setattr(ops, f"{name}_way", counted(name))
    monkeypatch.setattr(clock, "medians_ms", lambda ways, inputs, **_: (2.0, 1.0))
    yield names


@pytest.fixture
def compilable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``called``, without the list, which a compiled graph could not hold."""
    for name in OPERATORS:
        monkeypatch.setattr(ops, f"{name}_way", partial(way, name))
    monkeypatch.setattr(clock, "medians_ms", lambda ways, inputs, **_: (2.0, 1.0))
