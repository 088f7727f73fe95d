"""Whole Vision Transformers as ``flysurgery.optimize`` makes them, beside dense ones, compiled ones and converted ones.

    python recipes/optimized_vit.py --headline --out recipes/results/optimized_vit_headline_h200.csv    # two minutes
    python recipes/optimized_vit.py --out recipes/results/optimized_vit_h200.csv
    python recipes/optimized_vit.py --max-autotune    # the dense model through torch.compile's longest search as well, some minutes more

timm's model with fused qkv and scaled_dot_product_attention, random weights; all candidates in one shuffled run, as CUDA graphs over
inputs larger than the L2 cache. "dense optimized" is ``optimize`` applied to the dense model: what fusion gives without any structure,
and in fp32 products on tensor cores; what "optimized" gains beyond it is the structure's. Errors are those of the outputs against
float64, relative; a candidate that is wrong gets no time, and where dense, timed twice, differs from itself, rows say noisy. Joules are
those of a batch, from NVML's counter over windows of a second of replayed graphs. With --quick nothing goes through the compiler.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import recipe
import timm
import torch
from torch import Tensor, nn

import flysurgery
from flysurgery.bench import EnergyMeter, Measured, Record, in_mode
from flysurgery.bench.units import converted_timm
from flysurgery.bench.variants import by_definition
from flysurgery.bench.work import work_of
from flysurgery.cli.options import names
from flysurgery.errors import OptionError
from flysurgery.walker import example_input

CHECKED = 8
"""Images whose outputs are held against float64."""

DENSE = "dense"
TWINS = {DENSE: DENSE, "dense optimized": DENSE, "converted": "converted", "optimized": "converted"}
"""Each candidate that nothing compiles, and the model without fusion that it computes."""

COMPILED = {"dense compiled": DENSE, "optimized compiled": "optimized"}
"""What goes through ``torch.compile``, and the candidate that it is made of. Of an optimized model it fuses what is between groups."""

METERED = (DENSE, "dense optimized", "optimized")
"""The candidates whose joules are measured."""


@dataclass(frozen=True)
class Case:
    """What is compared: ``compiled`` adds those through ``torch.compile``, ``max_autotune`` its longest search, ``energy`` joules."""

    model: str
    arch: str
    mode: str
    batch: int
    compiled: bool = True
    max_autotune: bool = False
    energy: bool = False


HEADLINE = (
    Case("vit_small_patch16_224", "gonon", "fp16", 128, energy=True),
    Case("vit_small_patch16_224", "gonon", "fp16", 1, compiled=False),
    Case("vit_base_patch16_224", "gonon", "fp16", 128),
)


@dataclass(frozen=True)
class Row:
    """One candidate; ``fused`` counts the groups of layers that became fused modules. Joules are those of the whole batch."""

    model: str
    arch: str
    mode: str
    batch: int
    candidate: str
    fused: int
    joules: float | None
    joules_to_dense: float | None
    measured: Measured


def measure_case(table: recipe.Table, case: Case, meter: EnergyMeter | None) -> list[Row]:
    """Check, time and meter all candidates of one case."""
    device = table.device
    with in_mode(case.mode) as dtype:
        dense = timm.create_model(case.model, pretrained=False)
        plain = {DENSE: dense, "converted": converted_timm(case.model, {}, case.arch)}
        plain = {name: model.to(device, dtype).eval().requires_grad_(False) for name, model in plain.items()}
        # Drawn on the CPU: a graph that could not be captured leaves CUDA's generator unusable.
        x = torch.randn(case.batch, *cast(Tensor, example_input(dense)).shape[1:]).to(device, dtype)
        models = {name: copy.deepcopy(plain[twin]) for name, twin in TWINS.items()}
        fused = dict.fromkeys(models, 0)
        for name in ("dense optimized", "optimized"):
            report = flysurgery.optimize(models[name], x)
            fused[name] = len(report.fused)
            print(f"{name}: {report}", flush=True)
        runs: dict[str, recipe.Run | str] = dict(models)
        if case.max_autotune:
            runs["dense max-autotune"] = table.compiled(models[DENSE], "max-autotune-no-cudagraphs")
        if case.compiled:
            runs |= {name: table.compiled(models[plain_one]) for name, plain_one in COMPILED.items()}
        twins = {name: TWINS.get(COMPILED.get(name, name), DENSE) for name in runs}
        with torch.inference_mode():
            rows = range(min(CHECKED, case.batch))
            works = {name: work_of(by_definition(model), x) for name, model in plain.items()}
            truths = {name: by_definition(model).double()(x[list(rows)].double()) for name, model in plain.items()}
            checks = {name: truths[twin] for name, twin in twins.items()}, {name: works[twin] for name, twin in twins.items()}
            found = table.measure(case.mode, runs, x, *checks, worst=16, rows=rows)
            joules = _joules(meter, {name: models[name] for name in METERED if found[name].median_ms}, x) if case.energy and meter else {}
    dense_joules = joules.get(DENSE)
    head = (case.model, case.arch, case.mode, case.batch)
    return [
        Row(*head, name, fused.get(name, 0), joules.get(name), _ratio(joules.get(name), dense_joules), measured)
        for name, measured in found.items()
    ]


def _joules(meter: EnergyMeter, models: Mapping[str, nn.Module], x: Tensor) -> dict[str, float | None]:
    idle = meter.idle_watts()
    return {name: meter.measure(model, x, windows=2, idle_watts=idle).joules for name, model in models.items()}


def _ratio(own: float | None, dense: float | None) -> float | None:
    return own / dense if own and dense else None


def _meter(device: torch.device) -> EnergyMeter | None:
    try:
        return EnergyMeter(device)
    except OptionError as error:
        print(f"no joules: {error}")
        return None


def draw(records: Sequence[Record], plot: Path) -> None:
    """Bars for each model, a picture for each mode."""
    recipe.draw(plot, records, group=("model", "arch", "batch"))


def main() -> None:
    """Measure, print and write."""
    parser = recipe.arguments(__doc__, modes="fp16,bf16,tf32,fp32", seconds=2.0)
    parser.add_argument("--headline", action="store_true", help="ViT-S/16 at batch 128, with joules, and 1, and ViT-B/16; fp16")
    parser.add_argument("--model", default=recipe.VIT_S)
    parser.add_argument("--archs", default="gonon,monarch", help="families of architectures")
    parser.add_argument("--batches", type=recipe.counts, help="images a forward; 128,1 by default")
    parser.add_argument("--max-autotune", action="store_true")
    parser.add_argument("--energy", action="store_true", help="joules of a batch too")
    table = recipe.table_of(parser)
    options = table.options
    own = {"compiled": not options.quick, "max_autotune": options.max_autotune, "energy": options.energy}
    cases = [
        Case(options.model, arch, mode, batch, **own)
        for batch in table.few(options.batches or (recipe.images(options, table.device), 1))
        for mode in table.modes
        for arch in table.few(names(options.archs, "--archs"))
    ]
    by_columns = {(case.model, case.arch, case.mode, case.batch): case for case in (HEADLINE if options.headline else cases)}
    meter = _meter(table.device) if any(case.energy for case in by_columns.values()) else None

    def rows_of(table: recipe.Table, **columns: Any) -> list[Row]:
        return measure_case(table, by_columns[tuple(columns.values())], meter)

    table.make(Row, [dict(zip(("model", "arch", "mode", "batch"), each, strict=True)) for each in by_columns], rows_of, draw)


if __name__ == "__main__":
    recipe.main(main)
