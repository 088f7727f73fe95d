"""Numbers of each role in one small model a family, counted by reading the family's code: linears only, 1x1 convolutions set apart."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import timm
import torch
from timm.layers import set_fused_attn
from timm.models.vision_transformer import ParallelScalingBlock
from torch import nn

from flysurgery.walker import Slice, Target, walk
from tests.walker.toys import named

# Per model: qkv, attn_out, ffn_in, ffn_out, head; then the reasons of all others.
Truth = tuple[tuple[int, int, int, int, int], dict[str, int]]

ONE: dict[str, Any] = {"depth": 1, "embed_dim": 48, "num_heads": 3, "img_size": 32}
SWIN: dict[str, Any] = {"embed_dim": 24, "depths": (2, 1), "num_heads": (2, 4), "img_size": 32, "window_size": 4}

TIMM: dict[str, tuple[dict[str, Any], Truth]] = {
    "resnet18": ({}, ((0, 0, 0, 0, 1), {})),  # its 1x1 convolutions have a stride
    # Two blocks of q with k and v apart, whose positions go through a linear, and a plain one.
    "convit_tiny": ({"depth": 3, "local_up_to_layer": 2, "embed_dim": 12, "img_size": 32}, ((5, 3, 3, 3, 1), {"constant": 2})),
    # Attention across channels; two blocks of class attention with q, k, v, proj, fc1 and fc2.
    "xcit_nano_12_p16_224": ({"depth": 2, "img_size": 64}, ((2, 2, 2, 2, 1), {"pool": 12})),
    # Three stages of 2, 6 and 4 blocks; between them a linear for the class token.
    "pit_ti_224": ({}, ((12, 12, 12, 12, 1), {"pool": 2})),
    # A block within a block, each with qk and v; the pixels' tokens go into the patches' by one linear a block and one before all.
    "tnt_s_patch16_224": ({"depth": 2, "img_size": 32}, ((8, 4, 4, 4, 1), {"no-role": 3})),
    # Two branches; to either a linear there and back, and attention of one class token with q, k, v, proj.
    "crossvit_tiny_240": ({"depth": ((1, 1, 0),)}, ((2, 2, 2, 2, 2), {"pool": 12})),
    # Where the width doubles, a linear for the shortcut.
    "hiera_tiny_224": ({"stages": (1, 1, 1, 1), "embed_dim": 24}, ((4, 4, 4, 4, 1), {"no-role": 3})),
    # Two stages of convolutions, then 9 and 3 blocks of attention; the head has a hidden layer.
    "caformer_s18": ({}, ((12, 12, 12, 12, 1), {"pool": 1})),
    # All convolutions but the last block; two heads.
    "efficientformer_l1": ({"depths": (1, 1, 1, 1)}, ((1, 1, 1, 1, 2), {})),
    # Each block has two linears for its position bias; a merging linear between the stages.
    "swinv2_cr_tiny_224": (
        {"embed_dim": 24, "depths": (1, 1), "num_heads": (2, 4), "img_size": 64},
        ((2, 2, 2, 2, 1), {"constant": 4, "no-role": 1}),
    ),
    # Gated convolutions between two linears, no attention; the head has a hidden layer.
    "mambaout_femto": ({"depths": (1, 1, 1, 1)}, ((0, 0, 4, 4, 1), {"pool": 1})),
    # A single linear over the tokens, without an activation.
    "resmlp_12_224": ({}, ((0, 0, 12, 12, 1), {"no-role": 12})),
    # The patch embedding is a linear, whose weight is read for other patch sizes.
    "naflexvit_base_patch16_gap": ({"depth": 2, "embed_dim": 48, "num_heads": 2}, ((2, 2, 2, 2, 1), {"patch-embedding": 1})),
    # Query, key and value apart, and a gate apart.
    "eva02_base_patch14_448": (ONE | {"img_size": 28}, ((3, 1, 2, 1, 1), {})),
    # Attention whose heads two linears mix; a block of class attention.
    "cait_xxs24_224": (ONE, ((1, 1, 1, 1, 1), {"talking-heads": 2, "pool": 12})),
}

SIZES = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 48, "depth": 1, "heads": 4, "mlp_dim": 96, "dim_head": 16}
CROSS = {"image_size": 64, "num_classes": 10, "depth": 1, "sm_dim": 48, "lg_dim": 64, "sm_patch_size": 8, "lg_patch_size": 16}
CCT = {"img_size": 32, "embedding_dim": 64, "num_layers": 1, "num_heads": 2, "mlp_ratio": 2.0, "num_classes": 10}

VIT_PYTORCH: dict[str, tuple[dict[str, Any], Truth]] = {
    # Parallel residual streams that weights from bare parameters mix, before and after attention and the FFN.
    "simple_vit_with_hyper_connections:SimpleViT": (
        SIZES | {"depth": 2, "num_residual_streams": 2},
        ((2, 2, 2, 2, 1), {"patch-embedding": 1, "no-role": 4}),
    ),
    "deepvit:DeepViT": (SIZES, ((1, 1, 1, 1, 1), {"patch-embedding": 1})),
    # q and kv apart; a block of class attention with q, kv, out and an MLP.
    "cait:CaiT": (SIZES | {"cls_depth": 1}, ((2, 1, 1, 1, 1), {"patch-embedding": 1, "pool": 5})),
    # One and four blocks of q and kv; two rounds of class tokens in two directions, with q, kv, out and a linear there and back.
    "cross_vit:CrossViT": (CROSS, ((10, 5, 5, 5, 2), {"patch-embedding": 2, "pool": 20})),
    # Blocks and grids, and two linears of squeeze and excitation a stage.
    "max_vit:MaxViT": ({"num_classes": 10, "depth": (1, 1), "dim": 32, "dim_conv_stem": 32}, ((4, 4, 4, 4, 1), {"pool": 4})),
    # A linear with one row gives the weights by which the tokens are pooled.
    "cct:CCT": (CCT, ((1, 1, 1, 1, 1), {"rank-one": 1})),
    # q and k together, v apart; attention is an operator that takes functions of the scores.
    "vit_nd_rotary:ViTND": (
        {name: size for name, size in SIZES.items() if name != "image_size"} | {"ndim": 2, "input_shape": (32, 32)},
        ((2, 1, 1, 1, 1), {"patch-embedding": 1}),
    ),
}


def counted(targets: Iterable[Target]) -> Truth:
    linears = [target for target in targets if all(obstacle.code != "conv1x1" for obstacle in target.obstacles)]
    roles = Counter(target.role for target in linears)
    reasons = Counter(target.obstacles[0].code for target in linears if target.role == "other")
    return (roles["qkv"], roles["attn_out"], roles["ffn_in"], roles["ffn_out"], roles["head"]), dict(reasons)


def build(name: str, options: dict[str, Any]) -> nn.Module:
    module, _, of = name.partition(":")
    if of:
        return getattr(importlib.import_module(f"vit_pytorch.{module}"), of)(**options)
    with torch.device("meta"):
        return timm.create_model(name, **options)


@pytest.mark.parametrize("name", [*TIMM, *VIT_PYTORCH])
def test_every_linear_is_listed_with_its_role_or_the_reason_for_none(name: str) -> None:
    options, truth = (TIMM | VIT_PYTORCH)[name]
    model = build(name, options)
    targets = walk(model)
    assert counted(targets) == truth
    listed = {fqn for target in targets for fqn in (target.fqn, *target.aliases)}
    assert {fqn for fqn, module in model.named_modules(remove_duplicate=False) if isinstance(module, nn.Linear)} <= listed


def thirds(width: int) -> tuple[Slice, ...]:
    return (Slice("q", 0, width), Slice("k", width, 2 * width), Slice("v", 2 * width, 3 * width))


PARALLEL = (Slice("ffn", 0, 768), Slice("q", 768, 960), Slice("k", 960, 1152), Slice("v", 1152, 1344))
BRANCHES = {"depth": 1, "img_size": 32, "block_fn": ParallelScalingBlock}


@pytest.mark.parametrize(
    ("name", "options", "layer", "split", "tokens"),
    [
        ("vit:ViT", SIZES, "transformer.layers.0.0.to_qkv", thirds(64), 17),
        ("vit_5:ViT", SIZES, "transformer.layers.0.0.to_qkv", thirds(64), None),  # rotary positions under autocast
        ("learnable_memory_vit:ViT", SIZES, "transformer.layers.0.0.to_kv", (Slice("k", 0, 64), Slice("v", 64, 128)), None),
        ("vit_tiny_patch16_224", ONE, "blocks.0.attn.qkv", thirds(48), 5),
        ("vit_tiny_patch16_224", {**ONE, "attn_layer": "diff"}, "blocks.0.attn.qkv", thirds(48), 5),
        ("vit_tiny_patch16_224", BRANCHES, "blocks.0.in_proj", PARALLEL, 5),
        ("vit_tiny_patch16_224", BRANCHES | {"patch_drop_rate": 0.5}, "blocks.0.in_proj", PARALLEL, 5),  # as in inference
        ("swin_tiny_patch4_window7_224", SWIN, "layers.0.blocks.1.attn.qkv", thirds(24), 64),  # the shifted one
        ("levit_128s", {"depth": (1, 1, 1)}, "stages.0.blocks.0.attn.qkv.linear", None, None),  # rows interleaved by head
    ],
)
def test_which_rows_are_query_key_and_value(
    name: str, options: dict[str, Any], layer: str, split: tuple[Slice, ...] | None, tokens: int | None
) -> None:
    target = named(build(name, options))[layer]
    assert (target.role, target.split) == ("qkv", split)
    assert tokens is None or target.rows == 2 * tokens


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_relpos_small_patch16_224", "beit_base_patch16_224"])
def test_attention_is_known_whether_it_is_one_operator_or_written_out(name: str) -> None:
    found = []
    try:
        for fused in (True, False):
            set_fused_attn(fused)
            found.append([(each.fqn, each.role, each.split, each.rows, each.obstacles) for each in walk(build(name, ONE))])
    finally:
        set_fused_attn(True)
    assert found[0] == found[1]


def test_na_vit_with_images_of_several_sizes_and_functions_as_blocks() -> None:
    model, images = build("na_vit:NaViT", SIZES), ([torch.zeros(3, 32, 32), torch.zeros(3, 16, 32)],)
    for _ in range(2):  # the model's cache of positions holds nothing of the first trace
        assert counted(walk(model, images)) == ((2, 1, 1, 1, 1), {"patch-embedding": 1, "pool": 3})


def test_parametrized_weights_are_blocked() -> None:
    targets = named(build("normalized_vit:nViT", SIZES))
    assert all("parametrized" in [o.code for o in target.obstacles] and target.blocked for target in targets.values())
    assert targets["layers.0.1.to_gate.linear"].role == "ffn_in"
