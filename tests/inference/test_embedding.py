"""Patches with their position and the tokens before them: where they are proven, what is left, and that every call stays right."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from timm.models._features import FeatureGetterNet
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import flysurgery
from flysurgery import ops
from flysurgery.inference.standin import StandIn
from flysurgery.ops import Way
from tests.inference.models import check_fused, images, small
from tests.support.tolerance import assert_equal

pytestmark = pytest.mark.usefixtures("all_tokens")

Given = tuple[bool, int]
"""Whether a kernel was given a position, and how many parameters before the patches."""
ALONE, ALL = (False, 0), (True, 1)


@pytest.fixture
def given(called: list[str], monkeypatch: pytest.MonkeyPatch) -> list[Given]:
    """What the patches' kernel, which is always there and faster, was given in each call."""
    seen, plain = list[Given](), ops.way

    def noting(x: Tensor, operation: ops.Operation) -> Way | str:
        if isinstance(operation, ops.PatchEmbedding):
            seen.append((operation.position is not None, len(operation.prefix)))
        return plain(x, operation)

    monkeypatch.setattr(ops, "way", noting)
    return seen


vit = partial(small, convert=False)


def rows_of(report: Any) -> dict[str, str]:
    """The patches' rows of a report: the reason's code, or "fused"."""
    return {row.fqn: row.reason.code if row.reason else row.status for row in report.rows if row.group == "patches"}


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("vit_tiny_patch16_224", {}, (True, 1)),
        ("vit_tiny_patch16_224", {"pos_embed": "none"}, (False, 1)),
        ("vit_tiny_patch16_224", {"reg_tokens": 4, "no_embed_class": True, "pre_norm": True}, (True, 2)),
        ("deit_tiny_distilled_patch16_224", {}, (True, 2)),
        ("vit_base_patch16_siglip_224", {}, (True, 0)),
    ],
)
def test_position_and_tokens_are_found(called: list[str], given: list[Given], name: str, options: dict[str, Any], expected: Given) -> None:
    model = vit(name, **options)
    report = check_fused(model, images(model, 3), called)
    assert rows_of(report) == {"patch_embed": "fused", "patch_embed.proj": "fused"}
    assert given[-1] == expected
    assert "forward_features" not in vars(model) and not flysurgery.inference.is_optimized(model)


class Scaled(VisionTransformer):
    """Reads its patches beside the method."""

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        patches = self.patch_embed(x)
        return self.norm(self.blocks(self._pos_embed(patches))) * patches.mean()


class Turned(VisionTransformer):
    """Numbers its patches from the last."""

    def _pos_embed(self, x: Tensor) -> Tensor:
        return super()._pos_embed(x.flip(1))


class Down(VisionTransformer):
    """Numbers its patches down first."""

    def _pos_embed(self, x: Tensor) -> Tensor:
        return super()._pos_embed(x.unflatten(1, (4, 4)).transpose(1, 2).flatten(1, 2))


@pytest.mark.parametrize(
    ("kind", "options", "rows"),
    [
        (Scaled, {}, {"patch_embed.proj": "fused", "_pos_embed": "shared"}),
        (Turned, {}, {"patch_embed.proj": "fused", "_pos_embed": "more"}),
        (Down, {}, {"patch_embed.proj": "fused", "_pos_embed": "order"}),
        (VisionTransformer, {"dynamic_img_size": True}, {"patch_embed.proj": "fused", "_pos_embed": "no-position"}),
    ],
)
def test_what_does_something_else_as_well_is_left(
    called: list[str], given: list[Given], kind: type[nn.Module], options: dict[str, Any], rows: dict[str, str]
) -> None:
    model = vit(**options)
    model.__class__ = kind
    assert rows_of(check_fused(model, images(model), called)) == rows
    assert given[-1] == ALONE


def test_images_of_another_size_go_to_the_own_method(given: list[Given]) -> None:
    """Without a position the model takes any; 8x2 patches of 8x8 pixels are as many as those of the trace."""
    model = vit(pos_embed="none")
    model.patch_embed.strict_img_size = False  # pyright: ignore
    x = torch.randn(2, 3, 64, 16)
    before = model(x)
    flysurgery.optimize(model)
    given.clear()
    assert_equal(model(x), before)
    assert given == [ALONE]


def test_position_and_tokens_are_those_of_now(given: list[Given]) -> None:
    model = vit()
    x = images(model)
    flysurgery.optimize(model)
    plain = copy.deepcopy(model)
    flysurgery.restore(plain)
    for each in (model, plain):
        each.pos_embed.mul_(0.5)  # pyright: ignore[reportCallIssue]
        each.cls_token = nn.Parameter(torch.ones(1, 1, 48), requires_grad=False)
    assert_equal(model(x), plain(x))
    assert_equal(model.bfloat16()(x.bfloat16()), plain.bfloat16()(x.bfloat16()))


def test_inside_of_another_model(called: list[str], given: list[Given]) -> None:
    model = FeatureGetterNet(vit(), out_indices=(0, 1))
    report = check_fused(model, torch.randn(2, 3, 32, 32), called, keep=True)
    assert given[-1] == ALL
    assert report.restore() == 4
    assert not any(isinstance(module, StandIn) for module in model.modules())
