"""Small models with random weights, always the same, and random images for them."""

from typing import Any

import timm
import torch
from torch import Tensor, nn

VIT = "vit_tiny_patch16_224"
"""The name of a ViT that takes ``VIT_ARGUMENTS``."""
VIT_ARGUMENTS: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 7}
ONE_BLOCK: dict[str, Any] = {"patch_size": 8, "num_classes": 5, "dim": 48, "depth": 1, "heads": 4, "mlp_dim": 96, "dim_head": 16}
"""Arguments of the classes of vit-pytorch, without the size of the inputs."""
VIT_PYTORCH: dict[str, Any] = ONE_BLOCK | {"image_size": 32}
TRUNK: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256, "patch_size": 8}
"""Entries of configurations of transformers."""


def vit(**changes: Any) -> nn.Module:
    """A ViT of timm of two blocks, in eval mode."""
    torch.manual_seed(0)
    return timm.create_model(VIT, **VIT_ARGUMENTS | changes).eval()


def images(count: int = 6) -> Tensor:
    """Inputs of ``vit``, normally distributed."""
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def is_close(got: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether no element is further off than this share of the largest one, or of a thousandth where all are smaller."""
    return got.shape == expected.shape and float((got - expected).detach().abs().max()) <= tolerance * float(expected.abs().max() + 1e-3)
