"""Write a converted model into a self-describing folder with a model card, once it is sure that it can be loaded again."""

import json
import platform
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import flysurgery
from flysurgery.checkpoint.base import TRANSFORMERS, build_shell, without_tag
from flysurgery.checkpoint.config import PROCESSOR, config_of, processor_of
from flysurgery.checkpoint.files import check_space, check_target, json_text, new_folder, read_json
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
from flysurgery.surgery import Plan, Report, Row, as_json, is_of_transformers, measures, plan_of, transformers_arguments

SLACK_BYTES = 1 << 20
"""Room for the folder's small files, when the free space is looked at before writing."""

ADVICE = "give plan or convert the base= and base_args= that the model was built with"

CARD = """---
library_name: {library}
{task}- {library}
- flysurgery
---
# {name}

{base}, with {replaced} of its {layers} linear layers replaced by products of Kronecker-sparse factors.

{facts}

## Load

```python
import flysurgery, {library}

model = flysurgery.load("DIR")                                    # in eval mode
{other_way}
```

No network, pickle or original weights are needed; `DIR` is the folder that holds this file.

## Plan

```text
{plan}
```
"""

OTHER_WAYS = {
    "timm": 'model = timm.create_model("local-dir:DIR", pretrained=True)       # the same weights, by way of timm',
    "transformers": 'model = transformers.{name}.from_pretrained("DIR")     # the same weights, by way of transformers',
}

UNKNOWN = "Its fidelity is unknown, since it was not measured: `flysurgery evaluate DIR --against MODEL --data FOLDER` does"


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

    ``load(folder)`` then gives outputs bit-equal to the model's; with ``dtype``, to those of ``model.to(dtype)``. Before anything is
    written the base is rebuilt without weights, to be sure of that. Tensors that the model uses twice are stored twice, and are one again
    after loading if its constructor ties them. The folder appears complete or not at all; ``force`` replaces an older checkpoint, and
    nothing else. ``report`` is what ``apply`` or ``convert`` returned, or the content of an earlier folder's ``report.json`` with what has
    come since; without it ``report.json`` has the layers without their errors. ``accuracy`` has ``data``, the accuracy ``before`` and that
    ``after``, as JSON; it goes into ``report.json`` and the model card. The folder claims no licence and no published weights, unless it
    is known that the weights came from there: the command line loaded them, or the model was read from a converted folder that says so.

    Raises:
        CheckpointError: the model is not converted, its base is not known or does not rebuild it, the folder exists, or the
            system refuses to write; nothing is left behind then.
        OptionError: a dtype that is none of float16, bfloat16, float32 and float64.
    """
    if not isinstance(model, nn.Module) or not isinstance(folder, str | Path):
        raise CheckpointError(f"expected a model and then a folder, got {type(model).__name__} and {type(folder).__name__}")
    target = check_folder(folder, force=force)
    storage_dtype = read_dtype(dtype)
    plan, shell = _rebuilt(model)
    tensors = collect({**model.state_dict(), **_changed_buffers(model, shell, storage_dtype)}, storage_dtype)
    check_space(target, sum(tensor.nbytes for tensor in tensors.values()) + SLACK_BYTES)
    floats = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values() if tensor.is_floating_point()})
    config = config_of(model, plan)
    with raised_as(CheckpointError, "the report or the accuracy is not as a folder's report.json has them"):
        facts = _report_json(plan, report, accuracy)
        card = model_card(target.name, plan, facts, ", ".join(floats), config)
        texts = {"config.json": json_text(config), "report.json": json_text(facts), "README.md": card}
    if processor_of(model):
        texts[PROCESSOR] = json_text(processor_of(model))
    header = _header(plan, tensors)
    with new_folder(target, force=force) as fresh:
        for name, text in texts.items():
            (fresh / name).write_text(text, encoding="utf-8")
        save_file(tensors, fresh / "model.safetensors", metadata=header)


def _header(plan: Plan, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """What the file of weights says of them and of the plan: the dtype of each tensor, and the hashes of all."""
    names = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
    hashes = sha256_of_each(tensors, tensors.__getitem__)
    listed = canonical({name: (names[tensor.dtype], hashes[name]) for name, tensor in tensors.items()})
    return {
        "format": "pt",
        SCHEMA_KEY: SCHEMA,
        "version": flysurgery.__version__,
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
    if isinstance(report, Report) and [row.fqn for row in report.rows] != [layer.fqn for layer in plan.layers]:
        raise CheckpointError("the report is of another model; give what apply or convert returned for this one")
    if not isinstance(report, Report | Mapping | None):
        raise CheckpointError(f"expected the report that apply or convert returned, got {type(report).__name__}")
    given = report.to_json() if isinstance(report, Report) else report or {}
    facts: dict[str, Any] = {"rows": as_json([Row.of(layer) for layer in plan.layers])} | dict(given)
    if accuracy is not None:
        facts["accuracy"] = dict(accuracy)
    versions = {"flysurgery": flysurgery.__version__, "python": platform.python_version()}
    versions |= {name: metadata.version(name) for name in ("torch", "timm", "vit-pytorch", "safetensors")}
    return facts | {"seed": torch.initial_seed(), "versions": versions}


def _rebuilt(model: nn.Module) -> tuple[Plan, nn.Module]:
    """The plan that rebuilds ``model``, checked by rebuilding it without its weights.

    Where a timm model got another head or input size after it was built (``reset_classifier``, ``set_input_size``), the
    base's arguments follow it.
    """
    plan = plan_of(model)
    inside = next((name for name in ("_orig_mod", "module") if [*model._modules] == [name]), None)
    if inside is not None and (plan is None or inside == "_orig_mod"):
        raise CheckpointError(f"the model is wrapped in a {type(model).__name__}; save the model in it, model.{inside}")
    if plan is None:
        raise CheckpointError("the model is not converted, so there is no plan to save; convert it first, or save it with timm")
    try:
        plan = replace(plan, base=plan.base and _known_base(plan.base))
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
    stored = ("model", model.state_dict(), shell.state_dict())
    for what, own, rebuilt in (stored, ("model's buffers", unstored_buffers(model), unstored_buffers(shell))):
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


def _known_base(base: str) -> str:
    """The base without a weights' tag that timm does not publish, as models from other folders and hubs have it."""
    architecture = without_tag(base)
    return base if base == architecture or base in timm.list_models(f"{architecture}.*", include_tags=True) else architecture


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


def model_card(name: str, plan: Plan, report: Mapping[str, Any], dtypes: str, config: Mapping[str, Any]) -> str:
    """The text of ``README.md``; ``config`` is the folder's ``config.json``."""
    plan = replace(plan, base=plan.base and without_tag(plan.base))  # it is there even for weights from elsewhere
    library = "transformers" if (plan.base or "").startswith(TRANSFORMERS) else "timm"
    return CARD.format(
        name=name,
        library=library,
        other_way=OTHER_WAYS[library].format(name=(plan.base or "").partition(":")[2]),
        task=_task(config.get("num_classes")),
        base=plan.base,
        replaced=len(plan.replaced),
        layers=len(plan.layers),
        facts="\n".join(f"- {fact}" for fact in _facts(plan, report, dtypes, config)),
        plan=plan,
    )


def _task(classes: int | None) -> str:
    """What the model is for: a model without classes gives features; nothing is claimed where their number is not known."""
    if classes is None:
        return "tags:\n"
    task = "image-classification" if classes else "image-feature-extraction"
    return f"pipeline_tag: {task}\ntags:\n- {task}\n"


def _facts(plan: Plan, report: Mapping[str, Any], dtypes: str, config: Mapping[str, Any]) -> Iterator[str]:
    yield f"Base arguments: `{json.dumps(dict(plan.base_args))}`"
    data = config.get("pretrained_cfg") or {}
    if data.get("tag"):
        licence = f", licence {data['license']}" if data.get("license") else ""
        yield f"Converted from the weights `{plan.base}.{data['tag']}`{licence}"
    before, after = sum(layer.params_before for layer in plan.replaced), sum(layer.params_after for layer in plan.replaced)
    yield f"Parameters of the replaced layers: {before:,} before, {after:,} after ({after / before:.1%})"
    yield f"Weights stored in: {dtypes}"
    yield "All that was measured is in `report.json`"
    run, fidelity = report.get("finetune") or {}, report.get("fidelity")
    if fidelity is not None:
        data = (report.get("calibration") or {}).get("data")
        where = f"held-out samples of {data}" if data else "held-out samples"
        untrained = ", before any fine-tuning" if run else ""
        yield f"Fidelity to the dense model on {fidelity['samples']} {where}{untrained}: {_shown(fidelity)}"
    errors = [(row.get("calibration") or {}).get("output_error") for row in report["rows"]]
    known = [error for error in errors if error is not None]
    if known:
        yield f"Relative output errors of the layers as calibrated, on held-out samples: {min(known):.3f} to {max(known):.3f}"
    is_known = run.get("fidelity_after") is not None if run else fidelity is not None
    if not is_known and not run.get("scratch"):
        yield UNKNOWN
    times, accuracy = report.get("measurement"), report.get("accuracy")
    if times is not None:
        yield (
            f"Chosen by times of {times['batch']} samples in {times['dtype']} on {times['device']}: one forward took "
            f"{times['dense_ms']:.3g} ms dense and {times['converted_ms']:.3g} ms with these architectures"
        )
    if accuracy is not None:
        yield f"Accuracy on {accuracy['data']}: {_top1(accuracy)}"
    if report.get("finetune") is not None:
        text = f"{'Trained from random weights' if run['scratch'] else 'Fine-tuned'} on {run['images']:,} images of {run['data']}"
        text += f" in {run['updates']:,} updates" + (f", with {run['teacher']} as teacher" if run["teacher"] else "")
        if run.get("before") and run.get("after"):
            text += f"; {_top1(run)}"
        if run.get("fidelity_after") is not None:
            text += f"; fidelity to the teacher on {run['fidelity_after']['samples']} held-out images: {_shown(run['fidelity_after'])}"
        yield text


def _top1(run: Mapping[str, Any]) -> str:
    return f"top-1 {run['before']['top1']:.2%} before, {run['after']['top1']:.2%} after, of {run['after']['samples']} samples"


def _shown(fidelity: Mapping[str, Any]) -> str:
    return ", ".join(f"{what} {value}" for what, value in measures(fidelity))
