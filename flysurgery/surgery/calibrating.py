"""Project the planned layers by what they are given: stage by stage, aside from the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from time import perf_counter

from torch import nn

from flysurgery.calibration import Samples, collect
from flysurgery.surgery.build import Dense
from flysurgery.surgery.change import changing
from flysurgery.surgery.permutable import shared_features
from flysurgery.surgery.permuting import Permuter
from flysurgery.surgery.plan import LayerPlan, Plan
from flysurgery.surgery.projecting import Inputs, Progress, project_layers
from flysurgery.surgery.report import Permutation, ReportCalibration, Row


def project_calibrated_layers(
    plan: Plan,
    model: nn.Module,
    dense: Mapping[str, Dense],
    samples: Samples,
    *,
    sequential: bool,
    permute: bool,
    progress: Progress | None,
) -> tuple[dict[str, nn.Module], dict[str, Row], ReportCalibration, tuple[Permutation, ...]]:
    """The new modules, the rows, a word on the calibration, and what came of ``permute``. The model is run, and then is as it was.

    All layers' inputs are seen in one pass over the samples; or, if ``sequential``, each block's in a pass of its own, which ends with
    that block and in which the blocks before it are converted already. That costs half as many passes as there are blocks, holds the
    matrices of one block at a time, and lets a block make up for what was lost before it. With ``permute`` hidden units of
    feed-forward blocks, heads, and entries of heads are put in an order that lowers the errors, where there is one; then the new
    modules have dense ones among them, of layers that stay dense and share the order.
    """
    permuter = Permuter(plan, model, shared_features(plan, model, samples) if permute else ())
    names = {layer.fqn: layer.names for layer in plan.layers}
    stages = _blocks(plan.replaced) if sequential else [plan.replaced]
    modules: dict[str, nn.Module] = {}
    rows: dict[str, Row] = {}
    permutations: list[Permutation] = []
    seconds = 0.0
    with changing(model, keep=False) as trial:
        trial.switch(plan.switches)
        for stage in stages:
            started = perf_counter()
            calls = {layer.fqn: layer.calls for layer in stage}
            fit, held_out = collect(model, calls, samples.fit()), collect(model, calls, samples.held_out())
            seconds += perf_counter() - started
            inputs = {fqn: Inputs(fit[fqn], held_out[fqn]) for fqn in calls}
            permuted = permuter.permute(stage, inputs)
            permutations += permuted.outcomes
            counting = _counting_on(progress, len(rows), len(plan.replaced))
            projected, new_rows = project_layers(stage, {**dense, **permuted.linears}, counting, inputs | permuted.inputs)
            changed = permuted.linears | projected
            modules |= changed
            rows |= new_rows
            if stage is not stages[-1]:
                for fqn, module in changed.items():
                    trial.swap(names[fqn], module)
    summary = ReportCalibration(samples.name, len(samples), samples.held_out_count, sequential, seconds, samples.skipped)
    return modules, rows, summary, tuple(permutations)


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
