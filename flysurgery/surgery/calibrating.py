"""Project the planned layers by what they are given: stage by stage, aside from the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from time import perf_counter

from torch import nn

from flysurgery.calibration import Samples, collect
from flysurgery.surgery.build import Dense
from flysurgery.surgery.calibration_report import ReportCalibration
from flysurgery.surgery.change import Trial
from flysurgery.surgery.fitting import Inputs
from flysurgery.surgery.layer_plan import LayerPlan
from flysurgery.surgery.permuting import permuted_pairs
from flysurgery.surgery.plan import Plan
from flysurgery.surgery.projecting import Progress, project_layers
from flysurgery.surgery.report import Row
from flysurgery.walker import walk


def project_calibrated_layers(
    plan: Plan,
    model: nn.Module,
    dense: Mapping[str, Dense],
    samples: Samples,
    *,
    sequential: bool,
    permute: bool,
    progress: Progress | None,
) -> tuple[dict[str, nn.Module], dict[str, Row], ReportCalibration]:
    """The new modules, the rows, and a word on the calibration. The model is run, and then is as it was.

    All layers' inputs are seen in one pass over the samples; or, if ``sequential``, each block's in a pass of its own, which ends with
    that block and in which the blocks before it are converted already. That costs half as many passes as there are blocks, holds the
    matrices of one block at a time, and lets a block make up for what was lost before it. With ``permute`` the hidden units of
    feed-forward blocks are put in an order that lowers the errors, where there is one.
    """
    targets = walk(model, samples.inputs[:2]) if permute else ()
    stages = _blocks(plan.replaced) if sequential else [plan.replaced]
    modules: dict[str, nn.Module] = {}
    rows: dict[str, Row] = {}
    seconds = 0.0
    with Trial(model) as trial:
        trial.switch(plan.switches)
        for stage in stages:
            started = perf_counter()
            calls = {layer.fqn: layer.calls for layer in stage}
            fit, held_out = collect(model, calls, samples.fit()), collect(model, calls, samples.held_out())
            seconds += perf_counter() - started
            inputs = {fqn: Inputs(fit[fqn], held_out[fqn]) for fqn in calls}
            linears, permuted = permuted_pairs(stage, targets, dense, inputs)
            counting = _counting_on(progress, len(modules), len(plan.replaced))
            new_modules, new_rows = project_layers(stage, {**dense, **linears}, counting, inputs | permuted)
            modules |= new_modules
            rows |= new_rows
            if stage is not stages[-1]:
                for layer in stage:
                    trial.swap(layer.names, modules[layer.fqn])
    summary = ReportCalibration(samples.name, len(samples), samples.held_out_count, sequential, seconds, samples.skipped)
    return modules, rows, summary


def _blocks(layers: tuple[LayerPlan, ...]) -> list[tuple[LayerPlan, ...]]:
    """The layers by block, which is what a name says up to its last number; in the order of execution."""
    blocks: dict[str, list[LayerPlan]] = {}
    for layer in layers:
        numbered = re.match(r".*\.\d+(?=\.|$)", f".{layer.fqn}")
        blocks.setdefault(numbered[0] if numbered else layer.fqn, []).append(layer)
    return [tuple(block) for block in blocks.values()]


def _counting_on(progress: Progress | None, before: int, total: int) -> Progress | None:
    if progress is None:
        return None
    return lambda done, _, name: progress(before + done, total, name)
