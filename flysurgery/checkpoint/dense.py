"""Dense models: their weights in files, and local folders in timm's own layout, read and written."""

import argparse
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from timm.models import clean_state_dict
from torch import Tensor, nn

from flysurgery.checkpoint.base import ENTRY_POINT, TRANSFORMERS, build_base, check_base, without_tag
from flysurgery.checkpoint.config import CLAIMS, PROCESSOR, data_config, describe_data, processor_of, read_config
from flysurgery.checkpoint.files import check_target, json_text, new_folder, open_regular, open_tensors
from flysurgery.checkpoint.load import SCHEMA_KEY
from flysurgery.checkpoint.tensors import difference
from flysurgery.errors import CheckpointError, ModelError, raised_as

WRAPPERS = ("state_dict", "model")
"""Entries under which training scripts keep the weights in a torch file."""

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


def load_weights(model: nn.Module, file: str | Path) -> None:
    """Copy the tensors of a ``.safetensors`` file, or of a file of ``torch.save``, into ``model``, cast to its dtypes.

    A torch file is read with ``weights_only=True``: a state_dict, alone or under "state_dict" or "model". Every tensor of the model must
    be there in its shape, and no other; prefixes of wrappers ("module.", "_orig_mod.") are dropped. Unless all fits, nothing is copied.

    Raises:
        CheckpointError: the file is missing or damaged, or holds Python objects besides tensors.
        ModelError: missing, unknown or misshapen tensors; the message gives their number and the first few names.
    """
    path = Path(file)
    found = clean_state_dict(_read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path))
    wrong = difference(found, model.state_dict())
    if wrong:
        raise ModelError(f"{path} does not hold the weights of this {type(model).__name__}: {wrong}; nothing was loaded")
    model.load_state_dict(found, strict=True)


def load_dense(folder: str | Path) -> tuple[nn.Module, str, dict[str, Any]]:
    """Open a dense model as ``timm.models.save_for_hf`` and the hub's timm repositories hold it: ``(model, base, base_args)``.

    ``build_base(base, base_args)`` builds the model again without its weights. It is in eval mode, and its ``pretrained_cfg`` says how
    its images are prepared, as in ``config.json``, but not whose weights it has.

    Raises:
        CheckpointError: no such folder, a file of it is missing or damaged, or its model is a converted one.
        ModelError: the model cannot be built, or the weights are not its own.
    """
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}")
    config = read_config(path)
    base = config["architecture"]
    if base == ENTRY_POINT:
        raise CheckpointError(f"{path} holds a converted model; open it with flysurgery.load")
    base_args = _arguments(base, config)
    model = build_base(base, base_args)
    weights = next((path / name for name in WEIGHT_FILES if (path / name).is_file()), None)
    if weights is None:
        raise CheckpointError(f"{path} holds no weights: expected {' or '.join(WEIGHT_FILES)}")
    load_weights(model, weights)
    # timm writes the tag and the licence of the architecture's published weights, whatever weights are saved
    describe_data(model, {name: value for name, value in config["pretrained_cfg"].items() if name not in CLAIMS})
    return model.eval(), base, base_args


def check_dense_folder(folder: str | Path, *, force: bool) -> Path:
    """The folder with symbolic links followed, once it is sure that ``save_dense`` may write there (CheckpointError)."""
    return check_target(folder, lambda target: (target / WEIGHT_FILES[0]).is_file() and (target / "config.json").is_file(), force=force)


def save_dense(model: nn.Module, folder: str | Path, base: str, base_args: Mapping[str, Any], *, force: bool) -> None:
    """Write a folder that timm opens as ``local-dir:DIR`` and flysurgery as a MODEL; models of transformers as ``save_pretrained`` does.

    The folder appears complete or not at all. Tensors that the model uses twice are written twice, as timm reads them.

    Raises:
        CheckpointError: the folder exists and may not be replaced, or the system refuses to write.
    """
    target = check_dense_folder(folder, force=force)
    config = {"architecture": without_tag(base), "model_args": dict(base_args), "pretrained_cfg": data_config(model, base_args)}
    with new_folder(target, force=force) as fresh:
        if base.startswith(TRANSFORMERS):
            _write_by_transformers(model, fresh)
            return
        weights = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict().items()}
        save_file(weights, fresh / WEIGHT_FILES[0], metadata={"format": "pt"})
        (fresh / "config.json").write_text(json_text(config), encoding="utf-8")


def _write_by_transformers(model: Any, folder: Path) -> None:
    """Write a dense model as ``save_pretrained`` does, with the settings of its image processor."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()
    if processor_of(model):
        (folder / PROCESSOR).write_text(json_text(processor_of(model)), encoding="utf-8")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    with open_tensors(path) as file:
        if SCHEMA_KEY in file.metadata:
            raise ModelError(f"{path} holds a converted model, not the weights of a dense one; load its folder, {path.parent}, as a model")
        return {name: file.tensor(name) for name in file.shapes}


def _read_torch(path: Path) -> dict[str, Tensor]:
    # torch and zipfile raise many kinds for a file that is damaged or another format
    with raised_as(CheckpointError, f"{path} cannot be read as a torch file"):
        try:
            with open_regular(path):  # opening a pipe would wait for ever
                pass
            # timm's training checkpoints hold their command line as a Namespace, which is plain data.
            with torch.serialization.safe_globals([argparse.Namespace]):
                content: Any = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError as error:
            raise CheckpointError(f"there is no file {path}") from error
        except pickle.UnpicklingError as error:
            advice = "write one with torch.save(model.state_dict(), FILE)"
            raise CheckpointError(f"{path} is no file of tensors alone, and Python objects are never unpickled; {advice}") from error
    for name in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not (isinstance(content, Mapping) and content and all(isinstance(tensor, Tensor) for tensor in content.values())):
        raise CheckpointError(f"{path} holds no state_dict: expected tensors by name, alone or under 'state_dict' or 'model'")
    return {str(name): tensor for name, tensor in content.items()}


def _arguments(base: str, config: dict[str, Any]) -> dict[str, Any]:
    """The arguments that timm would build the folder's model with: those it was saved with, over what its data say."""
    data = config["pretrained_cfg"]
    found: dict[str, Any] = {name: config.get(name, data.get(name)) for name in ("num_classes", "global_pool")}
    size = data.get("input_size")
    if isinstance(size, list) and len(size) == 3:
        found["in_chans"] = size[0]
        if data.get("fixed_input_size"):
            found["img_size"] = size[1:]
    check_base(base)
    known = timm.get_pretrained_cfg(base)
    defaults: dict[str, Any] = {}
    if known is not None:
        defaults = {"num_classes": known.num_classes, "in_chans": known.input_size[0], "img_size": list(known.input_size[1:])}
    differing = {name: value for name, value in found.items() if value is not None and value != defaults.get(name)}
    return differing | dict(config["model_args"])
