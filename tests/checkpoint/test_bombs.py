"""Folders of some kilobytes that ask for gigabytes or minutes: refused within a second and 200 MB more than a valid folder takes."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from flysurgery.checkpoint import save
from tests.checkpoint.conftest import ARGUMENTS, BASE, TIMM_MODELS, VIT_PYTORCH, forge, install_random, need_recorded_arguments

SECONDS = 1.0
MEMORY_BYTES = 200 << 20

VALID: dict[str, dict[str, Any]] = TIMM_MODELS | {
    BASE: ARGUMENTS,
    "vit_pytorch.simple_vit:SimpleViT": VIT_PYTORCH,
    "tiny_vit_5m_224": {
        "depths": [1, 1, 1, 1],
        "embed_dims": [16, 32, 32, 32],
        "num_heads": [1, 1, 1, 1],
        "window_sizes": [7, 7, 7, 7],
        "num_classes": 5,
    },
    "vit_relpos_small_patch16_224": ARGUMENTS | {"num_classes": 5},
    "transformers:ViTModel": {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "image_size": 16,
        "patch_size": 8,
    },
}

BOMBS: list[tuple[str, dict[str, Any]]] = [
    ("vit_pytorch.simple_vit:SimpleViT", {"image_size": 16384}),
    ("vit_pytorch.simple_vit:SimpleViT", {"image_size": [1 << 24, 8]}),
    ("vit_pytorch.simple_vit:SimpleViT", {"depth": 1 << 24}),
    ("swin_tiny_patch4_window7_224", {"img_size": [16384, 16384]}),
    ("swin_tiny_patch4_window7_224", {"window_size": 4096}),
    ("swin_tiny_patch4_window7_224", {"depths": [1 << 24]}),
    ("eva02_tiny_patch14_224", {"use_abs_pos_emb": False, "img_size": [57344, 57344]}),
    ("beit_base_patch16_224", {"img_size": 8192}),
    ("vit_relpos_small_patch16_224", {"img_size": 8192}),
    ("tiny_vit_5m_224", {"window_sizes": [4096, 4096, 4096, 4096]}),
    ("tiny_vit_5m_224", {"window_sizes": [32, 32, 32, 32], "depths": [1, 30, 30, 30]}),
    (BASE, {"depth": 4096}),
    (BASE, {"depth": 1 << 24, "drop_path_rate": 0.1}),
    (BASE, {"img_size": 1 << 24, "pos_embed": "none"}),
    (BASE, {"num_classes": "abc", "embed_dim": 4096}),
    ("transformers:ViTModel", {"image_size": 16384}),
    ("transformers:ViTModel", {"num_hidden_layers": 1 << 24}),
    ("transformers:ViTModel", {"num_hidden_layers": 4096}),
    ("transformers:ViTModel", {"hidden_size": 1 << 20}),
]

LOAD_ALL = """
import json, resource, sys, time
from pathlib import Path
import flysurgery
from flysurgery.errors import CheckpointError

def taken():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

folders, room = json.loads(sys.argv[1]), int(sys.argv[2])
for valid, _ in folders:
    flysurgery.load(valid)
resource.setrlimit(resource.RLIMIT_AS, (taken() + room, resource.RLIM_INFINITY))
for valid, folder in folders:
    before = time.process_time()
    try:
        flysurgery.load(folder)
        outcome = "loaded", ""
    except CheckpointError as error:
        outcome = "refused", str(error)
    except BaseException as error:
        outcome = type(error).__name__, str(error)[:300]
    print(json.dumps([*outcome, time.process_time() - before]), flush=True)
"""


def save_valid(base: str, arguments: dict[str, Any], folder: Path) -> Path:
    torch.manual_seed(0)
    module, _, name = base.partition(":")
    if module == "transformers":  # whose configurations say how a model was built
        kind = getattr(importlib.import_module(module), name)
        save(install_random(kind(kind.config_class(**arguments))), folder)
        return folder
    model = getattr(importlib.import_module(module), name)(**arguments) if name else timm.create_model(base, **arguments)
    save(install_random(model, base=base, base_args=arguments), folder)
    return folder


def test_bombs_are_refused_in_a_process_whose_memory_is_limited(tmp_path: Path) -> None:
    need_recorded_arguments()
    if not Path("/proc/self/statm").exists():
        pytest.skip("only Linux says how much memory a process has reserved")
    valid = {base: save_valid(base, arguments, tmp_path / f"valid{number}") for number, (base, arguments) in enumerate(VALID.items())}
    folders = []
    for number, (base, changes) in enumerate(BOMBS):
        folder = Path(shutil.copytree(valid[base], tmp_path / f"bomb{number}"))
        forge(folder, lambda plan, changes=changes: plan["base_args"].update(changes))
        folders.append((str(valid[base]), str(folder)))
    command = [sys.executable, "-c", LOAD_ALL, json.dumps(folders), str(MEMORY_BYTES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(BOMBS), done.stderr[-2000:]
    for bomb, (outcome, message, seconds) in zip(BOMBS, found, strict=True):
        assert outcome == "refused", (bomb, outcome, message)
        assert "\n" not in message and len(message) <= 400, message
        assert seconds <= SECONDS, (bomb, seconds, message)
