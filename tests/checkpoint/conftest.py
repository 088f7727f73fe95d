"""One small converted model, saved once, copies of its folder, and ways to rewrite them as damage or an attacker would."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from flysurgery.checkpoint import load, save
from flysurgery.checkpoint.tensors import canonical
from flysurgery.errors import CheckpointError
from flysurgery.surgery import Report, install, plan
from flysurgery.surgery import convert as convert_model
from tests.support.models import vit

Tensors = dict[str, Tensor]
Metadata = dict[str, str]
Converted = tuple[nn.Module, Report]

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
VIT_PYTORCH: dict[str, Any] = {"image_size": 16, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 1, "heads": 2, "mlp_dim": 64}
TIMM_MODELS: dict[str, dict[str, Any]] = {
    # Of each what it stands for: a switch and tables outside the state_dict; rotary tables; masks made on the parameters' device.
    "beit_base_patch16_224": {"img_size": 32, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5},
    "eva02_tiny_patch14_224": {"img_size": 28, "embed_dim": 48, "depth": 1, "num_heads": 3, "num_classes": 5},
    "swin_tiny_patch4_window7_224": {"img_size": 56, "embed_dim": 16, "depths": [2], "num_heads": [2], "num_classes": 5},
}


def need_recorded_arguments() -> None:
    """Skip what saves a model without saying how it was built, where timm does not know that."""
    if not hasattr(timm.models, "get_model_args"):
        pytest.skip(f"timm {timm.__version__} keeps no arguments of its models, as 1.0.31 does, so saving asks for base_args=")


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


def images(model: nn.Module) -> Tensor:
    """Three random images of the size and dtype that the model takes."""
    size = model.patch_embed.img_size if hasattr(model, "patch_embed") else (getattr(model, "image_size", 16),) * 2
    return torch.randn(3, 3, *size, generator=torch.Generator().manual_seed(2)).to(next(model.parameters()).dtype)


def outputs(model: nn.Module) -> Tensor:
    """What the model gives for ``images``."""
    with torch.no_grad():
        return model(images(model))


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file and folder below a folder, and what the files hold."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def refused(folder: Path, *facts: str, open_it: Callable[[Path], object] = load) -> str:
    """The one sentence with which loading is refused; it holds each of ``facts``."""
    with pytest.raises(CheckpointError) as caught:
        open_it(folder)
    message = str(caught.value)
    assert "\n" not in message and len(message) <= 400, message
    assert all(fact in message for fact in facts), message
    return message


@pytest.fixture(scope="session")
def converted() -> Converted:
    """A model converted for real, with its report; not to be changed."""
    need_recorded_arguments()
    model = vit()
    return model, convert_model(model)


@pytest.fixture(scope="session")
def saved(converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of ``converted``; not to be changed."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    save(converted[0], folder, report=converted[1])
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of ``saved`` to damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def read_weights(folder: Path) -> tuple[Tensors, Metadata]:
    """All tensors and the header's entries."""
    with safe_open(folder / WEIGHTS_FILE, "pt") as handle:
        return {name: handle.get_tensor(name).clone() for name in handle.keys()}, dict(handle.metadata())  # noqa: SIM118


def rewrite(folder: Path, change: Callable[[Tensors, Metadata], object]) -> None:
    """Let ``change`` edit the tensors and the header's entries."""
    tensors, metadata = read_weights(folder)
    change(tensors, metadata)
    save_file(tensors, folder / WEIGHTS_FILE, metadata)


def rewrite_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Let ``change`` edit ``config.json``."""
    config = json.loads((folder / CONFIG_FILE).read_text())
    change(config)
    (folder / CONFIG_FILE).write_text(json.dumps(config))


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Let ``change`` edit the plan, and make the hash match."""
    plan = json.loads((folder / CONFIG_FILE).read_text())["model_args"]["plan"]
    change(plan)
    rewrite(folder, lambda _, metadata: metadata.update(plan_sha256=sha256(canonical(plan))))
    rewrite_config(folder, lambda config: config["model_args"].update(plan=plan))


def sha256(content: str | bytes) -> str:
    """The hash of a text or of bytes, as headers hold it."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()
