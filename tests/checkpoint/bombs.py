"""Small folders whose arguments ask for endless memory or time, made of valid ones."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import timm
import torch

from flysurgery.checkpoint import save
from tests.checkpoint.conftest import ARGUMENTS, BASE, install_random
from tests.checkpoint.tamper import forge

SIMPLE_VIT = {"image_size": 16, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 1, "heads": 2, "mlp_dim": 64}
CCT = {"img_size": 16, "embedding_dim": 32, "num_layers": 1, "num_heads": 2, "mlp_ratio": 2.0, "num_classes": 5, "kernel_size": 3}
TINY_VIT = {"depths": [1, 1, 1, 1], "embed_dims": [16, 32, 32, 32], "num_heads": [1, 1, 1, 1], "window_sizes": [7, 7, 7, 7]}
MSRA = {"embed_dim": [16, 32], "key_dim": [4, 4], "depth": [1, 1], "num_heads": [2, 2], "window_size": [7, 7], "kernels": [3, 3]}
SWIN = {"img_size": 56, "embed_dim": 16, "depths": [2], "num_heads": [2]}
EVA = {"img_size": 28, "embed_dim": 48, "depth": 1, "num_heads": 3}

VALID: dict[str, dict[str, Any]] = {
    BASE: ARGUMENTS,
    "vit_pytorch.simple_vit:SimpleViT": SIMPLE_VIT,
    "vit_pytorch.cct:CCT": CCT,
    "swin_tiny_patch4_window7_224": SWIN | {"num_classes": 5},
    "eva02_tiny_patch14_224": EVA | {"num_classes": 5},
    "beit_base_patch16_224": {"img_size": 32, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5},
    "tiny_vit_5m_224": TINY_VIT | {"num_classes": 5},
    "efficientvit_m0": MSRA | {"down_ops": [["", 1], ["subsample", 2]], "img_size": 224, "num_classes": 5},
    "vit_relpos_small_patch16_224": ARGUMENTS | {"num_classes": 5},
}

CONVOLUTIONS = ("efficientvit_m0",)
"""Those whose linears are convolutions."""

BOMBS: list[tuple[str, dict[str, Any]]] = [
    ("vit_pytorch.simple_vit:SimpleViT", {"image_size": 16384}),
    ("vit_pytorch.simple_vit:SimpleViT", {"image_size": [1 << 24, 8]}),
    ("vit_pytorch.simple_vit:SimpleViT", {"depth": 1 << 24}),
    ("swin_tiny_patch4_window7_224", {"img_size": [16384, 16384]}),
    ("swin_tiny_patch4_window7_224", {"window_size": 4096}),
    ("swin_tiny_patch4_window7_224", {"depths": [1 << 24]}),
    ("eva02_tiny_patch14_224", {"use_abs_pos_emb": False, "img_size": [57344, 57344]}),
    ("beit_base_patch16_224", {"img_size": 8192}),
    ("beit_base_patch16_224", {"num_classes": "abc", "embed_dim": 4096}),
    ("vit_relpos_small_patch16_224", {"img_size": 8192}),
    ("vit_pytorch.cct:CCT", {"num_layers": 1 << 24}),
    ("vit_pytorch.cct:CCT", {"img_size": 1 << 14}),
    ("tiny_vit_5m_224", {"window_sizes": [4096, 4096, 4096, 4096]}),
    ("tiny_vit_5m_224", {"window_sizes": [32, 32, 32, 32], "depths": [1, 30, 30, 30]}),
    ("efficientvit_m0", {"window_size": [4096, 4096]}),
    ("efficientvit_m0", {"window_size": [32, 32], "img_size": 4096, "depth": [4000, 4000]}),
    (BASE, {"depth": 1 << 24}),
    (BASE, {"depth": 4096}),
    (BASE, {"depth": 1 << 24, "drop_path_rate": 0.1}),
    (BASE, {"embed_dim": 1 << 24}),
    (BASE, {"img_size": 1 << 24, "pos_embed": "none"}),
    (BASE, {"num_classes": "abc", "embed_dim": 4096}),
    (BASE, {"num_heads": [1], "depth": 1 << 24}),
]


def make_bombs(home: Path) -> list[tuple[Path, Path]]:
    """For each bomb a valid folder of the same model, and the bomb's."""
    valid = {base: _save(base, arguments, home / f"valid{number}") for number, (base, arguments) in enumerate(VALID.items())}
    made = []
    for number, (base, changes) in enumerate(BOMBS):
        folder = Path(shutil.copytree(valid[base], home / f"bomb{number}"))
        forge(folder, lambda plan, changes=changes: plan["base_args"].update(changes))
        made.append((valid[base], folder))
    return made


def _save(base: str, arguments: dict[str, Any], folder: Path) -> Path:
    torch.manual_seed(0)
    module, _, name = base.partition(":")
    model = getattr(importlib.import_module(module), name)(**arguments) if name else timm.create_model(base, **arguments)
    options = {"example": torch.zeros(2, 3, 16, 16)} if name == "CCT" else {}
    save(install_random(model, base=base, base_args=arguments, convs=base in CONVOLUTIONS, **options), folder)
    return folder
