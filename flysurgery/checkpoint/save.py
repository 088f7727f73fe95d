"""Write a converted model into a self-describing folder, once it is sure that it can be loaded again."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flysurgery.checkpoint.base import build_shell
from flysurgery.checkpoint.card import model_card
from flysurgery.checkpoint.config import PROCESSOR, config_of, processor_of
from flysurgery.checkpoint.files import read_json
from flysurgery.checkpoint.folder import check_space, check_target, new_folder, write_json
from flysurgery.checkpoint.load import HUB, SCHEMA, SCHEMA_KEY, is_converted
from flysurgery.checkpoint.meter import Limits
from flysurgery.checkpoint.tensors import (
    SAFETENSORS_DTYPES,
    bytes_of,
    canonical,
    collect,
    difference,
    read_dtype,
    sha256_of_each,
    sha256_of_text,
    single_float_dtype,
    unstored_buffers,
)
from flysurgery.errors import CheckpointError, ModelError, PlanError, raised_as
from flysurgery.surgery import Plan, Row, as_json, is_of_transformers, plan_of, transformers_arguments

if TYPE_CHECKING:
    from flysurgery.surgery import Report

SLACK_BYTES = 1 << 20
"""Room for the folder's small files, when the free space is looked at before writing."""

ADVICE = "give plan or convert the base= and base_args= that the model was built with"


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    force: bool = False,
    report: Report | Mapping[str, Any] | None = None,
    accuracy: Mapping[str, Any] | None = None,
) -> None:
    """Save a converted model as ``model.safetensors``, ``config.json``, ``report.json`` and ``README.md``.

    ``load(folder)`` then gives outputs bit-equal to the model's; with ``dtype``, to those of ``model.to(dtype)``. Before
    anything is written the base is rebuilt without weights, to be sure of that. Tensors that the model uses twice are stored twice, and
    are one again after loading if its constructor ties them. The folder appears complete or not at all; ``force`` replaces an older
    checkpoint, and nothing else.
    ``report`` is what ``apply`` or ``convert`` returned, or the content of an earlier folder's ``report.json`` with what has come
    since; without it ``report.json`` has the layers without their errors.
    ``accuracy`` has ``data``, the accuracy ``before`` and that ``after``, as JSON; it goes into ``report.json`` and the model card.
    The folder claims no licence and no published weights, unless it is known that the weights came from there: the command line loaded
    them, or the model was read from a converted folder that says so.

    Raises:
        CheckpointError: the model is not converted, its base is not known or does not rebuild it, the folder exists, or the
            system refuses to write; nothing is left behind then.
        OptionError: a dtype that is none of float16, bfloat16, float32 and float64.
    """
    if not isinstance(folder, str | Path):
        raise CheckpointError(f"expected a model and then a folder, got {type(model).__name__} and {type(folder).__name__}")
    target = check_folder(folder, force=force)
    storage_dtype = read_dtype(dtype)
    plan, shell = _rebuilt(model)
    tensors = collect({**model.state_dict(), **_changed_buffers(model, shell, storage_dtype)}, storage_dtype)
    check_space(target, sum(tensor.nbytes for tensor in tensors.values()) + SLACK_BYTES)
    facts = _report_json(plan, report, accuracy)
    floats = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values() if tensor.is_floating_point()})
    config = config_of(model, plan)
    header = _header(plan, tensors)
    with new_folder(target, force=force) as fresh:
        write_json(fresh / "config.json", config)
        write_json(fresh / "report.json", facts)
        if processor_of(model):
            write_json(fresh / PROCESSOR, processor_of(model))
        (fresh / "README.md").write_text(model_card(target.name, plan, facts, ", ".join(floats), config), encoding="utf-8")
        save_file(tensors, fresh / "model.safetensors", metadata=header)


def _header(plan: Plan, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """What the file of weights says of them and of the plan: the dtype of each tensor, and the hashes of all."""
    names = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
    hashes = sha256_of_each(tensors, tensors.__getitem__)
    listed = canonical({name: (names[tensor.dtype], hashes[name]) for name, tensor in tensors.items()})
    return {
        "format": "pt",
        SCHEMA_KEY: SCHEMA,
        "version": _version(),
        "plan_sha256": sha256_of_text(canonical(plan.to_json())),
        "tensors": listed,
        "tensors_sha256": sha256_of_text(listed),
    }


def push_to_hub(model: nn.Module, repository: str, *, private: bool = False, token: str | None = None, **options: Any) -> str:
    """Save a converted model into the repository ``user/name`` of the Hugging Face hub, which is made where there is none.

    ``flysurgery.load("hf-hub:user/name")`` opens it, and ``timm.create_model("hf-hub:user/name", pretrained=True)`` for models of timm.
    ``options`` are those of ``save``. ``token`` is the hub's, by default that of ``hf auth login``. Gives the address of the commit.

    Raises:
        CheckpointError: as ``save``, or the hub refuses.
    """
    from huggingface_hub import HfApi

    name = repository.removeprefix(HUB)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / name.rpartition("/")[2]
        save(model, folder, **options)
        with raised_as(CheckpointError, f"the model cannot be pushed to {name}"):
            api = HfApi(token=token)
            made = api.create_repo(name, private=private, exist_ok=True)
            return str(api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Add a model converted by flysurgery"))


def check_folder(folder: str | Path, *, force: bool = False) -> Path:
    """The folder with symbolic links followed, once it is sure that ``save`` may write there (CheckpointError)."""
    return check_target(folder, is_converted, force=force)


def read_report(folder: Path, plan: Plan) -> dict[str, Any]:
    """What a folder's ``report.json`` holds, for ``save`` to go on from; nothing where there is none. A damaged one is refused."""
    file, advice = folder / "report.json", "its content is to go on with the model; mend it, or move it away"
    try:
        found = read_json(file)
    except FileNotFoundError:
        return {}
    except CheckpointError as error:
        raise CheckpointError(f"{error}, and {advice}") from error
    if not isinstance(found, dict) or not isinstance(found.get("rows", []), list):
        raise CheckpointError(f"{file} must hold a JSON object with a list of rows, and {advice}")
    with raised_as(CheckpointError, f"{file} is damaged, and {advice}"):
        model_card("model", plan, _report_json(plan, found, None), "float32", {})
    return found


def _report_json(plan: Plan, report: Report | Mapping[str, Any] | None, accuracy: Mapping[str, Any] | None) -> dict[str, Any]:
    """What ``report.json`` holds: a row for each linear layer, what is known of totals and accuracy, the seed, and the versions."""
    given = {} if report is None else report if isinstance(report, Mapping) else report.to_json()
    facts: dict[str, Any] = {"rows": as_json([Row.of(layer) for layer in plan.layers])} | dict(given)
    if accuracy is not None:
        facts["accuracy"] = dict(accuracy)
    versions = {name: metadata.version(name) for name in ("torch", "timm", "vit-pytorch", "safetensors")}
    return facts | {"seed": torch.initial_seed(), "versions": {"flysurgery": _version(), "python": platform.python_version()} | versions}


def _version() -> str:
    from flysurgery import __version__  # the package is complete by the time that anything is saved

    return __version__


def _rebuilt(model: nn.Module) -> tuple[Plan, nn.Module]:
    """The plan that rebuilds ``model``, checked by rebuilding it without its weights.

    Where a timm model got another head or input size after it was built (``reset_classifier``, ``set_input_size``), the
    base's arguments follow it.
    """
    plan = plan_of(model)
    if plan is None:
        raise CheckpointError("the model is not converted, so there is no plan to save; convert it first, or save it with timm")
    try:
        plan = replace(plan, base=_known_base(plan.base))
        if is_of_transformers(model):  # a forward with labels, or a user, may have changed the configuration since
            config: Any = model.config
            plan = plan.with_arguments(transformers_arguments(config.to_dict()))
        limits = Limits.of_stored([tensor.shape for tensor in model.state_dict().values() if isinstance(tensor, Tensor)])
        shell = build_shell(plan, limits)
        before = _traits(shell)
        changed = {name: value for name, value in _traits(model).items() if name in before and before[name] != value}
        if changed:
            plan = plan.with_arguments(changed)
            shell = build_shell(plan, limits)
    except (ModelError, PlanError) as error:
        raise CheckpointError(f"the model could not be loaded again: {error}; {ADVICE}") from error
    for what, own, rebuilt in (
        ("model", model.state_dict(), shell.state_dict()),
        ("model's buffers", unstored_buffers(model), unstored_buffers(shell)),
    ):
        wrong = difference(own, rebuilt)
        if wrong:
            raise CheckpointError(f"{plan.base} with {dict(plan.base_args)} does not rebuild this {what} ({wrong}); {ADVICE}")
    return plan, shell


def _changed_buffers(model: nn.Module, shell: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Buffers outside the state_dict whose values loading would not give: these have to be stored as well.

    A table of positions computed on a GPU may differ in its last bit from one computed on a CPU, for example.
    """
    mine, rebuilt = unstored_buffers(model), unstored_buffers(shell)
    uniform = dtype or single_float_dtype(tensor.dtype for tensor in model.state_dict().values() if isinstance(tensor, Tensor))
    return {name: buffer for name, buffer in mine.items() if _stored(buffer, dtype) != _stored(rebuilt[name], uniform)}


def _known_base(base: str | None) -> str | None:
    """The base without a weights' tag that timm does not publish, as models from other folders and hubs have it."""
    if base is None or ":" in base or "." not in base:
        return base
    architecture = base.partition(".")[0]
    return base if base in timm.list_models(f"{architecture}.*", include_tags=True) else architecture


def _traits(model: nn.Module) -> dict[str, Any]:
    """What timm models let their users change after construction."""
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    found = {
        "num_classes": getattr(model, "num_classes", None),
        "global_pool": getattr(model, "global_pool", None),
        "img_size": list(size) if isinstance(size, tuple) else None,
    }
    return {name: value for name, value in found.items() if isinstance(value, int | str | list)}


def _stored(buffer: Tensor, dtype: torch.dtype | None) -> tuple[torch.dtype, bytes]:
    cast = buffer.to("cpu", dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype)
    return cast.dtype, bytes_of(cast).numpy().tobytes()
