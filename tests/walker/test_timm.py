"""Roles in timm's models, against truth written down from reading their code. Tiny depths and widths; no weights are fetched."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.layers import set_fused_attn
from timm.models.vision_transformer import ParallelScalingBlock
from torch import nn

from flysurgery.walker import Slice, Target, walk
from tests.walker.toys import named

QKV = ("attn.qkv", "qkv")
PROJ = ("attn.proj", "attn_out")
FC1, FC2 = ("mlp.fc1", "ffn_in"), ("mlp.fc2", "ffn_out")
PLAIN = (QKV, PROJ, FC1, FC2)


def build(name: str, **options: object) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, **options)  # pyright: ignore[reportArgumentType]


def walked(name: str, **options: object) -> tuple[dict[str, Target], dict[str, str], dict[str, tuple[str, ...]]]:
    """The targets, their roles, and the codes of their obstacles."""
    targets = named(build(name, **options))
    found = {fqn: tuple(o.code for o in target.obstacles) for fqn, target in targets.items() if target.obstacles}
    return targets, {fqn: target.role for fqn, target in targets.items()}, found


def blocks(count: int, *layers: tuple[str, str], prefix: str = "blocks") -> dict[str, str]:
    return {f"{prefix}.{i}.{name}": role for i in range(count) for name, role in layers}


def thirds(width: int) -> tuple[Slice, ...]:
    return (Slice("q", 0, width), Slice("k", width, 2 * width), Slice("v", 2 * width, 3 * width))


def test_vit() -> None:
    targets, roles, codes = walked("vit_tiny_patch16_224", depth=2, img_size=32)
    assert roles == {**blocks(2, *PLAIN), "head": "head"}
    assert codes == {"head": ("head",)}
    rows = 2 * (2 * 2 + 1)  # batch, patches and class token
    qkv, fc2 = targets["blocks.1.attn.qkv"], targets["blocks.1.mlp.fc2"]
    assert (qkv.in_features, qkv.out_features, qkv.bias, qkv.rows, qkv.split) == (192, 576, True, rows, thirds(192))
    assert (fc2.in_features, fc2.out_features, fc2.rows, fc2.split) == (768, 192, rows, None)
    assert targets["head"].rows == 2
    assert not any(target.switches or target.aliases or target.blocked for target in targets.values())


def test_vit_of_parallel_branches() -> None:
    targets, roles, _ = walked("vit_tiny_patch16_224", depth=1, img_size=32, block_fn=ParallelScalingBlock)
    layers = (("in_proj", "qkv"), ("attn_out_proj", "attn_out"), ("mlp_out_proj", "ffn_out"))
    assert roles == {**blocks(1, *layers), "head": "head"}
    split = (Slice("ffn", 0, 768), Slice("q", 768, 960), Slice("k", 960, 1152), Slice("v", 1152, 1344))
    assert targets["blocks.0.in_proj"].split == split

    joined, roles, _ = walked("vit_tiny_patch16_224", depth=1, img_size=32, block_fn=partial(ParallelScalingBlock, fuse_out_proj=True))
    assert roles == {**blocks(1, ("in_proj", "qkv"), ("out_proj", "attn_out")), "head": "head"}
    assert joined["blocks.0.in_proj"].split == split


def test_eva02_with_separate_projections_and_gate() -> None:
    targets, roles, _ = walked("eva02_base_patch14_448", depth=1, embed_dim=48, num_heads=3, img_size=28)
    layers = [(f"attn.{name}_proj", "qkv") for name in "qkv"] + [PROJ, ("mlp.fc1_g", "ffn_in"), ("mlp.fc1_x", "ffn_in"), FC2]
    assert roles == {**blocks(1, *layers), "head": "head"}
    assert [targets[f"blocks.0.attn.{name}_proj"].bias for name in "qkv"] == [True, False, True]
    assert not any(target.split or target.switches for target in targets.values())


ONE: dict[str, Any] = {"depth": 1, "embed_dim": 48, "num_heads": 3, "img_size": 32}
POSITIONS = ("attn.rel_pos.mlp.fc1", "attn.rel_pos.mlp.fc2")
POOL = ("q", "kv", "proj", "mlp.fc1", "mlp.fc2")


@pytest.mark.parametrize(
    ("name", "options", "others"),
    [
        ("vit_tiny_patch16_224", {**ONE, "qk_norm": True}, {"head": "head"}),
        ("vit_tiny_patch16_224", {**ONE, "attn_layer": "diff"}, {"head": "head"}),
        ("vit_relpos_small_patch16_224", ONE, {**{f"blocks.0.{name}": "constant" for name in POSITIONS}, "head": "head"}),
        ("vit_base_patch16_siglip_224", ONE, {f"attn_pool.{name}": "pool" for name in POOL}),
        ("deit_tiny_distilled_patch16_224", ONE, {"head": "head", "head_dist": "head"}),
        ("beit_base_patch16_224", ONE, {"head": "head"}),
        ("eva02_tiny_patch14_224", {**ONE, "img_size": 28}, {}),
    ],
)
@pytest.mark.parametrize("fused", [True, False])
def test_blocks_of_one_form(name: str, options: dict[str, Any], others: dict[str, str], fused: bool) -> None:
    """Whether attention is one operator or written out."""
    try:
        set_fused_attn(fused)
        targets, roles, codes = walked(name, **options)
    finally:
        set_fused_attn(True)
    assert {fqn: role for fqn, role in roles.items() if fqn not in others} == blocks(1, *PLAIN)
    assert codes == {fqn: (code,) for fqn, code in others.items()}
    assert {roles[fqn] for fqn in others} <= {"head", "other"}
    assert targets["blocks.0.attn.qkv"].split == thirds(48)


SWIN: dict[str, Any] = {"embed_dim": 24, "depths": (2, 1), "num_heads": (2, 4), "img_size": 32, "window_size": 4}


@pytest.mark.parametrize(
    ("name", "positions"), [("swin_tiny_patch4_window7_224", ()), ("swinv2_tiny_window8_256", ("attn.cpb_mlp.0", "attn.cpb_mlp.2"))]
)
def test_swin(name: str, positions: tuple[str, ...]) -> None:
    targets, roles, codes = walked(name, **SWIN)
    layers = (*PLAIN, *((position, "other") for position in positions))
    assert roles == {
        **blocks(2, *layers, prefix="layers.0.blocks"),
        "layers.1.downsample.reduction": "other",
        **blocks(1, *layers, prefix="layers.1.blocks"),
        "head.fc": "head",
    }
    others = {"layers.1.downsample.reduction": ("no-role",), "head.fc": ("head",)}
    assert codes == {**others, **{fqn: ("constant",) for fqn in targets if "cpb_mlp" in fqn}}
    assert targets["layers.0.blocks.1.attn.qkv"].split == thirds(24)  # the shifted one
    assert targets["layers.1.blocks.0.attn.qkv"].split == thirds(48)
    assert targets["layers.0.blocks.0.mlp.fc1"].rows == 2 * 8 * 8


def test_cait_mixes_heads_and_pools_into_the_class_token() -> None:
    targets, roles, codes = walked("cait_xxs24_224", depth=1, embed_dim=48, num_heads=4, img_size=32)
    pooled = ("attn.q", "attn.k", "attn.v", "attn.proj", "mlp.fc1", "mlp.fc2")
    expected = {
        "blocks.0.attn.proj_l": ("talking-heads",),
        "blocks.0.attn.proj_w": ("talking-heads",),
        **{f"blocks_token_only.{i}.{name}": ("pool",) for i in range(2) for name in pooled},
    }
    assert roles == {**blocks(1, *PLAIN), **dict.fromkeys(expected, "other"), "head": "head"}
    assert codes == {**expected, "head": ("head",)}
    assert targets["blocks.0.attn.qkv"].split == thirds(48)


def test_rows_that_are_interleaved_by_head_are_not_split() -> None:
    targets, *_ = walked("levit_128s", depth=(1, 1, 1))
    qkv = [target for target in targets.values() if target.role == "qkv"]
    assert {target.fqn for target in qkv if target.split} == set()
    assert [target.fqn for target in qkv if target.out_features != target.in_features][:2] == [
        "stages.0.blocks.0.attn.qkv.linear",
        "stages.1.downsample.attn_downsample.kv.linear",
    ]


def test_mlps_called_from_three_branches() -> None:
    targets, *_ = walked("coat_tiny", serial_depths=(1, 1, 1, 1), parallel_depth=1, embed_dims=(16, 32, 32, 32), img_size=64)
    shared = targets["parallel_blocks.0.mlp2.fc1"]
    assert (shared.role, shared.calls, shared.aliases) == ("ffn_in", 3, ("parallel_blocks.0.mlp3.fc1", "parallel_blocks.0.mlp4.fc1"))
    # 64 pixels in patches of 4 make 16, 8, 4 and 2 tokens a side, and a class token: the second to fourth scales share
    assert shared.rows == 2 * ((8 * 8 + 1) + (4 * 4 + 1) + (2 * 2 + 1))
    assert "parallel_blocks.0.mlp3.fc1" not in targets
    # linear attention, to whose output a convolution of the values is added
    attention = {fqn.rpartition(".")[2]: target.role for fqn, target in targets.items() if "factoratt" in fqn}
    assert attention == {"qkv": "qkv", "proj": "attn_out"}


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "resnet18"])
def test_every_linear_is_listed(name: str) -> None:
    model = build(name)
    listed = {fqn for target in walk(model) for fqn in (target.fqn, *target.aliases)}
    assert {fqn for fqn, module in model.named_modules(remove_duplicate=False) if isinstance(module, nn.Linear)} <= listed
