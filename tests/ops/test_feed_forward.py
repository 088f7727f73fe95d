"""Which way a feed-forward block goes: the launches that are told are those that run, whatever the kernels take."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops import (
    Dense,
    FeedForward,
    FusedFactors,
    Gated,
    Norm,
    feed_forward,
    launches,
    reason,
    run,
    way,
    ways,
    wide,
)
from flysurgery.ops.wide import MOMENTS
from flysurgery.patterns import Architecture, monarch

WIDTH, HIDDEN = 32, 64
LAST = "down and scale and residual"
BY_FACTORS = (
    MOMENTS,
    "norm and first factor of up",
    "second factor of up and activation",
    "first factor of down",
    "second factor of down and scale and residual",
)


def factors(architecture: Architecture) -> FusedFactors:
    return FusedFactors(tuple(torch.zeros(pattern.factor_shape) for pattern in architecture), torch.zeros(architecture.out_features))


def operands(kind: str, inner: bool) -> tuple[object, ...]:
    dense = Dense(torch.zeros(HIDDEN, WIDTH))
    up = {"factors": factors(monarch(HIDDEN, WIDTH)), "dense": dense, "gated": Gated((dense, dense))}[kind]
    norm, scale = Norm(torch.ones(WIDTH), None), torch.ones(WIDTH)
    return norm, up, factors(monarch(WIDTH, HIDDEN)), "gelu", scale, True, Norm(None, None) if inner else None


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets kernels take everything of the kinds that are named, on any machine."""

    def take(*kinds: str) -> None:
        monkeypatch.setattr(ways, "_decided", {})
        monkeypatch.setattr(ways, "_obstacle", lambda *_: None)
        answers = {
            "norm_reason": lambda *_: None,
            "epilogue_reason": lambda *_, **fast: None if "epilogue" in kinds else "no epilogue",
            "takes_few_rows": lambda x, group, norm=None, *_: "few rows" in kinds or (norm is None and "some rows" in kinds),
            "whole_reason": lambda *_: None if "whole" in kinds else "not whole",
            "takes_ffn": lambda *_: "by factors" in kinds,
            "in_one_launch": lambda *_: "norm" in kinds,
            "gated_obstacle": lambda *_: None,
            "takes_gated_dense": lambda *_: False,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(feed_forward, name, answer)
        monkeypatch.setattr(launches, "_has_fewest", lambda *_: "few rows" in kinds)

    return take


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that run, in order; each gives zeros."""
    names: list[str] = []
    outputs = {"run_few_rows": None, "run_some_rows": None, "run_fused_linears": None, "run_dense": HIDDEN, "run_ffn": WIDTH}

    def stand_in(name: str, features: int | None) -> Callable[..., Tensor]:
        def run(x: Tensor, *others: object) -> Tensor:
            names.append(name.removeprefix("run_"))
            return x.new_zeros(len(x), features or (HIDDEN if x.shape[1] == WIDTH else WIDTH))

        return run

    for name, features in outputs.items():
        monkeypatch.setattr(launches, name, stand_in(name, features))
    for name in ("run_layer_norm", "run_gated"):
        monkeypatch.setattr(launches, name, lambda x, *_, name=name: names.append(name.removeprefix("run_")) or x)
    monkeypatch.setattr(wide, "run_wide_ffn", stand_in("wide_ffn", WIDTH))
    monkeypatch.setattr(wide, "middle_places", lambda *_: 0)
    return names


@pytest.mark.parametrize(
    ("takes", "block", "told", "runs"),
    [
        (("few rows", "whole"), ("factors", True), ("norm, up and activation", f"inner norm, {LAST}"), ["few_rows", "few_rows"]),
        (
            ("some rows", "whole"),
            ("factors", True),
            ("norm", "up and activation", "inner norm", LAST),
            ["layer_norm", "some_rows", "layer_norm", "some_rows"],
        ),
        (("whole", "by factors"), ("factors", False), ("the whole block",), ["ffn"]),
        (("by factors", "epilogue"), ("factors", False), BY_FACTORS, ["wide_ffn"]),
        (("epilogue", "norm"), ("factors", False), ("norm, up and activation", LAST), ["fused_linears", "fused_linears"]),
        (
            ("epilogue",),
            ("dense", True),
            ("norm", "up and activation", "inner norm", LAST),
            ["layer_norm", "dense", "layer_norm", "fused_linears"],
        ),
        (
            ("epilogue",),
            ("gated", True),
            ("norm", "gate", "value", "their product", "inner norm", LAST),
            ["layer_norm", "gated", "layer_norm", "fused_linears"],
        ),
    ],
    ids=["few rows", "some rows", "whole", "by factors", "norm and layer", "layer by layer", "gated"],
)
def test_what_is_told_is_what_runs(
    kernels: Callable[..., None],
    ran: list[str],
    takes: tuple[str, ...],
    block: tuple[str, bool],
    told: tuple[str, ...],
    runs: list[str],
) -> None:
    kernels(*takes)
    found = way(torch.zeros(3, WIDTH), FeedForward(*operands(*block)))  # type: ignore[arg-type]
    assert found.launches() == told
    assert found.run().shape == (3, WIDTH)
    assert ran == runs


def test_what_no_kernel_takes_says_why(kernels: Callable[..., None]) -> None:
    kernels()
    x, block = torch.zeros(3, WIDTH), operands("factors", False)
    assert reason(x, FeedForward(*block)) == "not whole; no epilogue"  # type: ignore[arg-type]
    with pytest.raises(BackendError, match="not whole; no epilogue"):
        run(x, FeedForward(*block))  # type: ignore[arg-type]


def test_what_is_remembered_holds_no_tensors(kernels: Callable[..., None]) -> None:
    kernels("epilogue")
    block = operands("gated", True)
    x = torch.zeros(3, WIDTH)
    references = [weakref.ref(tensor) for tensor in (x, block[4], *block[2].tensors)]  # type: ignore[attr-defined]
    assert reason(x, FeedForward(*block)) is None  # type: ignore[arg-type]
    del block, x
    gc.collect()
    assert all(reference() is None for reference in references)
