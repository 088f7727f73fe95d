"""Damaged and forged folders, as many as one likes, and what comes of loading one.

Each case changes one to three things in a small valid folder: arguments, plan, configuration, header, tensors, bytes; hashes mostly
match. What is loaded must be what the files say, or the folder is refused in one sentence, within ``MAX_SECONDS`` and ``MAX_GROWTH``.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import random
import resource
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

import flysurgery
from flysurgery.checkpoint import build_base
from flysurgery.checkpoint.header import canonical
from flysurgery.checkpoint.tensors import SAFETENSORS_DTYPES
from flysurgery.errors import CheckpointError
from flysurgery.surgery import install, plan, plan_of

MAX_SECONDS = 3.0
"""The most computing that loading a damaged folder may take, on a slow machine."""

MAX_GROWTH = 200 << 20
"""The bytes by which one folder may raise the process's largest memory, of which valid folders have been loaded before."""

MAX_MESSAGE = 400

OUTCOMES = ("equal", "refused")
"""What may come of a damaged folder."""

VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5}
SIMPLE_VIT = {"image_size": 16, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 1, "heads": 2, "mlp_dim": 64}
BASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("vit_tiny_patch16_224", VIT),
    ("vit_pytorch.simple_vit:SimpleViT", SIMPLE_VIT),
    ("vit_pytorch:ViT", SIMPLE_VIT),
    ("swin_tiny_patch4_window7_224", {"img_size": 56, "embed_dim": 16, "depths": [2], "num_heads": [2], "num_classes": 5}),
    ("eva02_tiny_patch14_224", {"img_size": 28, "embed_dim": 48, "depth": 1, "num_heads": 3, "num_classes": 5}),
    ("beit_base_patch16_224", {"img_size": 32, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5}),
    ("tiny_vit_5m_224", {"depths": [1, 1], "embed_dims": [16, 32], "num_heads": [1, 1], "window_sizes": [7, 7], "num_classes": 5}),
    ("vit_tiny_patch16_224", VIT | {"depth": 2}),  # uses the tensors of a norm twice
)

NUMBERS = (0, 1, 2, 3, -1, 5, 7, 8, 16, 32, 33, 64, 1000, 4096, 16384, 57344, 1 << 24, (1 << 24) + 1, 1 << 31, 1 << 63, 10**30, 10**400)
WORDS = ("", "abc", "7", "a\nb", "x" * 3000, "{}", "[]", "null", "F16", "BF16", "F8_E4M3", "U64", "X")
LISTS = ([], {}, [1, 2], [16, 16384], [[1]], {"a": 1}, [None], [0, 0], [0, 1 << 60], [-1], [1 << 62, 0])
VALUES = (*NUMBERS, 0.5, -1.0, 1e-9, 1e308, None, True, False, *WORDS, *LISTS)
LIKELY = (True, False, None, 0, 1, 2, 4, 8, 16, 32, 0.1, "avg", "token", "", [16, 16], [2, 2])
"""Values that constructors often take."""

CONFIG_NAMES = ("mean", "std", "input_size", "label_names", "crop_pct", "features_only", "optimize", "file")


@dataclass
class Files:
    """The two files of a folder that loading reads, taken apart; changes edit a copy in place.

    ``header`` is the JSON of ``model.safetensors``; ``data`` are the bytes after it. ``whole`` changes the bytes of a file at last.
    """

    config: dict[str, Any]
    header: dict[str, Any]
    data: bytes
    whole: tuple[tuple[str, Callable[[bytes], bytes]], ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Files:
        content = (folder / "model.safetensors").read_bytes()
        length = int.from_bytes(content[:8], "little")
        return cls(json.loads((folder / "config.json").read_text()), json.loads(content[8 : 8 + length]), content[8 + length :])

    def copy(self) -> Files:
        """The same files, of which each can be changed alone."""
        config, header = json.loads(json.dumps((self.config, self.header)))
        return Files(config, header, self.data, self.whole)

    def write(self, folder: Path) -> None:
        header = json.dumps(self.header).encode()
        weights = len(header).to_bytes(8, "little") + header + self.data
        files = {"config.json": json.dumps(self.config).encode(), "model.safetensors": weights}
        for name, change in self.whole:
            files[name] = change(files[name])
        for name, content in files.items():
            (folder / name).write_bytes(content)

    @property
    def metadata(self) -> dict[str, Any]:
        return self.header["__metadata__"]

    @property
    def plan(self) -> dict[str, Any]:
        """A copy of the plan; ``set_plan`` writes it."""
        return json.loads(json.dumps(self.config["model_args"]["plan"]))

    @property
    def tensors(self) -> list[str]:
        """The names of the stored tensors."""
        return sorted(set(self.header) - {"__metadata__"})

    def set_plan(self, parts: Any) -> None:
        """Put another plan into ``config.json``, with a hash that matches."""
        self.metadata["plan_sha256"] = _sha256(canonical(parts).encode())
        self.config["model_args"] = {"base": parts.get("base"), "base_args": parts.get("base_args"), "plan": parts}

    def list_tensors(self, draw: random.Random) -> None:
        """Let the header's list of tensors be true, or as it was."""
        if draw.random() < 0.7:
            entries = {name: self.header[name] for name in self.header if name != "__metadata__"}
            found = {name: [each["dtype"], _sha256(self.data[slice(*each["data_offsets"])])] for name, each in entries.items()}
            text = canonical(found)
            self.metadata.update(tensors=text, tensors_sha256=_sha256((text + self.metadata.get("aliases", "")).encode()))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Valid:
    """A valid folder's files, and the arguments that its base's class knows."""

    name: str
    files: Files
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """A folder to load: what was changed, in words, and the files."""

    files: Files
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """``equal``: what is loaded is what the files say; ``refused`` in one sentence; or anything else, which is a fault.

    ``seconds`` are those of computing, ``growth`` the bytes by which the process's largest memory rose.
    """

    kind: str
    text: str
    seconds: float
    growth: int = 0


def valid_folders(home: Path) -> list[Valid]:
    """Save one small converted model of each base, with random weights, under ``home``."""
    made = []
    for number, (base, arguments) in enumerate(BASES):
        torch.manual_seed(number)
        model: Any = build_base(base, arguments)
        install(plan(model, base=base, base_args=arguments), model)
        if (base, arguments) == BASES[-1]:
            model.blocks[1].norm1 = model.blocks[0].norm1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        folder = home / f"valid{number}"
        flysurgery.save(model, folder)
        known = inspect.signature(type(model).__init__).parameters
        made.append(Valid(base, Files.read(folder), tuple(name for name in known if name not in ("self", "kwargs"))))
    return made


def damaged(valid: Valid, draw: random.Random) -> Case:
    """The folder with one to three changes, chosen by ``draw``."""
    files, changes = valid.files.copy(), []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        changed = files.copy()
        try:
            text = draw.choice(CHANGES)(changed, valid, draw)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError):  # an earlier change took away what this one changes
            continue
        files = changed
        changes.append(text)
    return Case(files, tuple(changes))


def outcome_of(folder: Path, case: Case, *, by_timm: bool) -> Outcome:
    """Write the case's files into the folder and load it; errors that timm raises before it calls flysurgery count as refused."""
    case.files.write(folder)
    start, before = time.process_time(), _largest_memory()
    try:
        model = timm.create_model(f"local-dir:{folder}", pretrained=True) if by_timm else flysurgery.load(folder)
    except CheckpointError as error:
        seconds, text = time.process_time() - start, str(error)
        kind = "refused" if "\n" not in text and len(text) <= MAX_MESSAGE else "no sentence"
    except Exception as error:
        seconds, text = time.process_time() - start, "".join(traceback.format_exception(error))
        ours = any("flysurgery" in Path(frame.filename).parts for frame in traceback.extract_tb(error.__traceback__))
        kind = "refused" if by_timm and not ours else "error"
    else:
        seconds = time.process_time() - start
        text = _difference(model, case.files)
        kind = "differs" if text else "equal"
    growth = _largest_memory() - before
    if kind in OUTCOMES and (seconds > MAX_SECONDS or growth > MAX_GROWTH):
        kind = "slow" if seconds > MAX_SECONDS else "large"
    return Outcome(kind, text, seconds, growth)


def _largest_memory() -> int:
    """The most bytes that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _difference(model: nn.Module, files: Files) -> str:
    """How the model is not what its files say; empty where it is."""
    aliases = json.loads(files.metadata.get("aliases", "{}"))
    for name, tensor in model.state_dict().items():
        entry = files.header.get(aliases.get(name, name))
        if entry is None:
            return f"{name} is not in the file"
        if SAFETENSORS_DTYPES[entry["dtype"]] != tensor.dtype or list(tensor.shape) != entry["shape"]:
            return f"{name} has another dtype or shape"
        if tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() != files.data[slice(*entry["data_offsets"])]:
            return f"{name} has other numbers"
    found = plan_of(model)
    if found is None or canonical(found.to_json()) != canonical(files.plan):
        return "the plan is another one"
    return ""


def set_argument(files: Files, valid: Valid, draw: random.Random) -> str:
    """Another value for an argument of the base, with matching hashes."""
    parts = files.plan
    name = draw.choice((*valid.arguments, *parts["base_args"]))
    value = draw.choice(LIKELY if draw.random() < 0.5 else VALUES)
    parts["base_args"][name] = [value] * draw.randint(1, 4) if draw.random() < 0.2 else value
    files.set_plan(parts)
    return f"argument {name} = {value!r:.60}"


def edit_json(files: Files, _valid: Valid, draw: random.Random) -> str:
    """Another value anywhere in the plan, with matching hashes, in ``config.json`` or in the header's own entries."""
    what = draw.choice((*("plan",) * 4, *("config",) * 2, *("metadata",) * 2))
    parts = {"plan": files.plan, "config": files.config, "metadata": files.metadata}[what]
    text = _edit(parts, draw)
    if what == "plan":
        files.set_plan(parts)
    elif what == "metadata":
        files.list_tensors(draw)
    return f"{what} {text}"


def add_to_config(files: Files, valid: Valid, draw: random.Random) -> str:
    """A value in ``config.json`` for a name that it may not have."""
    name, config = draw.choice((*valid.arguments, *CONFIG_NAMES)), files.config
    value = draw.choice((config, config["model_args"], config["pretrained_cfg"]))[name] = draw.choice(VALUES)
    return f"config: {name} = {value!r:.60}"


def edit_tensor(files: Files, _valid: Valid, draw: random.Random) -> str:
    """Another dtype, shape, place or name for a stored tensor."""
    name, other = draw.choice(files.tensors), draw.choice(files.tensors)
    what = draw.choice(("entry", "entry", "name", "swap"))
    if what == "entry":
        text = _edit(files.header[name], draw)
    else:
        text = other if what == "swap" else draw.choice((other, name + "x", "", "norm.weight", "x" * 2000))
        files.header[name], files.header[text] = files.header.get(text), files.header[name]
        if what == "name":
            files.header.pop(name)
    files.list_tensors(draw)
    return f"tensor {name}: {what} {text:.60}"


def edit_alias(files: Files, _valid: Valid, draw: random.Random) -> str:
    """A second name for a stored tensor, in the place of one or beside it."""
    aliases = json.loads(files.metadata.get("aliases", "{}"))
    name, other = draw.choice((*files.tensors, *aliases)), draw.choice((*files.tensors, "nowhere"))
    if draw.random() < 0.5:
        files.header.pop(name, None)
    aliases[name] = draw.choice((other, other, 3, None))
    files.metadata["aliases"] = canonical(aliases)
    files.list_tensors(draw)
    return f"alias {name} -> {aliases[name]}"


def edit_data(files: Files, _valid: Valid, draw: random.Random) -> str:
    """Another byte among the weights."""
    place = draw.randrange(len(files.data))
    files.data = _flipped(files.data, place, draw.randrange(8))
    files.list_tensors(draw)
    return f"data: a bit of byte {place}"


def edit_bytes(files: Files, _valid: Valid, draw: random.Random) -> str:
    """A file cut short, grown, or with other bytes near its start."""
    name, number = draw.choice(("config.json", "model.safetensors")), draw.randrange(1 << 30)
    ways: dict[str, Callable[[bytes], bytes]] = {
        "cut": lambda content: content[: number % (len(content) + 1)],
        "grow": lambda content: content + bytes(number % 100),
        "flip": lambda content: _flipped(content, number % min(len(content), 3000), number % 8),
        "nest": lambda _content: b"[" * (number % 100_000),
    }
    what = draw.choice(tuple(ways))
    files.whole = (*files.whole, (name, ways[what]))
    return f"{name}: {what} {number}"


def _flipped(content: bytes, place: int, bit: int) -> bytes:
    return content[:place] + bytes([content[place] ^ (1 << bit)]) + content[place + 1 :]


def _edit(value: Any, draw: random.Random) -> str:
    """Change one entry anywhere within lists and objects, in place; the path to it, and what stands there now."""
    path: list[str] = []
    while True:
        key = draw.choice(sorted(value)) if isinstance(value, dict) else draw.randrange(len(value))
        path.append(str(key))
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
        return f"{'/'.join(path)}: drop"
    elif what == "twice" and isinstance(value, dict):
        value[f"{key}x"] = inner
    elif what == "twice" and isinstance(value, list):
        value.append(inner)
    else:
        value[key] = draw.choice(VALUES)
    return f"{'/'.join(path)}: {what} {value[key]!r:.60}"


CHANGES = (*(set_argument,) * 6, *(edit_json,) * 8, *(edit_tensor,) * 3, add_to_config, edit_alias, edit_data, edit_bytes)
"""All kinds of changes, some more often than others."""
