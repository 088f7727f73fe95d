"""What a fused block asks and hands on in a call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flysurgery
from flysurgery import ops
from flysurgery.inference.fused_modules import FeedForwardStep
from tests.inference.models import WHOLE, images, small
from tests.support.tolerance import assert_equal


def test_moments_of_rows_are_handed_to_the_norm_that_reads_them(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    moments = torch.ones(3)

    def leave(x: torch.Tensor, operation: ops.LinearResidual) -> tuple[torch.Tensor, torch.Tensor]:
        called.append("moments")
        return operation.plainly(x), moments

    plain = ops.way

    def read(x: torch.Tensor, operation: ops.Operation) -> ops.Way | str:
        def run(y: torch.Tensor, x: torch.Tensor, given: ops.FeedForward) -> torch.Tensor:
            called.append("read" if given.moments is moments else "ffn")
            return given.plainly(x)

        if not isinstance(operation, ops.FeedForward):
            return plain(x, operation)
        return ops.Way((ops.Stage((ops.MOMENTS, "the rest"), run),), x, operation)

    model = small(convert=False)
    x = images(model)
    before = model(x)
    flysurgery.optimize(model)
    monkeypatch.setattr(ops, "way", read)
    assert_equal(model(x), before)
    assert called == WHOLE  # no kernel leaves moments here
    called.clear()
    monkeypatch.setattr(ops, "leaves_moments", lambda *arguments: True)
    monkeypatch.setattr(ops, "run_with_moments", leave)
    assert_equal(model(x), before)
    assert called == ["patch_embedding", *["norm_linear", "attention", "moments", "read"] * 2, "layer_norm"]
    called.clear()
    monkeypatch.setattr(FeedForwardStep, "enabled", False)
    assert_equal(model(x), before)
    assert called == [name for name in WHOLE if name != "ffn"]


def test_layers_of_factors_are_not_asked_for_moments(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    x = images(model)
    before = model(x)
    flysurgery.optimize(model)
    monkeypatch.setattr(FeedForwardStep, "reads_moments", None)
    assert_equal(model(x), before)
    assert called == WHOLE


def test_dropouts_behind_attention_cost_no_call_until_they_drop(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(proj_drop_rate=0.5)
    x, dropout, asked = images(model), nn.functional.dropout, []
    before = model(x)
    flysurgery.optimize(model)
    monkeypatch.setattr(nn.functional, "dropout", lambda *arguments: asked.append(arguments) or dropout(*arguments))
    assert_equal(model(x), before)
    outside = len(asked)
    assert outside <= 2  # those behind the positions and before the head
    model.get_submodule("blocks.0.attn.proj_drop").train()
    assert not torch.equal(model(x), before)
    assert len(asked) > 2 * outside
