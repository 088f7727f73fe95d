"""Damaged and forged folders by the hundreds: what is loaded is what the files say, or one sentence refuses it.

Each case changes one to three things in a small valid folder: arguments, plan, configuration, header, tensors, bytes; hashes mostly match.
"""

import copy
import inspect
import json
import random
import resource
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import flysurgery
from flysurgery.checkpoint import build_base
from flysurgery.checkpoint.tensors import SAFETENSORS_DTYPES, canonical
from flysurgery.errors import CheckpointError
from flysurgery.surgery import plan_of
from tests.checkpoint.conftest import CONFIG_FILE, TIMM_MODELS, VIT_PYTORCH, WEIGHTS_FILE, install_random, sha256
from tests.support.models import VIT, VIT_ARGUMENTS

MAX_SECONDS = 3.0
"""The most computing that loading a damaged folder may take, on a slow machine."""
MAX_GROWTH = 200 << 20
"""The bytes by which one folder may raise the process's largest memory, of which valid folders have been loaded before."""

SIMPLE, SWIN = "vit_pytorch.simple_vit:SimpleViT", "swin_tiny_patch4_window7_224"
TINY, RELATIVE = "tiny_vit_5m_224", "vit_relpos_small_patch16_224"
BASES: dict[str, dict[str, Any]] = TIMM_MODELS | {
    VIT: VIT_ARGUMENTS,
    SIMPLE: VIT_PYTORCH,
    "vit_pytorch:ViT": VIT_PYTORCH,
    TINY: {"depths": [1, 1], "embed_dims": [16, 32], "num_heads": [1, 1], "window_sizes": [7, 7], "num_classes": 5},
    RELATIVE: VIT_ARGUMENTS,
}

NUMBERS = (0, 1, 2, 3, -1, 5, 7, 8, 16, 32, 33, 64, 1000, 4096, 16384, 57344, 1 << 24, (1 << 24) + 1, 1 << 31, 1 << 63, 10**30, 10**400)
WORDS = ("", "abc", "7", "a\nb", "x" * 3000, "{}", "[]", "null", "F16", "BF16", "F8_E4M3", "U64", "norm.weight", "nowhere")
LISTS = ([], {}, [1, 2], [16, 16384], [[1]], {"a": 1}, [None], [0, 0], [0, 1 << 60], [-1], [1 << 62, 0])
VALUES = (*NUMBERS, 0.5, -1.0, 1e-9, 1e308, None, True, False, *WORDS, *LISTS)
LIKELY = (True, False, None, 0, 1, 2, 4, 8, 16, 32, 0.1, "avg", "token", "", [16, 16], [2, 2])
"""Values that constructors often take."""


@dataclass
class Files:
    """The two files of a folder that loading reads, taken apart: ``header`` is the JSON of ``model.safetensors``, ``data`` what follows."""

    config: dict[str, Any]
    header: dict[str, Any]
    data: bytes
    arguments: tuple[str, ...]

    def content(self) -> dict[str, bytes]:
        header = json.dumps(self.header).encode()
        return {CONFIG_FILE: json.dumps(self.config).encode(), WEIGHTS_FILE: len(header).to_bytes(8, "little") + header + self.data}

    def set_plan(self, parts: Any) -> None:
        """Put another plan into ``config.json``, with a hash that matches."""
        self.header["__metadata__"]["plan_sha256"] = sha256(canonical(parts))
        self.config["model_args"] = {"base": parts.get("base"), "base_args": parts.get("base_args"), "plan": parts}

    def list_tensors(self) -> None:
        """Let the header's list of tensors be true."""
        entries = {name: self.header[name] for name in self.header if name != "__metadata__"}
        found = {name: [each["dtype"], sha256(self.data[slice(*each["data_offsets"])])] for name, each in entries.items()}
        self.header["__metadata__"].update(tensors=canonical(found), tensors_sha256=sha256(canonical(found)))


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """The folders of one small converted model of each base, with random weights."""
    made = {}
    for base, arguments in BASES.items():
        model = install_random(build_base(base, arguments), base=base, base_args=arguments)
        folder = tmp_path_factory.mktemp("valid")
        flysurgery.save(model, folder)
        weights = (folder / WEIGHTS_FILE).read_bytes()
        end = 8 + int.from_bytes(weights[:8], "little")
        known = tuple(name for name in inspect.signature(type(model).__init__).parameters if name not in ("self", "kwargs"))
        made[base] = Files(json.loads((folder / CONFIG_FILE).read_text()), json.loads(weights[8:end]), weights[end:], known)
    return made


def change(files: Files, draw: random.Random) -> None:
    """Another value for an argument, or another entry of the plan, the configuration, the header or the data; hashes mostly match."""
    what = draw.choice(("argument",) * 6 + ("plan",) * 4 + ("config",) * 3 + ("header",) * 5 + ("data",))
    parts = copy.deepcopy(files.config["model_args"]["plan"])
    if what == "argument":
        name = draw.choice((*files.arguments, *parts["base_args"]))
        value = draw.choice(LIKELY if draw.random() < 0.5 else VALUES)
        parts["base_args"][name] = [value] * draw.randint(1, 4) if draw.random() < 0.2 else value
    elif what == "data":
        files.data = flipped(files.data, draw.randrange(len(files.data)), draw)
    else:
        edit({"plan": parts, "config": files.config, "header": files.header}[what], draw)
    if what in ("argument", "plan"):
        files.set_plan(parts)
    if what in ("header", "data") and draw.random() < 0.7:
        files.list_tensors()


def flipped(content: bytes, place: int, draw: random.Random) -> bytes:
    return content[:place] + bytes([content[place] ^ (1 << draw.randrange(8))]) + content[place + 1 :]


def edit(value: Any, draw: random.Random) -> None:
    """Change one entry anywhere within lists and objects, in place."""
    while True:
        key = draw.choice(sorted(value)) if isinstance(value, dict) else draw.randrange(len(value))
        inner = value[key]
        if not (isinstance(inner, dict | list) and inner and draw.random() < 0.9):
            break
        value = inner
    what = draw.choice(("set", "set", "set", "part", "drop", "twice"))
    if what == "part" and isinstance(inner, str | list):
        cut = draw.randrange(len(inner) + 1)
        value[key] = draw.choice((inner[:cut], inner[cut:], inner[::-1]))
    elif what == "drop":
        del value[key]
    elif what == "twice" and isinstance(value, dict):
        value[draw.choice((f"{key}x", "", "norm.weight", "x" * 2000, *sorted(value)))] = inner
    else:
        value[key] = draw.choice(VALUES)


def damaged(files: Files, draw: random.Random) -> tuple[Files, dict[str, bytes]]:
    """The files after one to three changes, and their content, of which some bytes may be others, missing or too many."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        changed = copy.deepcopy(files)
        with suppress(KeyError, TypeError, AttributeError, IndexError, ValueError):  # an earlier change took away what this one changes
            change(changed, draw)
            files = changed
    content = files.content()
    if draw.random() < 0.05:
        name = draw.choice(sorted(content))
        whole = content[name]
        place = draw.randrange(min(3000, len(whole)))
        content[name] = draw.choice((whole[:place], whole + bytes(place), flipped(whole, place, draw), b"[" * 100_000))
    return files, content


def largest_memory() -> int:
    """The most bytes that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def check(folder: Path, files: Files, content: dict[str, bytes], *, by_timm: bool = False) -> bool:
    """Whether the files are loaded, bit for bit, or else refused by a sentence; errors of timm before it calls flysurgery are refusals."""
    for name, each in content.items():
        (folder / name).write_bytes(each)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux forgets earlier peaks
    start, before = time.process_time(), largest_memory()
    model: nn.Module | None = None
    try:
        model = timm.create_model(f"local-dir:{folder}", pretrained=True) if by_timm else flysurgery.load(folder)
    except CheckpointError as error:
        assert "\n" not in str(error) and len(str(error)) <= 400, str(error)
    except Exception as error:
        ours = any("flysurgery" in Path(frame.filename).parts for frame in traceback.extract_tb(error.__traceback__))
        if ours or not by_timm:
            raise
    assert time.process_time() - start <= MAX_SECONDS
    assert largest_memory() - before <= MAX_GROWTH
    if model is None:
        return False
    for name, tensor in model.state_dict().items():
        entry = files.header[name]
        assert SAFETENSORS_DTYPES[entry["dtype"]] == tensor.dtype and list(tensor.shape) == entry["shape"], name
        found = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert found == files.data[slice(*entry["data_offsets"])], name
    plan = plan_of(model)
    assert plan is not None and canonical(plan.to_json()) == canonical(files.config["model_args"]["plan"])
    return True


@settings(max_examples=400, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(draw=st.randoms(use_true_random=False), by_timm=st.sampled_from((False, False, False, True)))
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_folder_is_refused_or_loaded_as_its_files_say(
    draw: random.Random, by_timm: bool, valid: dict[str, Files], tmp_path_factory: pytest.TempPathFactory
) -> None:
    files, content = damaged(draw.choice([*valid.values()]), draw)
    check(tmp_path_factory.getbasetemp(), files, content, by_timm=by_timm)


@pytest.mark.parametrize("by_timm", [False, True])
def test_undamaged_folders_are_loaded(by_timm: bool, valid: dict[str, Files], tmp_path: Path) -> None:
    assert all(check(tmp_path, files, files.content(), by_timm=by_timm) for files in valid.values())


LARGE: dict[str, list[dict[str, Any]]] = {
    SIMPLE: [{"image_size": [1 << 24, 8]}, {"dim_head": 1 << 24, "heads": [57344] * 2}, {"dim_head": 10**9, "heads": "x" * 100}],
    SWIN: [{"embed_dim": 8192}],  # reads its parameters, so all of it is built for real
    "eva02_tiny_patch14_224": [{"use_abs_pos_emb": False, "img_size": [57344, 57344]}],
    "beit_base_patch16_224": [{"img_size": 8192}],
    RELATIVE: [{"img_size": 8192}],
    TINY: [{"window_sizes": [32, 32], "depths": [1, 90]}],
    VIT: [{"depth": 1 << 24}, {"img_size": 1 << 24, "pos_embed": "none"}, {"num_classes": "abc", "embed_dim": 4096}],
}


@pytest.mark.parametrize(("base", "arguments"), [(base, arguments) for base, each in LARGE.items() for arguments in each])
def test_a_base_that_is_too_large_for_the_stored_tensors_is_refused(
    base: str, arguments: dict[str, Any], valid: dict[str, Files], tmp_path: Path
) -> None:
    files = copy.deepcopy(valid[base])
    parts = files.config["model_args"]["plan"]
    files.set_plan(parts | {"base_args": parts["base_args"] | arguments})
    assert not check(tmp_path, files, files.content())
