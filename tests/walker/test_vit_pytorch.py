"""Roles in vit-pytorch's models, against truth written down from reading their code."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from flysurgery.walker import Slice, walk

SIZES = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 48, "depth": 2, "heads": 4, "mlp_dim": 96, "dim_head": 16}


def build(module: str, name: str, **options: object) -> nn.Module:
    return getattr(importlib.import_module(f"vit_pytorch.{module}"), name)(**{**SIZES, **options})


def roles(model: nn.Module, example: object = None) -> dict[str, str]:
    return {target.fqn: target.role for target in walk(model, example)}  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("module", "name", "out", "head"), [("vit", "ViT", "to_out.0", "mlp_head"), ("simple_vit", "SimpleViT", "to_out", "linear_head")]
)
def test_vit(module: str, name: str, out: str, head: str) -> None:
    model = build(module, name)
    assert isinstance(model, nn.Module)
    targets = {target.fqn: target for target in walk(model)}
    expected = {"to_patch_embedding.2": "other", head: "head"}
    for i in range(2):
        ffn_out = 4 if name == "ViT" else 3
        expected |= {f"transformer.layers.{i}.0.to_qkv": "qkv", f"transformer.layers.{i}.0.{out}": "attn_out"}
        expected |= {f"transformer.layers.{i}.1.net.1": "ffn_in", f"transformer.layers.{i}.1.net.{ffn_out}": "ffn_out"}
    assert {fqn: target.role for fqn, target in targets.items()} == expected
    assert [o.code for o in targets["to_patch_embedding.2"].obstacles] == ["patch-embedding"]
    qkv = targets["transformer.layers.1.0.to_qkv"]
    assert qkv.split == (Slice("q", 0, 64), Slice("k", 64, 128), Slice("v", 128, 192))
    assert qkv.rows == 2 * (16 + (name == "ViT"))


def test_na_vit_with_images_of_several_sizes_and_functions_as_blocks() -> None:
    model = build("na_vit", "NaViT", depth=1)
    images = [torch.zeros(3, 32, 32), torch.zeros(3, 16, 32)]
    found = roles(model, (images,))
    assert roles(model, (images,)) == found  # the model's cache of positions holds nothing of the first trace
    assert found == {
        "to_patch_embedding.1": "other",
        "transformer.layers.0.0.to_q": "qkv",
        "transformer.layers.0.0.to_kv": "qkv",
        "transformer.layers.0.0.to_out.0": "attn_out",
        "transformer.layers.0.1.1": "ffn_in",
        "transformer.layers.0.1.4": "ffn_out",
        "attn_pool.to_q": "other",
        "attn_pool.to_kv": "other",
        "attn_pool.to_out.0": "other",
        "mlp_head.1": "head",
    }


def test_separate_queries_and_fused_keys_and_values() -> None:
    targets = {target.fqn: target for target in walk(build("learnable_memory_vit", "ViT", depth=1))}
    assert targets["transformer.layers.0.0.to_q"].split is None
    assert targets["transformer.layers.0.0.to_kv"].split == (Slice("k", 0, 64), Slice("v", 64, 128))


def test_rotary_positions_under_autocast() -> None:
    targets = {target.fqn: target for target in walk(build("vit_5", "ViT", depth=1))}
    qkv = targets["transformer.layers.0.0.to_qkv"]
    assert (qkv.role, qkv.split) == ("qkv", (Slice("q", 0, 64), Slice("k", 64, 128), Slice("v", 128, 192)))


def test_parametrized_weights_are_blocked() -> None:
    targets = walk(build("normalized_vit", "nViT", depth=1))
    assert all("parametrized" in [o.code for o in target.obstacles] and target.blocked for target in targets)
    assert {target.fqn: target.role for target in targets}["layers.0.1.to_gate.linear"] == "ffn_in"
