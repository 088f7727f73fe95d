"""Small models of each kind, converted, with weights that leave nothing at zero or one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import flysurgery
from flysurgery.walker import example_input

SMALL = {"img_size": 32, "num_classes": 5, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2}
"""Arguments that make one of timm's ViTs small."""
WHOLE = ["patch_embedding", *["norm_linear", "attention", "linear_residual", "ffn"] * 2, "layer_norm"]
"""The operators that such a model calls when all of it is fused."""


def ready(model: nn.Module, *, convert: bool = True, **options: Any) -> nn.Module:
    """The model in eval mode, every weight moved at random (layer scales and norms too), and by default converted, with ``options``."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.eval().requires_grad_(False)
    if convert:
        flysurgery.convert(model, "monarch", roles=("ffn", "qkv", "attn_out"), nblocks=4, **options)
    return model


def images(model: nn.Module, count: int = 2) -> Tensor:
    example = example_input(model)
    return torch.randn((count, *example.shape[1:]), generator=torch.Generator().manual_seed(2))
