"""What a fused block asks and hands on in a call."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import nn

import flysurgery
from flysurgery import ops
from flysurgery.inference.steps import FeedForward
from flysurgery.ops import composed
from tests.inference.models import SMALL, WHOLE, images, ready
from tests.support.tolerance import assert_equal


def test_moments_of_rows_are_handed_to_the_norm_that_reads_them(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    moments = torch.ones(3)

    def leave(x: torch.Tensor, linear: ops.Linear, residual: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        called.append("moments")
        return composed.linear_residual(x, linear, residual, scale), moments

    def read(x: torch.Tensor, *given: Any) -> ops.Way:
        def run(y: torch.Tensor, x: torch.Tensor, given: Any) -> torch.Tensor:
            called.append("read" if given[7:] and given[7] is moments else "ffn")
            return composed.ffn(x, *given[:7])

        return ops.Way((ops.Stage((ops.MOMENTS, "the rest"), run),), x, given)

    model = ready(timm.create_model("vit_tiny_patch16_224", **SMALL), convert=False)
    x = images(model)
    before = model(x)
    flysurgery.optimize(model)
    monkeypatch.setattr(ops, "ffn_way", read)
    assert_equal(model(x), before)
    assert called == WHOLE  # no kernel leaves moments here
    called.clear()
    monkeypatch.setattr(ops, "leaves_moments", lambda *arguments: True)
    monkeypatch.setattr(ops, "linear_residual_moments", leave)
    assert_equal(model(x), before)
    assert called == ["patch_embedding", *["norm_linear", "attention", "moments", "read"] * 2, "layer_norm"]
    called.clear()
    feed_forward = next(part.then for part in model.get_submodule("blocks.0")._parts)  # pyright: ignore[reportGeneralTypeIssues]
    feed_forward.enabled = False
    assert_equal(model(x), before)
    assert called == ["patch_embedding", *WHOLE[1:4], "norm_linear", "attention", "moments", "read", "layer_norm"]


def test_layers_of_factors_are_not_asked_for_moments(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*arguments: Any) -> bool:
        raise AssertionError("it was asked")

    model = ready(timm.create_model("vit_tiny_patch16_224", **SMALL))
    x = images(model)
    before = model(x)
    flysurgery.optimize(model)
    monkeypatch.setattr(FeedForward, "reads_moments", ask)
    assert_equal(model(x), before)
    assert called == WHOLE


def test_dropouts_behind_attention_cost_no_call_until_they_drop(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = ready(timm.create_model("vit_tiny_patch16_224", **SMALL, proj_drop_rate=0.5))
    x, dropout, asked = images(model), nn.functional.dropout, []
    before = model(x)
    flysurgery.optimize(model)
    monkeypatch.setattr(nn.functional, "dropout", lambda *arguments: asked.append(arguments) or dropout(*arguments))
    assert_equal(model(x), before)
    outside = len(asked)
    model.get_submodule("blocks.0.attn.proj_drop").train()
    assert not torch.equal(model(x), before)
    assert len(asked) > 2 * outside
    model.eval()
    asked.clear()
    assert_equal(model(x), before)
    assert len(asked) == outside <= 2  # those behind the positions and before the head
