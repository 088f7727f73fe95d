"""The model card of a converted model: facts that its plan and its report hold, and how to load it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from flysurgery.checkpoint.base import TRANSFORMERS
from flysurgery.surgery import Plan, measures

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


def model_card(name: str, plan: Plan, report: Mapping[str, Any], dtypes: str, config: Mapping[str, Any]) -> str:
    """The text of ``README.md``; ``config`` is the folder's ``config.json``."""
    # The base's tag names weights, and is part of the base even where the weights came from elsewhere.
    plan = replace(plan, base=plan.base if plan.base is None or ":" in plan.base else plan.base.partition(".")[0])
    facts = [*_of_the_model(plan, dtypes, config), *_of_closeness(report), *_of_measurements(report)]
    library = "transformers" if (plan.base or "").startswith(TRANSFORMERS) else "timm"
    return CARD.format(
        name=name,
        library=library,
        other_way=OTHER_WAYS[library].format(name=(plan.base or "").partition(":")[2]),
        task=_task(config.get("num_classes")),
        base=plan.base,
        replaced=len(plan.replaced),
        layers=len(plan.layers),
        facts="\n".join(f"- {fact}" for fact in facts),
        plan=plan,
    )


def _task(classes: int | None) -> str:
    """What the model is for: a model without classes gives features; nothing is claimed where their number is not known."""
    if classes is None:
        return "tags:\n"
    task = "image-classification" if classes else "image-feature-extraction"
    return f"pipeline_tag: {task}\ntags:\n- {task}\n"


def _of_the_model(plan: Plan, dtypes: str, config: Mapping[str, Any]) -> Iterator[str]:
    yield f"Base arguments: `{json.dumps(dict(plan.base_args))}`"
    data = config.get("pretrained_cfg") or {}
    if data.get("tag"):
        licence = f", licence {data['license']}" if data.get("license") else ""
        yield f"Converted from the weights `{plan.base}.{data['tag']}`{licence}"
    before, after = sum(layer.params_before for layer in plan.replaced), sum(layer.params_after for layer in plan.replaced)
    yield f"Parameters of the replaced layers: {before:,} before, {after:,} after ({after / before:.1%})"
    yield f"Weights stored in: {dtypes}"
    yield "All that was measured is in `report.json`"


def _of_closeness(report: Mapping[str, Any]) -> Iterator[str]:
    """The fidelity of the whole model to the dense one, or that it is unknown, and the layers' output errors."""
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


def _of_measurements(report: Mapping[str, Any]) -> Iterator[str]:
    """The times that architectures were chosen by, the accuracy, and the training after the conversion."""
    times, accuracy, run = report.get("measurement"), report.get("accuracy"), report.get("finetune")
    if times is not None:
        yield (
            f"Chosen by times of {times['batch']} samples in {times['dtype']} on {times['device']}: one forward took "
            f"{times['dense_ms']:.3g} ms dense and {times['converted_ms']:.3g} ms with these architectures"
        )
    if accuracy is not None:
        yield f"Accuracy on {accuracy['data']}: {_top1(accuracy)}"
    if run is not None:
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
