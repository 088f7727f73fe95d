"""Give a model the weights of a file."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from timm.models import clean_state_dict
from torch import Tensor, nn

from flysurgery.checkpoint.base import first_line
from flysurgery.checkpoint.compare import difference
from flysurgery.checkpoint.header import SCHEMA_KEY
from flysurgery.checkpoint.reader import open_tensors
from flysurgery.checkpoint.regular import open_regular
from flysurgery.errors import CheckpointError, ModelError

WRAPPERS = ("state_dict", "model")
"""Entries under which training scripts keep the weights in a torch file."""


def load_weights(model: nn.Module, file: str | Path) -> None:
    """Copy the tensors of a ``.safetensors`` file, or of a file of ``torch.save``, into ``model``.

    A torch file is read with ``weights_only=True``: a state_dict, alone or under "state_dict" or "model". Every tensor of the
    model must be there in its shape, and no other; prefixes of wrappers ("module.", "_orig_mod.") are dropped. Values
    are cast to the model's dtypes. Unless everything fits, nothing is copied.

    Raises:
        CheckpointError: the file is missing or damaged, or holds Python objects besides tensors.
        ModelError: missing, unknown or misshapen tensors; the message gives their number and the first few names.
    """
    path = Path(file)
    found = clean_state_dict(_read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path))
    wrong = difference(
        {name: tuple(t.shape) for name, t in found.items()}, {name: tuple(t.shape) for name, t in model.state_dict().items()}
    )
    if wrong:
        raise ModelError(f"{path} does not hold the weights of this {type(model).__name__}: {wrong}; nothing was loaded")
    model.load_state_dict(found, strict=True)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    with open_tensors(path) as file:
        if SCHEMA_KEY in (file.metadata or {}):
            raise ModelError(f"{path} holds a converted model, not the weights of a dense one; load its folder, {path.parent}, as a model")
        return {name: file.tensor(name, torch.device("cpu"), None) for name in file.shapes}


def _read_torch(path: Path) -> dict[str, Tensor]:
    try:
        with open_regular(path):  # opening a pipe would wait for ever
            pass
        # timm's training checkpoints hold their command line as a Namespace, which is plain data.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no file {path}") from error
    except pickle.UnpicklingError as error:
        advice = "write one with torch.save(model.state_dict(), FILE)"
        raise CheckpointError(f"{path} is no file of tensors alone, and Python objects are never unpickled; {advice}") from error
    except Exception as error:  # torch and zipfile raise many kinds for a file that is damaged or another format
        raise CheckpointError(f"{path} cannot be read as a torch file: {first_line(error)}") from error
    for name in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not _is_state(content):
        raise CheckpointError(f"{path} holds no state_dict: expected tensors by name, alone or under 'state_dict' or 'model'")
    return dict(content)


def _is_state(content: object) -> bool:
    if not isinstance(content, Mapping) or not content:
        return False
    return all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items())


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
