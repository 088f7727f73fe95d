"""The model card of a converted model: facts that its plan and its report hold, and how to load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flysurgery.surgery import Plan

CARD = """---
library_name: timm
pipeline_tag: image-classification
tags:
- image-classification
- timm
- flysurgery
---
# {name}

{base}, with {replaced} of its {layers} linear layers replaced by products of Kronecker-sparse factors.

- Base arguments: `{base_args}`
- Parameters of the replaced layers: {before:,} before, {after:,} after ({share:.1%})
- Weights stored in: {dtypes}
{optimized}{errors}{measurement}{accuracy}{finetune}
## Load

```python
import flysurgery, timm

model = flysurgery.load("DIR")                                    # in eval mode
model = timm.create_model("local-dir:DIR", pretrained=True)       # the same weights, by way of timm
```

No network, pickle or original weights are needed; `DIR` is the folder that holds this file.

## Plan

```text
{plan}
```
"""


OPTIMIZED = "- On CUDA `flysurgery.load` fuses groups of layers by `flysurgery.optimize`, where that is faster; the weights are the same\n"


def model_card(name: str, plan: Plan, report: Mapping[str, Any], dtypes: str, *, optimize: bool = False) -> str:
    """The text of ``README.md``."""
    before, after = (sum(getattr(layer, attribute) for layer in plan.replaced) for attribute in ("params_before", "params_after"))
    return CARD.format(
        name=name,
        base=plan.base,
        base_args=json.dumps(dict(plan.base_args)),
        replaced=len(plan.replaced),
        layers=len(plan.layers),
        before=before,
        after=after,
        share=after / before,
        dtypes=dtypes,
        optimized=OPTIMIZED if optimize else "",
        errors=_errors(report),
        measurement=_measurement(report),
        accuracy=_accuracy(report),
        finetune=_finetune(report),
        plan=plan,
    )


def _errors(report: Mapping[str, Any]) -> str:
    """One line on the projections' errors, where the report has any."""
    errors = sorted((row["relative_error"], row["fqn"]) for row in report["rows"] if row.get("relative_error") is not None)
    if not errors:
        return ""
    mean = sum(error for error, _ in errors) / len(errors)
    (least, best), (most, worst) = errors[0], errors[-1]
    return (
        f"- Relative error of the projected weights, `norm(W - W') / norm(W)`, before any fine-tuning: mean {mean:.3f}, "
        f"least {least:.3f} (`{best}`), most {most:.3f} (`{worst}`); all are in `report.json`\n"
    )


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
    before, after = run["before"], run["after"]
    accuracy = f"; top-1 {before['top1']:.2%} before, {after['top1']:.2%} after, of {after['samples']} samples" if before and after else ""
    what = "Trained from random weights" if run["scratch"] else "Fine-tuned"
    return f"- {what} on {run['images']:,} images of {run['data']} in {run['updates']:,} updates{teacher}{accuracy}\n"
