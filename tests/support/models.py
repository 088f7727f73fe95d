"""Small models with random weights, always the same, random images for them, and a check that a model is as it was."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Everything a model holds, by identity and bit for bit, before and after, and the random state."""
    _alive, before = _held(model)
    yield
    assert _held(model)[1] == before


def _held(model: nn.Module) -> tuple[list[object], list[object]]:
    """The modules and tensors, and what they are and hold."""
    modules = list(model.named_modules(remove_duplicate=False))
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    registries = ("_parameters", "_buffers", "_modules")
    attributes = [{name: copy.copy(each) for name, each in vars(module).items() if name not in registries} for _, module in modules]
    values = [(name, id(tensor), tensor.requires_grad, _bits(tensor)) for name, tensor in tensors]
    return [modules, tensors], [[(name, id(module)) for name, module in modules], values, attributes, _bits(torch.get_rng_state())]


def _bits(value: Tensor) -> bytes:
    return value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
