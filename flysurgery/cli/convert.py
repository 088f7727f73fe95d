"""``flysurgery convert``: plan, project, replace, save, and say what happened to each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import typer
from torch import nn

from flysurgery import checkpoint as storage
from flysurgery import evaluation, inference, surgery
from flysurgery.bench import check_plot, draw_tradeoff
from flysurgery.cli import options
from flysurgery.cli.processes import check_shared, device_of_process, is_first, together
from flysurgery.cli.source import find_dense
from flysurgery.cli.tables import accuracy_rows, print_changes, print_json, print_table, progress, tell_skipped
from flysurgery.surgery import LayerPlan, Measurement, Plan, Report, Row, Tradeoff, fidelity_rows, grouped, permutation_tables, short_count

Layers: TypeAlias = Sequence[LayerPlan | Row]

PLANNED = ("layer", "n", "role", "out x in", "params", "FLOPs", "family", "architecture")
DONE = ("layer", "n", "role", "params", "FLOPs", "worst\nerror", "least\nenergy", "family", "architecture")
CALIBRATED = ("layer", "n", "role", "params", "FLOPs", "output\nerror", "plain\nprojection", "family", "architecture")
KEPT = ("kept dense", "n", "role", "out x in", "why")
NUMBERS = ("n", "params", "FLOPs", "worst\nerror", "least\nenergy", "output\nerror", "plain\nprojection")


@together
def convert(
    model: options.DenseModel,
    arch: options.ArchChoice = "monarch",
    nblocks: options.Nblocks = 4,
    rank: options.Rank = None,
    patterns: options.Patterns = None,
    budget: options.Budget = None,
    max_error: options.MaxError = None,
    fidelity: options.Fidelity = None,
    ms: options.Ms = None,
    latency: options.Latency = None,
    measure: options.Measure = False,
    batch: options.MeasuredBatch = None,
    plot: options.Plot = None,
    roles: options.Roles = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    blocks: options.Blocks = None,
    min_size: options.MinSize = None,
    convs: options.Convs = False,
    model_args: options.ModelArgs = None,
    base: options.Base = None,
    checkpoint: options.Checkpoint = None,
    pretrained: options.Pretrained = True,
    calibrate: options.Calibrate = None,
    samples: options.CalibrationSamples = None,
    sequential: options.Sequential = False,
    permute: options.Permute = False,
    reconstruct: options.Reconstruct = False,
    minutes: options.Minutes = None,
    evaluate: options.Evaluate = None,
    batch_size: options.BatchSize = 64,
    out: options.Out = None,
    force: options.Force = False,
    dtype: options.StorageDtype = None,
    device: options.Device = None,
    seed: options.Seed = 0,
    optimize: options.Optimize = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Replace the linear layers of a Vision Transformer by products of two Kronecker-sparse factors."""
    needy = {"--samples": samples, "--sequential": sequential, "--permute": permute, "--reconstruct": reconstruct, "--fidelity": fidelity}
    options.check_calibration(calibrate, needy)
    budgeted = options.reconstruction(reconstruct, minutes)
    check_shared(shared=reconstruct and not (measure or fidelity or dry_run))
    family = arch not in ("monarch", "auto")
    named = {"--arch": family, "--nblocks": nblocks != 4, "--rank": bool(rank), "--patterns": bool(patterns)}
    goal = {"budget": budget, "max_error": max_error, "fidelity": fidelity, "ms": ms, "latency": latency}
    allocated = options.check_allocation(arch, goal, plot, named, measure=measure, batch=batch, dry_run=dry_run)
    check_plot(plot)
    source = find_dense(model, base=base, model_args=model_args, checkpoint=checkpoint)
    folder = out or Path("checkpoints") / f"{source.name}.{'budget' if allocated and arch != 'auto' else arch}"
    target = device_of_process(device)
    if not dry_run:
        storage.check_folder(folder, force=force)
    if allocated or not dry_run:
        source.check_weights(pretrained=pretrained)
    skeleton = source.skeleton()
    plan = surgery.plan(
        skeleton.model,
        surgery.PLACEHOLDER if allocated else arch,
        roles=options.roles_of(roles),
        include=include,
        exclude=exclude,
        blocks=blocks,
        min_size=min_size,
        convs=convs,
        nblocks=nblocks,
        rank=rank,
        patterns=patterns,
        base=skeleton.base,
        base_args=skeleton.base_args,
    )
    if dry_run and not allocated:
        _print_plan(plan, None, None, as_json=as_json)
        return
    if latency is not None:
        surgery.read_latency_table(latency, plan.replaced)  # before the model and its data are loaded
    data = None if evaluate is None else evaluation.load_data(evaluate, skeleton.model)
    inputs = None
    if calibrate is not None:
        inputs = tell_skipped(evaluation.load_calibration(calibrate, skeleton.model, samples=samples, pictures=reconstruct))
    network = source.build(pretrained=pretrained, seed=seed, device=target)
    tradeoff = measurement = None
    closeness = None if fidelity is None else surgery.FidelityGoal(fidelity, sequential, permute)
    chosen_by: dict[str, Any] = {"budget": budget, "max_error": max_error, "fidelity": closeness, "calibrate": inputs, "samples": samples}
    if measure:
        setting = inference.Setting(batch, None if dtype is None else getattr(torch, dtype), optimize)
        with progress("measuring") as step:
            plan, tradeoff, measurement = inference.choose_measured(plan, network, setting, ms=ms, progress=step, **chosen_by)
    elif allocated:
        with progress("choosing") as step:
            plan, tradeoff = surgery.allocate(plan, network, latency=latency, progress=step, **chosen_by)
    if dry_run:
        _print_plan(plan, tradeoff, measurement, as_json=as_json)
        return
    storage.check_space(folder, _bytes(skeleton.model, plan, dtype))
    before = None if data is None else evaluation.evaluate(network, data, batch_size=batch_size, device=target)
    with progress("converting") as step:
        report = surgery.apply(
            plan,
            network,
            calibrate=inputs,
            samples=samples,
            sequential=sequential,
            permute=permute,
            reconstruct=budgeted,
            seed=seed,
            progress=step,
        )
    if not is_first():
        return
    report = replace(report, tradeoff=tradeoff, measurement=measurement)
    accuracy = None
    if data is not None and before is not None:
        after = evaluation.evaluate(network, data, batch_size=batch_size, device=target)
        accuracy = evaluation.Comparison(data.name, before, after)
    measured = None if accuracy is None else accuracy.to_json()
    storage.save(network, folder, dtype=dtype, force=force, report=report, accuracy=measured, optimize=optimize)
    if plot is not None and tradeoff is not None:
        chosen = (tradeoff.chosen.share, tradeoff.chosen.reported)
        draw_tradeoff([(each.share, each.reported) for each in tradeoff.curve], chosen, plot, unit=tradeoff.unit)
    if as_json:
        print_json({"folder": str(folder), "accuracy": measured} | report.to_json())
    else:
        _print_report(report, folder, accuracy)


def _bytes(skeleton: nn.Module, plan: Plan, dtype: options.StorageType | None) -> int:
    """Size of the converted model's weights on disk."""
    saved = sum(layer.params_before - layer.params_after for layer in plan.replaced)
    size = 2 if dtype in ("float16", "bfloat16") else 4
    return size * (sum(parameter.numel() for parameter in skeleton.parameters()) - saved)


def _print_plan(plan: Plan, tradeoff: Tradeoff | None, measurement: Measurement | None, *, as_json: bool) -> None:
    """Print what convert would do. FLOPs are those of one sample's forward."""
    chosen_by = {"tradeoff": tradeoff, "measurement": measurement}
    if as_json:
        print_json({"plan": plan.to_json()} | {name: each.to_json() for name, each in chosen_by.items() if each is not None})
        return
    _print_layers(PLANNED, plan.layers)
    typer.echo("")
    print_changes("total", _layer_totals(plan.layers))
    _print_each(tradeoff, measurement)


def _print_report(report: Report, folder: Path, accuracy: evaluation.Comparison | None) -> None:
    """Print what convert did.

    A layer's error is ``norm(W - W') / norm(W)`` and its energy the share of ``norm(W)**2`` that is kept; of layers
    that are alike, the worst is shown. After a calibration the error is that of the layer's output on held-out samples, beside that of the
    plain projection.
    """
    _print_layers(DONE if report.calibration is None else CALIBRATED, report.rows)
    totals = [_total("parameters of the model", report.model_params_before, report.model_params_after), *_layer_totals(report.rows)]
    if accuracy is not None:
        totals += accuracy_rows(accuracy.before, accuracy.after)
    if report.fidelity is not None:
        totals += fidelity_rows(report.fidelity, report.reconstruction)
    typer.echo("")
    print_changes("total", totals)
    _print_each(*report.remarks)
    _print_each(report.calibration, permutation_tables(report.permutations) or None, report.tradeoff, report.measurement)
    typer.echo(f"\nsaved in {folder}")


def _print_each(*parts: object) -> None:
    for part in parts:
        if part is not None:
            typer.echo(f"\n{part}")


def _print_layers(columns: Sequence[str], layers: Layers) -> None:
    groups = grouped(layers, lambda layer: layer.fqn, lambda layer: (layer.role, layer.size, layer.architecture, layer.reason))
    replaced = [_cells(name, members) for name, members in groups if members[0].status == "replace"]
    kept = [_cells(name, members) for name, members in groups if members[0].status == "keep"]
    print_table(columns, [[cells[column] for column in columns] for cells in replaced], right=NUMBERS)
    if kept:
        typer.echo("")
        print_table(KEPT, [[cells[column] for column in KEPT] for cells in kept], right=NUMBERS)


def _cells(name: str, members: Layers) -> dict[str, str]:
    first = members[0]
    worst = max(getattr(each, "relative_error", None) or 0.0 for each in members)
    calibrated = [found for found in (getattr(each, "calibration", None) for each in members) if found is not None]
    return {
        "output\nerror": f"{max((found.output_error for found in calibrated), default=0.0):.3f}",
        "plain\nprojection": f"{max((found.plain_output_error for found in calibrated), default=0.0):.3f}",
        "layer": name,
        "kept dense": name,
        "n": str(len(members)),
        "role": first.role,
        "out x in": first.size,
        "params": _change(sum(each.params_before for each in members), sum(each.params_after for each in members)),
        "FLOPs": _change(sum(each.flops_before for each in members), sum(each.flops_after for each in members)),
        "worst\nerror": f"{worst:.3f}",
        "least\nenergy": f"{1 - worst**2:.3f}",
        "family": first.family or "",
        "architecture": (first.architecture or "").replace(" ", "\n").replace("),(", "),\n("),
        "why": f"{first.reason.code}: {first.reason.text}" if first.reason else "",
    }


def _layer_totals(layers: Layers) -> list[tuple[str, ...]]:
    replaced = [layer for layer in layers if layer.status == "replace"]
    return [
        _total(
            "parameters of the replaced layers", sum(each.params_before for each in replaced), sum(each.params_after for each in replaced)
        ),
        _total("FLOPs of all linear layers", sum(each.flops_before for each in layers), sum(each.flops_after for each in layers)),
    ]


def _total(what: str, before: int, after: int) -> tuple[str, ...]:
    return (what, short_count(before), short_count(after), f"{after / before - 1:+.1%}")


def _change(before: int, after: int) -> str:
    return f"{short_count(before)} ->\n{short_count(after)}"
