"""Whole Vision Transformers as ``flysurgery.optimize`` makes them, beside dense ones, compiled ones and converted ones.

    python recipes/optimized_vit.py --headline --out recipes/results/optimized_vit_headline_h200.csv    # two minutes
    python recipes/optimized_vit.py --out recipes/results/optimized_vit_h200.csv
    python recipes/optimized_vit.py --max-autotune    # the dense model through torch.compile's longest search as well, some minutes more

timm's model with fused qkv and scaled_dot_product_attention, random weights; all candidates in one shuffled run, as CUDA graphs over
inputs larger than the L2 cache. "dense optimized" is ``optimize`` applied to the dense model: what fusion gives without any structure,
and in fp32 products on tensor cores; what "optimized" gains beyond it is the structure's. Errors are those of the outputs against
float64, relative; a candidate that is wrong gets no time, and where dense, timed twice, differs from itself, rows say noisy. Joules are
those of a batch, from NVML's counter over windows of a second of replayed graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import recipe
import timm
import torch
from torch import Tensor, nn

import flysurgery
from flysurgery.bench import MODES, EnergyMeter, Measured, Protocol, Record, in_mode, measure, measure_ceilings
from flysurgery.bench.compiled import compiled
from flysurgery.bench.units import converted_timm
from flysurgery.bench.variants import by_definition
from flysurgery.bench.work import work_of
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


def measure_case(case: Case, meter: EnergyMeter | None, device: torch.device) -> list[Row]:
    """Check, time and meter all candidates of one case."""
    with in_mode(case.mode) as dtype:
        torch.manual_seed(0)
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
        runs: dict[str, Callable[[Tensor], Tensor]] = dict(models)
        if case.max_autotune:
            runs["dense max-autotune"] = torch.compile(models[DENSE], mode="max-autotune-no-cudagraphs")
        if case.compiled:
            runs |= {name: compiled(models[plain_one], "compile") for name, plain_one in COMPILED.items()}
        twins = {name: TWINS.get(COMPILED.get(name, name), DENSE) for name in runs}
        with torch.inference_mode():
            rows = list(range(min(CHECKED, case.batch)))
            works = {name: work_of(by_definition(model), x) for name, model in plain.items()}
            truths = {name: by_definition(model).double()(x[rows].double()) for name, model in plain.items()}
            found = measure(
                runs,
                x,
                {name: truths[twin] for name, twin in twins.items()},
                rows=rows,
                works={name: works[twin] for name, twin in twins.items()},
                ceilings=measure_ceilings(case.mode, device),
                protocol=Protocol(rounds=15, seconds=None),
            )
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


def _meter() -> EnergyMeter | None:
    try:
        return EnergyMeter(torch.device("cuda"))
    except OptionError as error:
        print(f"no joules: {error}")
        return None


def draw(records: Sequence[Record], plot: Path) -> None:
    """Bars for each model, a picture for each mode."""
    recipe.draw(plot, records, group=("model", "arch", "batch"))


def main() -> None:
    """Measure, print and write after every case."""
    parser = recipe.table_arguments(__doc__)
    parser.add_argument("--headline", action="store_true", help="ViT-S/16 at batch 128, with joules, and 1, and ViT-B/16; fp16")
    parser.add_argument("--model", default=recipe.VIT_S)
    parser.add_argument("--arch", nargs="*", default=["gonon", "monarch"])
    parser.add_argument("--modes", nargs="*", choices=MODES, default=["fp16", "bf16", "tf32", "fp32"])
    parser.add_argument("--batches", nargs="*", type=recipe.count, default=[128, 1])
    parser.add_argument("--max-autotune", action="store_true")
    parser.add_argument("--energy", action="store_true", help="joules of a batch too")
    options = recipe.on_cuda(parser)
    cases = [
        Case(options.model, arch, mode, batch, max_autotune=options.max_autotune, energy=options.energy)
        for batch in options.batches
        for mode in options.modes
        for arch in options.arch
    ]
    cases = list(HEADLINE) if options.headline else cases
    meter = _meter() if any(case.energy for case in cases) else None
    rows: list[Row] = []
    for case in cases:
        found = measure_case(case, meter, torch.device("cuda"))
        for row in found:
            print(row, flush=True)
        rows += found
        recipe.keep(options, rows)
    if options.plot is not None:
        draw(recipe.records_of(rows), options.plot)


if __name__ == "__main__":
    recipe.main(main)
