"""A Vision Transformer of one or two tiny blocks, dense and converted, for the digits."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from flysurgery.checkpoint import build_base
from flysurgery.inference import convert

BASE = "vit_tiny_patch16_224"
ARGUMENTS = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 10}


@pytest.fixture(scope="session")
def _pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    dense = build_base(BASE, ARGUMENTS).eval()
    converted = copy.deepcopy(dense)
    convert(converted, base=BASE, base_args=ARGUMENTS)
    return dense, converted


@pytest.fixture
def dense(_pair: tuple[nn.Module, nn.Module]) -> nn.Module:
    """A model of its own for each test."""
    return copy.deepcopy(_pair[0])


@pytest.fixture
def converted(_pair: tuple[nn.Module, nn.Module]) -> Callable[[], nn.Module]:
    """Gives the same converted model anew with each call."""
    return lambda: copy.deepcopy(_pair[1])
