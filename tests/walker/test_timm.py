"""Roles in timm's models, against truth written down from reading their code. Tiny depths and widths; no weights are fetched."""

from __future__ import annotations

from functools import partial

import pytest
import timm
import torch
from torch import nn

from flysurgery.walker import Slice, Target, walk

QKV = ("attn.qkv", "qkv")
PROJ = ("attn.proj", "attn_out")
FC1, FC2 = ("mlp.fc1", "ffn_in"), ("mlp.fc2", "ffn_out")
PLAIN = (QKV, PROJ, FC1, FC2)


def build(name: str, **options: object) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, **options)  # pyright: ignore[reportArgumentType]


def walked(name: str, **options: object) -> dict[str, Target]:
    return {target.fqn: target for target in walk(build(name, **options))}


def blocks(count: int, *layers: tuple[str, str], prefix: str = "blocks") -> dict[str, str]:
    return {f"{prefix}.{i}.{name}": role for i in range(count) for name, role in layers}


def roles(targets: dict[str, Target]) -> dict[str, str]:
    return {fqn: target.role for fqn, target in targets.items()}


def codes(targets: dict[str, Target]) -> dict[str, tuple[str, ...]]:
    return {fqn: tuple(o.code for o in target.obstacles) for fqn, target in targets.items() if target.obstacles}


def thirds(width: int) -> tuple[Slice, ...]:
    return (Slice("q", 0, width), Slice("k", width, 2 * width), Slice("v", 2 * width, 3 * width))


def test_vit() -> None:
    targets = walked("vit_tiny_patch16_224", depth=2, img_size=32)
    assert roles(targets) == {**blocks(2, *PLAIN), "head": "head"}
    assert codes(targets) == {"head": ("head",)}
    rows = 2 * (2 * 2 + 1)  # batch, patches and class token
    qkv, fc2 = targets["blocks.1.attn.qkv"], targets["blocks.1.mlp.fc2"]
    assert (qkv.in_features, qkv.out_features, qkv.bias, qkv.rows, qkv.split) == (192, 576, True, rows, thirds(192))
    assert (fc2.in_features, fc2.out_features, fc2.rows, fc2.split) == (768, 192, rows, None)
    assert targets["head"].rows == 2
    assert not any(target.switches or target.aliases or target.blocked for target in targets.values())


def test_vit_with_norms_on_query_and_key_and_without_a_head() -> None:
    targets = walked("vit_tiny_patch16_224", depth=1, img_size=32, qk_norm=True, num_classes=0)
    assert roles(targets) == blocks(1, *PLAIN)
    assert targets["blocks.0.attn.qkv"].split == thirds(192)


def test_vit_of_parallel_branches() -> None:
    from timm.models.vision_transformer import ParallelScalingBlock

    targets = walked("vit_tiny_patch16_224", depth=1, img_size=32, block_fn=ParallelScalingBlock)
    layers = (("in_proj", "qkv"), ("attn_out_proj", "attn_out"), ("mlp_out_proj", "ffn_out"))
    assert roles(targets) == {**blocks(1, *layers), "head": "head"}
    split = (Slice("ffn", 0, 768), Slice("q", 768, 960), Slice("k", 960, 1152), Slice("v", 1152, 1344))
    assert targets["blocks.0.in_proj"].split == split

    joined = walked("vit_tiny_patch16_224", depth=1, img_size=32, block_fn=partial(ParallelScalingBlock, fuse_out_proj=True))
    assert roles(joined) == {**blocks(1, ("in_proj", "qkv"), ("out_proj", "attn_out")), "head": "head"}
    assert joined["blocks.0.in_proj"].split == split


@pytest.mark.parametrize("fused", [True, False])
def test_vit_of_differential_attention(fused: bool) -> None:
    from timm.layers import set_fused_attn

    try:
        set_fused_attn(fused)
        targets = walked("vit_tiny_patch16_224", depth=1, img_size=32, attn_layer="diff")
    finally:
        set_fused_attn(True)
    assert roles(targets) == {**blocks(1, *PLAIN), "head": "head"}
    assert targets["blocks.0.attn.qkv"].split == thirds(192)


def test_vit_with_position_mlp() -> None:
    targets = walked("vit_relpos_small_patch16_224", depth=1, embed_dim=48, num_heads=2, img_size=32)
    positions = blocks(1, ("attn.rel_pos.mlp.fc1", "other"), ("attn.rel_pos.mlp.fc2", "other"))
    assert roles(targets) == {**blocks(1, *PLAIN), **positions, "head": "head"}
    assert codes(targets) == {**dict.fromkeys(positions, ("position-mlp",)), "head": ("head",)}


def test_vit_with_attention_pooling() -> None:
    targets = walked("vit_base_patch16_siglip_224", depth=1, embed_dim=48, num_heads=2, img_size=32)
    pool = {f"attn_pool.{name}": ("pool",) for name in ("q", "kv", "proj", "mlp.fc1", "mlp.fc2")}
    assert roles(targets) == {**blocks(1, *PLAIN), **dict.fromkeys(pool, "other")}
    assert codes(targets) == pool


def test_deit_has_two_heads() -> None:
    targets = walked("deit_tiny_distilled_patch16_224", depth=2, img_size=32)
    assert roles(targets) == {**blocks(2, *PLAIN), "head": "head", "head_dist": "head"}
    assert targets["blocks.0.attn.qkv"].rows == 2 * (4 + 2)


def test_beit() -> None:
    targets = walked("beit_base_patch16_224", depth=2, embed_dim=48, num_heads=3, img_size=32)
    assert roles(targets) == {**blocks(2, *PLAIN), "head": "head"}
    assert targets["blocks.0.attn.qkv"].split == thirds(48)
    assert not targets["blocks.0.attn.qkv"].bias  # it lives on the parent


def test_eva02_fused_with_a_packed_gate() -> None:
    targets = walked("eva02_tiny_patch14_224", depth=2, embed_dim=48, num_heads=3, img_size=28)
    assert roles(targets) == blocks(2, *PLAIN)
    assert targets["blocks.1.attn.qkv"].split == thirds(48)
    assert (targets["blocks.0.mlp.fc1"].out_features, targets["blocks.0.mlp.fc2"].in_features) == (256, 128)


def test_eva02_with_separate_projections_and_gate() -> None:
    targets = walked("eva02_base_patch14_448", depth=1, embed_dim=48, num_heads=3, img_size=28)
    layers = [(f"attn.{name}_proj", "qkv") for name in "qkv"] + [PROJ, ("mlp.fc1_g", "ffn_in"), ("mlp.fc1_x", "ffn_in"), FC2]
    assert roles(targets) == {**blocks(1, *layers), "head": "head"}
    assert [targets[f"blocks.0.attn.{name}_proj"].bias for name in "qkv"] == [True, False, True]
    assert not any(target.split or target.switches for target in targets.values())


def test_swin() -> None:
    targets = walked("swin_tiny_patch4_window7_224", embed_dim=24, depths=(2, 1), num_heads=(2, 4), img_size=32, window_size=4)
    assert roles(targets) == {
        **blocks(2, *PLAIN, prefix="layers.0.blocks"),
        "layers.1.downsample.reduction": "other",
        **blocks(1, *PLAIN, prefix="layers.1.blocks"),
        "head.fc": "head",
    }
    assert codes(targets) == {"layers.1.downsample.reduction": ("no-role",), "head.fc": ("head",)}
    assert targets["layers.0.blocks.1.attn.qkv"].split == thirds(24)  # the shifted one
    assert targets["layers.1.blocks.0.attn.qkv"].split == thirds(48)
    assert targets["layers.0.blocks.0.mlp.fc1"].rows == 2 * 8 * 8


def test_swin_v2() -> None:
    targets = walked("swinv2_tiny_window8_256", embed_dim=24, depths=(2, 1), num_heads=(2, 4), img_size=32, window_size=4)
    layers = (*PLAIN, ("attn.cpb_mlp.0", "other"), ("attn.cpb_mlp.2", "other"))
    assert roles(targets) == {
        **blocks(2, *layers, prefix="layers.0.blocks"),
        "layers.1.downsample.reduction": "other",
        **blocks(1, *layers, prefix="layers.1.blocks"),
        "head.fc": "head",
    }
    positions = {fqn for fqn in targets if "cpb_mlp" in fqn}
    assert {fqn for fqn, found in codes(targets).items() if found == ("position-mlp",)} == positions
    assert targets["layers.0.blocks.1.attn.qkv"].split == thirds(24)


def test_fused_and_written_out_attention_agree() -> None:
    from timm.layers import set_fused_attn

    try:
        set_fused_attn(False)
        written_out = walked("vit_tiny_patch16_224", depth=1, img_size=32)
    finally:
        set_fused_attn(True)
    assert written_out == walked("vit_tiny_patch16_224", depth=1, img_size=32)


def test_cait_mixes_heads_and_pools_into_the_class_token() -> None:
    targets = walked("cait_xxs24_224", depth=1, embed_dim=48, num_heads=4, img_size=32)
    pooled = ("attn.q", "attn.k", "attn.v", "attn.proj", "mlp.fc1", "mlp.fc2")
    expected = {
        "blocks.0.attn.proj_l": ("talking-heads",),
        "blocks.0.attn.proj_w": ("talking-heads",),
        **{f"blocks_token_only.{i}.{name}": ("pool",) for i in range(2) for name in pooled},
    }
    assert roles(targets) == {**blocks(1, *PLAIN), **dict.fromkeys(expected, "other"), "head": "head"}
    assert codes(targets) == {**expected, "head": ("head",)}
    assert targets["blocks.0.attn.qkv"].split == thirds(48)


def test_rows_that_are_interleaved_by_head_are_not_split() -> None:
    targets = walked("levit_128s", depth=(1, 1, 1))
    qkv = [target for target in targets.values() if target.role == "qkv"]
    assert {target.fqn for target in qkv if target.split} == set()
    assert [target.fqn for target in qkv if target.out_features != target.in_features][:2] == [
        "stages.0.blocks.0.attn.qkv.linear",
        "stages.1.downsample.attn_downsample.kv.linear",
    ]


def test_mlps_called_from_three_branches() -> None:
    targets = walked("coat_tiny", serial_depths=(1, 1, 1, 1), parallel_depth=1, embed_dims=(16, 32, 32, 32), img_size=64)
    shared = targets["parallel_blocks.0.mlp2.fc1"]
    assert (shared.role, shared.calls, shared.aliases) == ("ffn_in", 3, ("parallel_blocks.0.mlp3.fc1", "parallel_blocks.0.mlp4.fc1"))
    # 64 pixels in patches of 4 make 16, 8, 4 and 2 tokens a side, and a class token: the second to fourth scales share
    assert shared.rows == 2 * ((8 * 8 + 1) + (4 * 4 + 1) + (2 * 2 + 1))
    assert "parallel_blocks.0.mlp3.fc1" not in targets
    # linear attention, to whose output a convolution of the values is added
    attention = {fqn.rpartition(".")[2]: target.role for fqn, target in targets.items() if "factoratt" in fqn}
    assert attention == {"qkv": "qkv", "proj": "attn_out"}


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("vit_small_patch16_224", {"qkv": 12, "attn_out": 12, "ffn_in": 12, "ffn_out": 12, "head": 1}),
        ("mixer_s32_224", {"ffn_in": 16, "ffn_out": 16, "head": 1}),
        ("pvt_v2_b0", {"qkv": 16, "attn_out": 8, "ffn_in": 8, "ffn_out": 8, "head": 1}),
        ("resnet18", {"head": 1}),  # its 1x1 convolutions have a stride
    ],
)
def test_counts_of_whole_models(name: str, counts: dict[str, int]) -> None:
    model = build(name)
    targets = walk(model)
    assert {role: sum(target.role == role for target in targets) for role in counts} == counts
    assert sum(counts.values()) == len(targets)
    listed = {fqn for target in targets for fqn in (target.fqn, *target.aliases)}
    assert {fqn for fqn, module in model.named_modules(remove_duplicate=False) if isinstance(module, nn.Linear)} <= listed
