"""Write a converted model into a self-describing folder."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from flysurgery.checkpoint.card import model_card
from flysurgery.checkpoint.config import config_of
from flysurgery.checkpoint.current import changed_buffers, current_plan
from flysurgery.checkpoint.folder import check_target, new_folder
from flysurgery.checkpoint.hashes import sha256_of_each
from flysurgery.checkpoint.header import Header, StoredTensor
from flysurgery.checkpoint.reader import is_converted
from flysurgery.checkpoint.tensors import SAFETENSORS_DTYPES, Stored, collect, read_dtype
from flysurgery.errors import CheckpointError
from flysurgery.surgery import LayerPlan, Plan

if TYPE_CHECKING:
    from flysurgery.surgery import Report

SLACK_BYTES = 1 << 20
"""Room for the folder's small files, when the free space is looked at before writing."""


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    force: bool = False,
    report: Report | Mapping[str, Any] | None = None,
    accuracy: Mapping[str, Any] | None = None,
    optimize: bool = False,
) -> None:
    """Save a converted model as ``model.safetensors``, ``config.json``, ``report.json`` and ``README.md``.

    ``load(folder)`` then gives outputs bit-equal to the model's; with ``dtype``, to those of ``model.to(dtype)``. Before
    anything is written the base is rebuilt without weights, to be sure of that. Tensors that the model uses twice are
    stored once. The folder appears complete or not at all; ``force`` replaces an older checkpoint, and nothing else.
    ``report`` is what ``apply`` or ``convert`` returned, or the content of an earlier folder's ``report.json`` with what has come
    since; without it ``report.json`` has the layers without their errors.
    ``accuracy`` is what an ``evaluation.Comparison`` gives as JSON; it goes into ``report.json`` and the model card.
    The folder claims no licence and no published weights, unless it is known that the weights came from there: the model was read from a
    folder that says so, or the command line loaded them.
    With ``optimize`` the folder says that ``load`` is to fuse groups of layers on CUDA; the weights are the same.

    Raises:
        CheckpointError: the model is not converted, its base is not known or does not rebuild it, the folder exists, or the
            system refuses to write; nothing is left behind then.
        OptionError: a dtype that is none of float16, bfloat16, float32 and float64.
    """
    if not isinstance(folder, str | Path):
        raise CheckpointError(f"expected a model and then a folder, got {type(model).__name__} and {type(folder).__name__}")
    target = check_folder(folder, force=force)
    storage_dtype = read_dtype(dtype)
    plan = current_plan(model)
    stored = collect({**model.state_dict(), **changed_buffers(model, plan, storage_dtype)}, storage_dtype)
    _check_space(target, stored.nbytes)
    facts = report_json(plan, report, accuracy)
    dtypes = sorted({_name(tensor.dtype) for tensor in stored.tensors.values() if tensor.is_floating_point()})
    config = config_of(model, plan, optimize=optimize)
    with new_folder(target, force=force) as fresh:
        _write_json(fresh / "config.json", config)
        _write_json(fresh / "report.json", facts)
        (fresh / "README.md").write_text(model_card(target.name, plan, facts, ", ".join(dtypes), config), encoding="utf-8")
        _write_weights(fresh / "model.safetensors", stored, plan)
        # safetensors makes files that only their owner may read; these are to be read like their neighbours.
        (fresh / "model.safetensors").chmod((fresh / "config.json").stat().st_mode)


def check_folder(folder: str | Path, *, force: bool = False) -> Path:
    """The folder with symbolic links followed, once it is sure that ``save`` may write there.

    Raises:
        CheckpointError: it exists and may not be replaced; the message says why and what to do.
    """
    try:
        target = Path(folder).expanduser().resolve()
        check_target(target, replaceable=is_converted(target), force=force)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written to: {error.strerror or error}") from error
    return target


def check_report(plan: Plan, report: Mapping[str, Any]) -> None:
    """See that ``save`` can write what an earlier folder's report.json holds.

    Raises:
        CheckpointError: it cannot.
    """
    try:
        model_card("model", plan, json.loads(json.dumps(report_json(plan, report, None))), "float32", {})
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError("report.json is damaged, and its content is to go on with the model; mend it, or move it away") from error


def report_json(plan: Plan, report: Report | Mapping[str, Any] | None, accuracy: Mapping[str, Any] | None) -> dict[str, Any]:
    """What ``report.json`` holds: a row for each linear layer, what is known of totals and accuracy, the seed, and the versions."""
    given = {} if report is None else report if isinstance(report, Mapping) else report.to_json()
    facts: dict[str, Any] = {"rows": [_row(layer) for layer in plan.layers]} | dict(given)
    versions = {name: metadata.version(name) for name in ("torch", "timm", "vit-pytorch", "safetensors")}
    if accuracy is not None:
        facts["accuracy"] = dict(accuracy)
    return facts | {"seed": torch.initial_seed(), "versions": {"flysurgery": _version(), "python": platform.python_version()} | versions}


def _row(layer: LayerPlan) -> dict[str, Any]:
    return {
        "fqn": layer.fqn,
        "role": layer.role,
        "status": layer.status,
        "reason": layer.reason and {"code": layer.reason.code, "text": layer.reason.text},
        "size": layer.size,
        "architecture": layer.architecture,
        "params_before": layer.params_before,
        "params_after": layer.params_after,
        "flops_before": layer.flops_before,
        "flops_after": layer.flops_after,
    }


def _write_weights(file: Path, stored: Stored, plan: Plan) -> None:
    dtypes = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
    tensors = {
        name: StoredTensor(dtypes[stored.tensors[name].dtype], sha256)
        for name, sha256 in sha256_of_each(stored.tensors, stored.tensors.__getitem__)
    }
    save_file(dict(stored.tensors), file, metadata=Header(plan, stored.aliases, tensors).to_metadata(_version()))


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _check_space(target: Path, nbytes: int) -> None:
    existing = next(parent for parent in target.parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < nbytes + SLACK_BYTES:
        raise CheckpointError(
            f"{target} needs {nbytes / 1e6:.1f} MB and {existing} has {free / 1e6:.1f} MB left; make room or choose another disk"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _version() -> str:
    from flysurgery import __version__  # the package is complete by the time that anything is saved

    return __version__
