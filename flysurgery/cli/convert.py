"""``flysurgery convert``: plan, project, replace, save, and say what happened to each layer. And ``flysurgery densify``, the way back."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flysurgery.cli import options
from flysurgery.cli.options import option
from flysurgery.cli.processes import check_shared, device_of_process, is_first, together
from flysurgery.errors import OptionError
from flysurgery.tables import blocks_of_text, changes_table

if TYPE_CHECKING:
    from torch import nn

    from flysurgery.surgery import Measurement, Plan, Tradeoff


@together()
def convert(
    context: typer.Context,
    model: options.DenseModel,
    arch: options.ChoosableArch = None,
    nblocks: options.Nblocks = 4,
    rank: options.Rank = None,
    patterns: options.Patterns = None,
    per_layer: options.PerLayer = None,
    init: options.Init = "projection",
    budget: options.Budget = None,
    fidelity: options.Fidelity = None,
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
    import torch

    from flysurgery import checkpoint as storage
    from flysurgery import evaluation, surgery
    from flysurgery.bench import check_plot, draw_tradeoff
    from flysurgery.cli.source import find_dense
    from flysurgery.cli.tables import accuracy_rows, progress, show, tell_skipped
    from flysurgery.fidelity import Settings

    fits = {"sequential": sequential, "permute": permute, "reconstruct": reconstruct}
    surgery.check_calibration(calibrate, samples=samples, fidelity=fidelity, **fits)
    if minutes is not None and not reconstruct:
        raise OptionError("--minutes is the budget of --reconstruct; give both, or neither")
    if minutes is not None:
        Settings(minutes)  # which checks them, before anything is loaded
    if (batch is not None or optimize) and not measure:
        raise OptionError("--batch and --optimize are of the model that --measure times; give --measure with them")
    check_shared(shared=reconstruct and not (measure or dry_run or fidelity))
    if fidelity is not None and dry_run:
        raise OptionError("--fidelity converts copies to find its budget, which --dry-run does not; leave one out")
    given = {"nblocks": nblocks != 4, "rank": rank, "patterns": patterns, "per_layer": options.choices_of(per_layer), "arch": arch}
    named = [name for name, value in given.items() if value]
    allocated = surgery.check_budget(budget, measured=measure, named=named, fidelity=fidelity)
    if plot is not None and not allocated:
        raise OptionError("--plot draws the trade-off of --budget, --fidelity or --measure; give one of them")
    if plot is not None and dry_run:
        raise OptionError("--dry-run writes nothing, so it takes no --plot; leave one out")
    check_plot(plot)
    source = find_dense(model, base=base, model_args=model_args, checkpoint=checkpoint)
    folder = out or Path("checkpoints") / f"{source.name}.{arch or ('chosen' if allocated else 'monarch')}"
    target = device_of_process(device)
    if not dry_run:
        storage.check_folder(folder, force=force)
    if allocated or not dry_run:
        source.check_weights(pretrained=pretrained)
    skeleton = source.skeleton()
    plan = source.plan(skeleton, surgery.PLACEHOLDER if allocated else arch or "monarch", context.params)
    if dry_run and not allocated:
        _print_plan(plan, None, None, as_json=as_json)
        return
    data = None if evaluate is None else evaluation.load_data(evaluate, skeleton)
    inputs = None
    if calibrate is not None:
        inputs = tell_skipped(evaluation.load_calibration(calibrate, skeleton, samples=samples, pictures=reconstruct))
    network = source.build(pretrained=pretrained, seed=seed, device=target)
    fitting = {**fits, "init": init, "seed": seed, "reconstruct": reconstruct if minutes is None else minutes}
    tradeoff = measurement = None
    if allocated and fidelity is None:
        setting = surgery.Setting(batch, None if dtype is None else getattr(torch, dtype), optimize) if measure else None
        with progress("measuring" if measure else "choosing") as step:
            found = surgery.choose(plan, network, setting, budget, calibrate=inputs, samples=samples, progress=step)
        plan, tradeoff, measurement = found
    if dry_run:
        _print_plan(plan, tradeoff, measurement, as_json=as_json)
        return
    storage.check_space(folder, _bytes(skeleton, plan, dtype))
    before = None if data is None else evaluation.evaluate(network, data, batch_size=batch_size, device=target)
    with progress("converting") as step:
        given = {"calibrate": inputs, "samples": samples, "progress": step, **fitting}
        if fidelity is None:
            report = replace(surgery.apply(plan, network, **given), tradeoff=tradeoff, measurement=measurement)
        else:
            report = surgery.convert_to_fidelity(plan, network, fidelity, **given)
            tradeoff = report.tradeoff
    if not is_first():
        return
    accuracy, changes = None, []
    if data is not None and before is not None:
        after = evaluation.evaluate(network, data, batch_size=batch_size, device=target)
        accuracy = {"data": data.name, "before": asdict(before), "after": asdict(after)}
        changes = accuracy_rows(before, after)
    storage.save(network, folder, dtype=dtype, force=force, report=report, accuracy=accuracy)
    if plot is not None and tradeoff is not None:
        chosen = (tradeoff.chosen.share, tradeoff.chosen.error)
        draw_tradeoff([(each.share, each.error) for each in tradeoff.curve], chosen, plot, unit=tradeoff.unit)
    text = blocks_of_text(report, changes_table("measured", changes), f"saved in {folder}")
    show({"folder": str(folder), "accuracy": accuracy} | report.to_json(), text, as_json=as_json)


def _print_plan(plan: Plan, tradeoff: Tradeoff | None, measurement: Measurement | None, *, as_json: bool) -> None:
    """Print what convert would do, and what was chosen by."""
    from flysurgery import surgery
    from flysurgery.cli.tables import show

    chosen_by = {name: each for name, each in (("tradeoff", tradeoff), ("measurement", measurement)) if each is not None}
    document = {"plan": plan.to_json()} | surgery.as_json(chosen_by)
    show(document, blocks_of_text(plan, *chosen_by.values()), as_json=as_json)


def _bytes(skeleton: nn.Module, plan: Plan, dtype: options.StorageType | None) -> int:
    """Size of the converted model's weights on disk."""
    saved = sum(layer.params_before - layer.params_after for layer in plan.replaced)
    size = 2 if dtype in ("float16", "bfloat16") else 4
    return size * (sum(parameter.numel() for parameter in skeleton.parameters()) - saved)


def densify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A converted folder.")],
    out: Annotated[Path, option(options.OUTPUT, "--out", "Output folder.", "DIR")],
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Multiply the factors out: a converted folder becomes a dense model folder."""
    from flysurgery import checkpoint, surgery
    from flysurgery.cli.source import base_of
    from flysurgery.cli.tables import show

    checkpoint.check_dense_folder(out, force=force)
    model = checkpoint.load(folder)
    described = base_of(model, folder)
    layers = surgery.densify(model)
    checkpoint.save_dense(model, out, *described, force=force)
    show({"folder": str(out), "layers": layers}, f"{layers} layers made dense, saved in {out}", as_json=as_json)
