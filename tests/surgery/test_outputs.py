"""Where a weight is exactly a product of factors, the converted model computes what the dense one does."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import timm
import torch
import vit_pytorch
from torch import Tensor, nn

from flysurgery.surgery import Plan, apply, densify, plan
from tests.support.tolerance import FP32, MIN_OUTPUTS

TINY = {"img_size": 32, "depth": 2, "embed_dim": 64, "num_heads": 2}


def timm_vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", num_classes=300, **TINY)


def timm_beit() -> nn.Module:
    """Reads ``qkv.weight`` unless it is switched."""
    return timm.create_model("beit_base_patch16_224", num_classes=300, **TINY)


def timm_eva() -> nn.Module:
    """A gated FFN, and rotary embeddings."""
    return timm.create_model("eva02_tiny_patch14_224", num_classes=300, **TINY | {"img_size": 28, "embed_dim": 96})


def vit_pytorch_vit() -> nn.Module:
    return vit_pytorch.ViT(image_size=32, patch_size=16, num_classes=300, dim=64, depth=2, heads=2, dim_head=32, mlp_dim=128)


def rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


@pytest.mark.parametrize("make", [timm_vit, timm_beit, timm_eva, vit_pytorch_vit])
def test_exact_products_keep_the_outputs(make: Callable[[], nn.Module], make_exact: Callable[[Plan, nn.Module], None]) -> None:
    torch.manual_seed(5)
    model = make().eval()
    made = plan(model, roles=("ffn", "qkv", "attn_out"))
    make_exact(made, model)
    assert made.example is not None
    x = torch.randn(16, *made.example[0].shape[1:])
    with torch.no_grad():
        truth = copy.deepcopy(model).double()(x.double())
        yardstick = model(x)
        report = apply(made, model)
        converted = model(x)
        densify(model)
        densified = model(x)
    assert len(report.replaced) >= 8
    assert truth.numel() >= MIN_OUTPUTS
    allowed = FP32.k * rms(yardstick - truth)
    assert allowed < 1e-4 * rms(truth)
    assert rms(converted - truth) <= allowed
    assert rms(densified - truth) <= allowed
