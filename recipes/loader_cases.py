"""Damaged and forged checkpoints: small valid folders, changes to their files, and what must come of loading the result."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import random
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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

MAX_SECONDS = 1.0
"""The most computing that loading a damaged folder may take."""

MAX_MESSAGE = 400

VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5}
SIMPLE_VIT = {"image_size": 16, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 1, "heads": 2, "mlp_dim": 64}
BASES: Mapping[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": VIT,
    "vit_pytorch.simple_vit:SimpleViT": SIMPLE_VIT,
    "vit_pytorch:ViT": SIMPLE_VIT,
    "swin_tiny_patch4_window7_224": {"img_size": 56, "embed_dim": 16, "depths": [2], "num_heads": [2], "num_classes": 5},
    "eva02_tiny_patch14_224": {"img_size": 28, "embed_dim": 48, "depth": 1, "num_heads": 3, "num_classes": 5},
    "beit_base_patch16_224": {"img_size": 32, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5},
    "tiny_vit_5m_224": {"depths": [1, 1], "embed_dims": [16, 32], "num_heads": [1, 1], "window_sizes": [7, 7], "num_classes": 5},
}

NUMBERS = (0, 1, 2, 3, -1, 5, 7, 8, 16, 32, 33, 64, 1000, 4096, 16384, 57344, 1 << 24, (1 << 24) + 1, 1 << 31, 1 << 63, 10**30, 10**400)
OTHERS = (
    0.5,
    -1.0,
    1e-9,
    1e308,
    None,
    True,
    False,
    "",
    "abc",
    "7",
    "a\nb",
    "x" * 3000,
    [],
    {},
    [1, 2],
    [16, 16384],
    [[1]],
    {"a": 1},
    [None],
)
VALUES = (*NUMBERS, *OTHERS)
LIKELY = (True, False, None, 0, 1, 2, 4, 8, 16, 32, 0.1, "avg", "token", "", [16, 16], [2, 2])
"""Values that constructors often take."""


@dataclass(frozen=True)
class Files:
    """The two files of a folder that loading reads, taken apart.

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

    def write(self, folder: Path) -> None:
        header = json.dumps(self.header).encode()
        files = {
            "config.json": json.dumps(self.config).encode(),
            "model.safetensors": len(header).to_bytes(8, "little") + header + self.data,
        }
        for name, change in self.whole:
            files[name] = change(files[name])
        for name, content in files.items():
            (folder / name).write_bytes(content)

    @property
    def metadata(self) -> dict[str, Any]:
        return self.header["__metadata__"]


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
    changes: tuple[str, ...] = field(default_factory=tuple)


@dataclass(frozen=True)
class Outcome:
    """``equal``: what is loaded is what the files say; ``refused`` in one sentence; or anything else, which is a fault."""

    kind: str
    text: str
    seconds: float


def valid_folders(home: Path) -> list[Valid]:
    """Save one small converted model of each base, with random weights, under ``home``; another one uses tensors twice."""
    made = []
    for number, (base, arguments) in enumerate([*BASES.items(), ("vit_tiny_patch16_224", VIT | {"depth": 2})]):
        torch.manual_seed(number)
        model = build_base(base, arguments)
        install(plan(model, base=base, base_args=arguments), model)
        if number == len(BASES):
            _share(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        folder = home / f"valid{number}"
        flysurgery.save(model, folder)
        known = inspect.signature(type(model).__init__).parameters
        made.append(Valid(base, Files.read(folder), tuple(name for name in known if name not in ("self", "kwargs"))))
    return made


def _share(model: Any) -> None:
    model.blocks[1].norm1 = model.blocks[0].norm1


def damaged(valid: Valid, draw: random.Random) -> Case:
    """The folder with one to three changes, chosen by ``draw``."""
    files, changes = copy.deepcopy(valid.files), []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        change = draw.choice(CHANGES)
        try:
            files, text = change(files, valid, draw)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError):  # an earlier change took away what this one changes
            continue
        changes.append(text)
    return Case(files, tuple(changes))


def outcome_of(folder: Path, case: Case, *, by_timm: bool) -> Outcome:
    """Write the case's files into the folder and load it; errors that timm raises before it calls flysurgery count as refused."""
    case.files.write(folder)
    start = time.process_time()
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
    return Outcome(kind if seconds <= MAX_SECONDS or kind == "error" else "slow", text, seconds)


def _difference(model: nn.Module, files: Files) -> str:
    """How the model is not what its files say; empty where it is."""
    aliases = json.loads(files.metadata.get("aliases", "{}"))
    for name, tensor in model.state_dict().items():
        entry = files.header.get(aliases.get(name, name))
        if entry is None:
            return f"{name} is not in the file"
        start, stop = entry["data_offsets"]
        stored = (
            torch.frombuffer(bytearray(files.data[start:stop]), dtype=torch.uint8) if stop > start else torch.empty(0, dtype=torch.uint8)
        )
        if SAFETENSORS_DTYPES[entry["dtype"]] != tensor.dtype or list(tensor.shape) != entry["shape"]:
            return f"{name} has another dtype or shape"
        if not torch.equal(tensor.contiguous().reshape(-1).view(torch.uint8), stored):
            return f"{name} has other numbers"
    found = plan_of(model)
    if found is None or canonical(found.to_json()) != files.metadata["plan"]:
        return "the plan is another one"
    return ""


def set_argument(files: Files, valid: Valid, draw: random.Random) -> tuple[Files, str]:
    """Another value for an argument of the base, with matching hashes."""
    parts = json.loads(files.metadata["plan"])
    name = draw.choice((*valid.arguments, *parts["base_args"]))
    value = draw.choice(LIKELY if draw.random() < 0.5 else VALUES)
    parts["base_args"][name] = [value] * draw.randint(1, 4) if draw.random() < 0.2 else value
    return _with_plan(files, parts), f"argument {name} = {value!r:.60}"


def edit_plan(files: Files, valid: Valid, draw: random.Random) -> tuple[Files, str]:
    """Another value anywhere in the plan, with matching hashes."""
    parts = json.loads(files.metadata["plan"])
    text = _edit(parts, draw)
    return _with_plan(files, parts), f"plan {text}"


def edit_config(files: Files, valid: Valid, draw: random.Random) -> tuple[Files, str]:
    """Another value anywhere in ``config.json``."""
    config = copy.deepcopy(files.config)
    if draw.random() < 0.3:
        where = draw.choice((config, config["model_args"], config["pretrained_cfg"]))
        name = draw.choice((*valid.arguments, "mean", "std", "input_size", "label_names", "crop_pct", "features_only", "optimize", "file"))
        where[name] = draw.choice(VALUES)
        return replace(files, config=config), f"config: {name} = {where[name]!r:.60}"
    return replace(files, config=config), f"config {_edit(config, draw)}"


def edit_metadata(files: Files, valid: Valid, draw: random.Random) -> tuple[Files, str]:
    """Another text for an entry of the header, or none."""
    header = copy.deepcopy(files.header)
    entries = header["__metadata__"]
    name = draw.choice((*sorted(entries), "aliases"))
    if draw.random() < 0.3:
        entries.pop(name)
        return replace(files, header=header), f"metadata without {name}"
    text = entries.get(name, "{}")
    place = draw.randrange(len(text) + 1)
    entries[name] = draw.choice(
        (text[:place], text[place:], text[:place] + draw.choice('0{["x,}') + text[place + 1 :], "{}", "[]", "null", "1", "")
    )
    return _listed(replace(files, header=header), draw), f"metadata {name} = {entries[name]!r:.60}"


def edit_tensor(files: Files, valid: Valid, draw: random.Random) -> tuple[Files, str]:
    """Another dtype, shape, place or name for a stored tensor."""
    header = copy.deepcopy(files.header)
    names = sorted(set(header) - {"__metadata__"})
    name, other = draw.choice(names), draw.choice(names)
    entry = header[name]
    what = draw.choice(("dtype", "shape", "data_offsets", "name", "drop", "swap"))
    if what == "dtype":
        entry["dtype"] = draw.choice((*SAFETENSORS_DTYPES, "F8_E4M3", "U64", "X", 3))
    elif what == "shape":
        shape = entry["shape"]
        entry["shape"] = draw.choice((shape[::-1], [*shape, 1], [1, *shape], shape[1:], [-1], [1 << 62, 0], [draw.choice(NUMBERS)], "abc"))
    elif what == "data_offsets":
        entry["data_offsets"] = draw.choice(([0, 0], [0, 1 << 60], [entry["data_offsets"][1], entry["data_offsets"][0]], [4], None))
    elif what == "name":
        header[draw.choice((other, name + "x", "", "norm.weight", "x" * 2000))] = header.pop(name)
    elif what == "drop":
        header.pop(name)
    else:
        header[name], header[other] = header[other], header[name]
    return _listed(replace(files, header=header), draw), f"tensor {name}: {what}, {other}"


def edit_alias(files: Files, valid: Valid, draw: random.Random) -> tuple[Files, str]:
    """A second name for a stored tensor, in the place of one or beside it."""
    header = copy.deepcopy(files.header)
    names = sorted(set(header) - {"__metadata__"})
    aliases = json.loads(header["__metadata__"].get("aliases", "{}"))
    name, other = draw.choice((*names, *aliases)), draw.choice((*names, "nowhere"))
    if draw.random() < 0.5:
        header.pop(name, None)
    aliases[name] = draw.choice((other, other, 3, None))
    header["__metadata__"]["aliases"] = canonical(aliases)
    return _listed(replace(files, header=header), draw), f"alias {name} -> {aliases[name]}"


def edit_data(files: Files, valid: Valid, draw: random.Random) -> tuple[Files, str]:
    """Another byte among the weights."""
    place = draw.randrange(len(files.data))
    data = files.data[:place] + bytes([files.data[place] ^ (1 << draw.randrange(8))]) + files.data[place + 1 :]
    return _listed(replace(files, data=data), draw), f"data: a bit of byte {place}"


def edit_bytes(files: Files, valid: Valid, draw: random.Random) -> tuple[Files, str]:
    """A file cut short, grown, or with other bytes near its start."""
    name, number = draw.choice(("config.json", "model.safetensors")), draw.randrange(1 << 30)
    what = draw.choice(("cut", "grow", "flip", "nest"))

    def change(content: bytes) -> bytes:
        place = number % (len(content) + 1)
        if what == "cut":
            return content[:place]
        if what == "grow":
            return content + bytes(number % 100)
        if what == "nest":
            return b"[" * (number % 100_000)
        place = number % min(len(content), 3000)
        return content[:place] + bytes([content[place] ^ (1 << (number % 8))]) + content[place + 1 :]

    return replace(files, whole=(*files.whole, (name, change))), f"{name}: {what} {number}"


CHANGES = (
    *(set_argument,) * 6,
    *(edit_plan,) * 4,
    *(edit_config,) * 3,
    *(edit_tensor,) * 3,
    *(edit_metadata,) * 2,
    *(edit_alias, edit_data, edit_bytes),
)
"""All kinds of changes, some more often than others."""


def _with_plan(files: Files, parts: Any) -> Files:
    """The files with another plan, in the header and in ``config.json``, and with matching hashes."""
    header, config = copy.deepcopy(files.header), copy.deepcopy(files.config)
    base, base_args = parts.get("base"), parts.get("base_args")
    text, description = canonical(parts), canonical({"base": base, "base_args": base_args})
    header["__metadata__"].update(
        plan=text,
        plan_sha256=hashlib.sha256(text.encode()).hexdigest(),
        base=base if isinstance(base, str) else "",
        base_sha256=hashlib.sha256(description.encode()).hexdigest(),
    )
    config["model_args"] = {"base": base, "base_args": base_args, "plan": parts}
    return replace(files, header=header, config=config)


def _listed(files: Files, draw: random.Random) -> Files:
    """The files with a header whose list of tensors is true, or none, or left as it was."""
    choice = draw.choice(("true", "true", "none", "as it was"))
    if choice == "as it was":
        return files
    header = copy.deepcopy(files.header)
    entries = header["__metadata__"]
    if choice == "none":
        entries.pop("tensors", None)
        entries.pop("tensors_sha256", None)
        return replace(files, header=header)
    listed = {
        name: [entry["dtype"], hashlib.sha256(files.data[slice(*entry["data_offsets"])]).hexdigest()]
        for name, entry in header.items()
        if name != "__metadata__"
    }
    entries["tensors"] = canonical(listed)
    entries["tensors_sha256"] = hashlib.sha256((entries["tensors"] + entries.get("aliases", "")).encode()).hexdigest()
    return replace(files, header=header)


def _edit(value: Any, draw: random.Random) -> str:
    """Change one entry anywhere within lists and objects, in place; the path to it, and what stands there now."""
    path: list[str] = []
    while True:
        key = draw.choice(sorted(value)) if isinstance(value, dict) else draw.randrange(len(value))
        path.append(str(key))
        inner = value[key]
        if isinstance(inner, dict | list) and inner and draw.random() < 0.9:
            value = inner
            continue
        what = draw.choice(("set", "set", "set", "drop", "twice"))
        if what == "set":
            value[key] = draw.choice(VALUES)
        elif what == "drop":
            del value[key]
        elif isinstance(value, list):
            value.append(inner)
        else:
            value[f"{key}x"] = inner
        return f"{'/'.join(path)}: {what} {value[key]!r:.60}" if what == "set" else f"{'/'.join(path)}: {what}"
