"""One small converted model, saved once, and copies of its folder to damage."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from flysurgery.checkpoint import save
from flysurgery.surgery import Report, install, plan
from flysurgery.surgery import convert as convert_model

ARGUMENTS: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 7}
BASE = "vit_tiny_patch16_224"


def need_recorded_arguments() -> None:
    """Skip what saves a model without saying how it was built, where timm does not know that."""
    if not hasattr(timm.models, "get_model_args"):
        pytest.skip(f"timm {timm.__version__} keeps no arguments of its models, as 1.0.31 does, so saving asks for base_args=")


def small_model(**changes: Any) -> nn.Module:
    """A timm ViT of 30 thousand parameters."""
    torch.manual_seed(0)
    return timm.create_model(BASE, **{**ARGUMENTS, **changes}).eval()


def install_random(model: nn.Module, **options: Any) -> nn.Module:
    """Convert without projecting: factors and all other parameters are random, none of them zero."""
    if "base_args" not in options:
        need_recorded_arguments()
    install(plan(model, **options), model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def images(model: nn.Module, batch: int = 3) -> Tensor:
    """Random images of the size and dtype that a timm model takes."""
    size = model.patch_embed.img_size if hasattr(model, "patch_embed") else (16, 16)
    generator = torch.Generator().manual_seed(2)
    return torch.randn(batch, 3, *size, generator=generator).to(next(model.parameters()).dtype)


def outputs(model: nn.Module, batch: int = 3) -> Tensor:
    """What the model gives for ``images``."""
    with torch.no_grad():
        return model(images(model, batch))


@pytest.fixture(scope="session")
def converted() -> tuple[nn.Module, Report]:
    """A model converted for real, with its report; not to be changed."""
    need_recorded_arguments()
    model = small_model()
    return model, convert_model(model)


@pytest.fixture(scope="session")
def saved(converted: tuple[nn.Module, Report], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of ``converted``; not to be changed."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    save(converted[0], folder, report=converted[1])
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of ``saved`` to damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))
