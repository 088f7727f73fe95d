"""``flysurgery bench``: how long things take here, each against dense in the same run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flysurgery.cli import options
from flysurgery.cli.options import ARCHITECTURES, FAMILIES, MACHINE, MEASUREMENT, OUTPUT, Command, Group, option
from flysurgery.errors import OptionError
from flysurgery.tables import text_table

if TYPE_CHECKING:
    import torch

    from flysurgery.bench import Sheet

app = typer.Typer(cls=Group, help="Measure speed: times and ratios to dense, taken in one run.")

QUICK_ROWS, ROWS = 788, 3152  # four and sixteen images at 197 tokens

Families = Annotated[list[str] | None, option(ARCHITECTURES, "--arch", f"{FAMILIES}; repeatable.", "FAMILY")]
Width = Annotated[int, option(MEASUREMENT, "--width", "Width of the transformer; the FFN is 4 times as wide.", "N", 1)]
MODES_HELP = "Precisions: fp32, tf32 (CUDA), fp16, bf16, or all; separated by commas."
Modes = Annotated[str, option(MEASUREMENT, "--mode", MODES_HELP, "NAMES")]
LAUNCH_HELP = "On CUDA: captured graphs, or calls launched one by one from Python."
Launch = Annotated[Literal["graph", "eager"], option(MEASUREMENT, "--launch", LAUNCH_HELP, "graph|eager")]
Threads = Annotated[int | None, option(MACHINE, "--threads", "CPU threads; by default PyTorch's number.", "N", 1)]
Rounds = Annotated[int | None, option(MEASUREMENT, "--rounds", "Samples of each candidate at most; by default 30, quick 7.", "N", 2)]
Quick = Annotated[bool, option(MEASUREMENT, "--quick", "Fewer sizes and samples: an answer within two minutes.")]
OUT_HELP = "Keep the rows in this CSV file; a run that was interrupted goes on where it stopped."
Out = Annotated[Path | None, option(OUTPUT, "--out", OUT_HELP, "FILE")]
Fresh = Annotated[bool, option(OUTPUT, "--fresh", "Measure all again, and replace the rows that the file holds.")]
Rows = Annotated[int | None, option(MEASUREMENT, "--rows", "Rows of x, that is tokens of all images; by default 3152.", "N", 1)]
MODE_HELP = "One precision: fp32, tf32 (CUDA), fp16 or bf16."
OPTIMIZED_HELP = "Time the whole model as flysurgery.optimize makes it too, converted and dense."

TIMES = ("median_ms", "iqr_ms", "ratio_to_dense", "share_of_bound", "peak_gib", "error", "status")
"""The columns that every measurement ends with."""

MULTIPLY_SHOWN = ("arch", "layer", "mode", "candidate", "backend", "launch", *TIMES)
MODEL_SHOWN = ("layer", "layers", "out_features", "in_features", "rows", "candidate", "backend", "launch", "weights_gib", *TIMES)

SHOWN_AS = {
    "peak_gib": ("peak GiB", ".3f"),
    "weights_gib": ("weights GiB", ".4f"),
    "median_ms": ("median ms", ".3f"),
    "iqr_ms": ("iqr ms", ".3f"),
    "bound_ms": ("bound ms", ".3f"),
    "ratio_to_dense": ("/ dense", ".2f"),
    "share_of_bound": ("of bound", ".0%"),
    "error": ("error", ".1e"),
    "paper_ratio": ("paper", ""),
}
"""Titles and formats of columns; others have their names and stand as they are."""


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Measure speed: times and ratios to dense, taken in one run."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("multiply", cls=Command)
def multiply(
    arch: Families = None,
    width: Width = 384,
    rows: Rows = None,
    mode: Modes = "fp32",
    launch: Launch = "graph",
    device: options.Device = None,
    threads: Threads = None,
    rounds: Rounds = None,
    seed: options.Seed = 0,
    quick: Quick = False,
    out: Out = None,
    fresh: Fresh = False,
    as_json: options.Json = False,
) -> None:
    """Time every backend on the layers of a transformer block."""
    from flysurgery.bench import Protocol, modes_of
    from flysurgery.bench import multiply as multiplying
    from flysurgery.bench.rows import typed
    from flysurgery.cli.tables import show

    target = prepare(device, threads)
    modes = modes_of(mode, target)
    protocol = Protocol(launch, rounds or (7 if quick else 30), 0.2 if quick else 1.0, seed)
    count = rows or (QUICK_ROWS if quick else ROWS)
    with bench_run(target, multiplying.MULTIPLY_COLUMNS, out, fresh=fresh) as sheet:
        for name in modes:
            for family in arch or ("gonon", "monarch"):
                sheet.fill(multiplying.multiply_jobs(family, width, count, name, target, protocol))
    show(typed(sheet.records), record_table(sheet.records, MULTIPLY_SHOWN), as_json=as_json)


@app.command("model", cls=Command)
def model(
    context: typer.Context,
    model: options.DenseModel,
    arch: options.Arch = "monarch",
    nblocks: options.Nblocks = 4,
    rank: options.Rank = None,
    roles: options.Roles = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    model_args: options.ModelArgs = None,
    base: options.Base = None,
    batch: Annotated[int, option(MEASUREMENT, "--batch", "Images a forward.", "N", 1)] = 1,
    mode: Annotated[str, option(MEASUREMENT, "--mode", MODE_HELP, "NAME")] = "fp32",
    launch: Launch = "graph",
    optimized: Annotated[bool, option(MEASUREMENT, "--optimized", OPTIMIZED_HELP)] = False,
    device: options.Device = None,
    threads: Threads = None,
    rounds: Rounds = None,
    seed: options.Seed = 0,
    quick: Quick = False,
    out: Out = None,
    fresh: Fresh = False,
    as_json: options.Json = False,
) -> None:
    """Say whether conversion makes MODEL faster on this machine, and which layers should stay dense; needs no weights."""
    from flysurgery.bench import Protocol, modes_of, rows_of_case
    from flysurgery.bench import model as models
    from flysurgery.bench.rows import typed
    from flysurgery.cli.source import find_dense
    from flysurgery.cli.tables import show

    target = prepare(device, threads)
    precision, *others = modes_of(mode, target)
    if others:
        raise OptionError(f"bench model takes one mode at a time, got {mode}")
    source = find_dense(model, base=base, model_args=model_args)
    plan = source.plan(source.skeleton(), arch, context.params)
    protocol = Protocol(launch, rounds or (7 if quick else 30), 0.1 if quick else 0.5, seed).on(target)
    name = ", ".join((source.name, *(f"{name}={value}" for name, value in options.model_arguments(model_args).items())))
    settings = models.ModelSettings(name, target, batch, precision, search=not quick, optimized=optimized, protocol=protocol)
    groups, whole = models.groups_of(plan), models.whole_head(settings, plan)
    launched = {"launch": protocol.launch}
    with bench_run(target, models.MODEL_COLUMNS, out, fresh=fresh) as sheet:
        sheet.fill(models.layer_jobs(groups, settings))
        found = [row for group in groups for row in sheet.rows(models.layer_head(settings, group) | launched)]
        rows = list({(row["layer"], row["candidate"]): row for row in found}.values())  # the last where quick ones came before
        build = partial(source.build, pretrained=False, seed=seed, device=target)
        make = partial(models.whole_case, plan, build, settings, models.slower_layers(rows, groups))
        last = "converted, optimized" if optimized else "converted"
        sheet.fill([(whole | launched | {"candidate": last}, partial(rows_of_case, whole, make, precision, protocol))])
        rows += sheet.rows(whole | launched)
    answer = models.sentence(rows, groups)
    document = {"answer": answer, "stay_dense": list(models.slower_layers(rows, groups)), **typed(rows)}
    show(document, f"{record_table(rows, MODEL_SHOWN)}\n{answer}", as_json=as_json)


def prepare(device: str | None, threads: int | None) -> torch.device:
    """The device that is meant, after the number of threads has been set."""
    import torch

    target = options.device_of(device)
    if threads is not None:
        torch.set_num_threads(threads)
    return target


@contextmanager
def bench_run(device: torch.device, columns: Iterable[str], out: Path | None, *, fresh: bool) -> Iterator[Sheet]:
    """Rows with the given columns, of this run and of the interrupted one before it; progress on stderr where it is a terminal.

    Raises ``OptionError`` where ``--out`` cannot be written or names a file that holds something else.
    """
    from flysurgery.bench import Sheet
    from flysurgery.cli.tables import progress

    sheet = Sheet(out, device, columns, fresh=fresh)
    if sheet.dropped:
        typer.echo(f"{out}: {sheet.dropped} rows of another device or version are measured anew", err=True)
    if sheet.records:
        typer.echo(f"{out}: {len(sheet.records)} rows are there already and stay; --fresh measures them again", err=True)
    with progress("measuring") as sheet.step:
        yield sheet


def record_table(records: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Some columns of the records; numbers short, and to the right.

    Left out are memory where no row has it and, for a CPU, the share of the bound, since inputs that lie in its caches are not bounded by
    the rate of its memory.
    """
    absent = {name for name in ("peak_gib", "weights_gib") if not any(record.get(name) for record in records)}
    if all(record.get("device_type") == "cpu" for record in records):
        absent.add("share_of_bound")
    cells, right = {}, set()
    for name in columns:
        if name not in absent:
            title, form = SHOWN_AS.get(name, (name.replace("_", " "), ""))
            texts = ["" if record[name] is None else str(record[name]) for record in records]
            cells[title] = [format(float(text), form) if text and form else text for text in texts]
            if form or all(_is_number(text) for text in texts):
                right.add(title)
    return text_table([*cells], list(zip(*cells.values(), strict=True)), right=right)


def _is_number(text: str) -> bool:
    try:
        float(text or 0)
    except ValueError:
        return False
    return True
