"""The model card of a converted model: facts that its plan and its report hold, how close it is to the dense one, and how to load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flysurgery.checkpoint.base import TRANSFORMERS
from flysurgery.surgery import Plan

CARD = """---
library_name: {library}
{task}- {library}
- flysurgery
---
# {name}

{base}, with {replaced} of its {layers} linear layers replaced by products of Kronecker-sparse factors.

- Base arguments: `{base_args}`
{weights}- Parameters of the replaced layers: {before:,} before, {after:,} after ({share:.1%})
- Weights stored in: {dtypes}
{optimized}{closeness}{measurement}{accuracy}{finetune}
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

OPTIMIZED = "- On CUDA `flysurgery.load` fuses groups of layers by `flysurgery.optimize`, where that is faster; the weights are the same\n"

UNKNOWN = "- Its fidelity is unknown, since it was not measured: `flysurgery evaluate DIR --against MODEL --data FOLDER` does\n"


def model_card(name: str, plan: Plan, report: Mapping[str, Any], dtypes: str, config: Mapping[str, Any]) -> str:
    """The text of ``README.md``; ``config`` is the folder's ``config.json``."""
    before, after = (sum(getattr(layer, attribute) for layer in plan.replaced) for attribute in ("params_before", "params_after"))
    # The base's tag names weights, and is part of the base even where the weights came from elsewhere.
    plan = replace(plan, base=plan.base if plan.base is None or ":" in plan.base else plan.base.partition(".")[0])
    library = "transformers" if (plan.base or "").startswith(TRANSFORMERS) else "timm"
    return CARD.format(
        name=name,
        library=library,
        other_way=OTHER_WAYS[library].format(name=(plan.base or "").partition(":")[2]),
        task=_task(config.get("num_classes")),
        base=plan.base,
        base_args=json.dumps(dict(plan.base_args)),
        replaced=len(plan.replaced),
        layers=len(plan.layers),
        weights=_weights(plan, config.get("pretrained_cfg") or {}),
        before=before,
        after=after,
        share=after / before,
        dtypes=dtypes,
        optimized=OPTIMIZED if config.get("optimize") else "",
        closeness=_closeness(report),
        measurement=_measurement(report),
        accuracy=_accuracy(report),
        finetune=_finetune(report),
        plan=plan,
    )


def _task(classes: int | None) -> str:
    """What the model is for: a model without classes gives features; nothing is claimed where their number is not known."""
    if classes is None:
        return "tags:\n"
    task = "image-classification" if classes else "image-feature-extraction"
    return f"pipeline_tag: {task}\ntags:\n- {task}\n"


def _weights(plan: Plan, data: Mapping[str, Any]) -> str:
    """One line on the weights that the model was converted from, where it is known which they are."""
    if not data.get("tag"):
        return ""
    licence = f", licence {data['license']}" if data.get("license") else ""
    return f"- Converted from the weights `{plan.base}.{data['tag']}`{licence}\n"


def _closeness(report: Mapping[str, Any]) -> str:
    """Lines on the errors of the layers and the fidelity of the whole model."""
    run = report.get("finetune") or {}
    fidelity, done = report.get("fidelity"), report.get("reconstruction")
    lines = _layer_errors(report, reconstructed=done is not None, trained=bool(run))
    if fidelity is not None:
        data = (report.get("calibration") or {}).get("data")
        where = f"held-out samples of {data}" if data else "held-out samples"
        when = ", before any fine-tuning" if run else ""
        lines += f"- Fidelity to the dense model on {fidelity['samples']} {where}{when}: {_shown(fidelity)}\n"
        if fidelity["blocks"]:
            errors = " ".join(_number(error) for _, error in fidelity["blocks"])
            lines += f"- Relative error after each block, in sequence{when}: {errors}\n"
    if done is not None:
        before, after = (_number(done[name]["relative_error"]) for name in ("before", "after"))
        lines += (
            f"- Reconstructed block by block in {done['updates']:,} updates of {done['batch']} views each, {done['seconds']:.0f} s; "
            f"update {done['kept']:,} was kept: relative error {before} before, {after} after\n"
        )
    known = run.get("fidelity_after") is not None if run else fidelity is not None
    return lines if known or run.get("scratch") else lines + UNKNOWN


def _shown(fidelity: Mapping[str, Any]) -> str:
    """The numbers of a fidelity, in one line."""
    parts = [f"output cosine {_number(fidelity['output_cosine'])}"]
    if fidelity.get("token_cosine") is not None:
        parts.append(f"token cosine {_number(fidelity['token_cosine'])}")
    parts.append(f"relative error {_number(fidelity['relative_error'])}")
    if fidelity.get("agreement") is not None:
        parts.append(f"same top class {fidelity['agreement']:.2%}")
    return ", ".join(parts)


def _layer_errors(report: Mapping[str, Any], *, reconstructed: bool, trained: bool) -> str:
    """The errors of the layers' outputs where they were measured; only without them those of the weights, which calibration raises."""
    when = ", before the reconstruction" if reconstructed else ", before any fine-tuning" if trained else ""
    calibrated = [(row["calibration"]["output_error"], row["fqn"]) for row in report["rows"] if row.get("calibration")]
    if calibrated:
        return _errors("the layers' outputs on held-out samples", when, calibrated)
    projected = [(row["relative_error"], row["fqn"]) for row in report["rows"] if row.get("relative_error") is not None]
    if not projected:
        return ""
    return _errors("the projected weights, `norm(W - W') / norm(W)`", when, projected)


def _errors(what: str, when: str, errors: list[tuple[float, str]]) -> str:
    (least, best), (most, worst) = min(errors), max(errors)
    mean = sum(error for error, _ in errors) / len(errors)
    numbers = f"mean {mean:.3f}, least {least:.3f} (`{best}`), most {most:.3f} (`{worst}`)"
    return f"- Relative error of {what}{when}: {numbers}; all are in `report.json`\n"


def _number(value: float | None) -> str:
    return "no number" if value is None else f"{value:.3f}"


def _measurement(report: Mapping[str, Any]) -> str:
    """One line on the times that the architectures were chosen by, where they were."""
    found = report.get("measurement")
    if found is None:
        return ""
    return (
        f"- Chosen by times of {found['batch']} samples in {found['dtype']} on {found['device']}: one forward took "
        f"{found['dense_ms']:.3g} ms dense and {found['converted_ms']:.3g} ms with these architectures; all are in `report.json`\n"
    )


def _accuracy(report: Mapping[str, Any]) -> str:
    """One line on the accuracy, where it was measured."""
    measured = report.get("accuracy")
    if measured is None:
        return ""
    before, after = measured["before"], measured["after"]
    return (
        f"- Accuracy on {measured['data']}, {after['samples']} samples: top-1 {before['top1']:.2%} before, {after['top1']:.2%} after; "
        f"top-5 {before['top5']:.2%} before, {after['top5']:.2%} after\n"
    )


def _finetune(report: Mapping[str, Any]) -> str:
    """One line on the training after the conversion, where there was any."""
    run = report.get("finetune")
    if run is None:
        return ""
    teacher = f", with {run['teacher']} as teacher" if run["teacher"] else ""
    before, after = run.get("before"), run.get("after")
    accuracy = f"; top-1 {before['top1']:.2%} before, {after['top1']:.2%} after, of {after['samples']} samples" if before and after else ""
    start, end = run.get("fidelity_before"), run.get("fidelity_after")
    if end is not None:
        whole = "" if start is None else f"{_shown(start)} before, and "
        accuracy += f"; fidelity to the teacher on {end['samples']} held-out images: {whole}{_shown(end)} after"
    what = "Trained from random weights" if run["scratch"] else "Fine-tuned"
    return f"- {what} on {run['images']:,} images of {run['data']} in {run['updates']:,} updates{teacher}{accuracy}\n"
