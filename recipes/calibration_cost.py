"""Processor and wall time of calibrating a ViT-S/16, of permuting it, and of planning it under a budget.

    python recipes/calibration_cost.py --threads 2 --device cpu --out build/rows.csv

The weights are random and the images smooth noise, so the time is that of a real model and the errors are not. There is one row for each
case and role: processor and wall seconds of the whole case, and of one bare pass over the same images, which is what none can do without.
A plan's row has no errors; its own calibration comes on top.

Needs a minute on an H200, or ten on two quiet CPU cores.
Rows: recipes/results/calibration_vit_s16.csv
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import cache, partial
from statistics import mean

import recipe
import timm
import torch
from torch import nn
from torch.nn import functional

from flysurgery.bench import Record
from flysurgery.bench.measuring import synchronize
from flysurgery.calibration import Samples
from flysurgery.surgery import PLACEHOLDER, Report, allocate, apply, plan

CASES = ("calibrated", "permuted", "plan of budget 0.4")


ERRORS = ("mean_output_error", "mean_plain_output_error", "worst_ratio")
SECONDS = ("forward_cpu_s", "forward_wall_s", "case_cpu_s", "case_wall_s", "beyond_forward_wall_s")
COLUMNS = ("model", "case", "arch", "samples", "role", "layers", *ERRORS, *SECONDS)
"""Errors are relative output errors on held-out samples, seconds those of the whole case."""


def smooth_images(count: int, device: torch.device) -> torch.Tensor:
    """Noise at four scales, the coarse ones stronger, as photographs have it; shape (count, 3, 224, 224)."""
    generator = torch.Generator(device).manual_seed(0)
    images = torch.zeros(count, 3, 224, 224, device=device)
    for size in (4, 14, 56, 224):
        noise = torch.randn(count, 3, size, size, generator=generator, device=device) / size**0.5
        images += functional.interpolate(noise, size=(224, 224), mode="bilinear")
    return images


def timed(work: Callable[[], Report | None], device: torch.device) -> tuple[float, float, Report | None]:
    """The seconds of all processors together, those by the clock, and what ``work`` gave."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = work()
    synchronize(device)
    return time.process_time() - cpu, time.perf_counter() - wall, found


def forward_passes(model: nn.Module, samples: Samples) -> None:
    """Run the model on all samples."""
    with torch.no_grad():
        for batch in (*samples.fit(), *samples.held_out()):
            model(batch)


def run_case(case: str, model: nn.Module, arch: str, samples: Samples) -> Report | None:
    """What is timed."""
    if case.startswith("plan"):
        allocate(plan(model, PLACEHOLDER), model, budget=0.4, calibrate=samples)
        return None
    return apply(plan(model, arch), model, calibrate=samples, permute=case == "permuted")


def rows_of(head: Record, model: nn.Module, samples: Samples, forward: tuple[float, float]) -> list[Record]:
    """Time one case."""
    own = copy.deepcopy(model)
    cpu, wall, report = timed(lambda: run_case(head["case"], own, head["arch"], samples), samples.inputs.device)
    rows = []
    for role in ("all",) if report is None else ("qkv", "ffn_in", "ffn_out"):
        layers = () if report is None else report.replaced
        found = [row.calibration for row in layers if row.role == role and row.calibration is not None]
        row = {**head, "role": role, **dict(zip(SECONDS, (*forward, cpu, wall, wall - forward[1]), strict=True))}
        if found:
            means = mean(each.output_error for each in found), mean(each.plain_output_error for each in found)
            row |= {"layers": len(found), **dict(zip(ERRORS, (*means, max(each.ratio for each in found)), strict=True))}
        rows.append(row)
    return rows


def main() -> None:
    """Time the cases, print the rows and write them."""
    parser = recipe.parser_of(__doc__)
    recipe.add_options(parser)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--arch", default="gonon")
    parser.add_argument("--samples", type=recipe.count, help="512 by default, 16 with --quick")
    parser.add_argument("--depth", type=recipe.count, help="blocks of the model, 12 by default, 1 with --quick")
    options = parser.parse_args()
    device, _ = recipe.device_and_modes(options)
    count, depth = options.samples or (16 if options.quick else 512), options.depth or (1 if options.quick else 12)
    torch.manual_seed(options.seed)
    model = f"{recipe.VIT_S}, {depth} blocks, random weights"
    heads = [{"model": model, "case": case, "arch": options.arch, "samples": count} for case in options.cases]

    @cache
    def prepared() -> tuple[nn.Module, Samples, tuple[float, float]]:
        dense = timm.create_model(recipe.VIT_S, depth=depth).eval().to(device)
        samples = Samples(smooth_images(count, device), "smooth noise")
        forward_passes(dense, Samples(samples.inputs[:8]))
        cpu, wall, _ = timed(lambda: forward_passes(dense, samples), device)
        return dense, samples, (cpu, wall)

    jobs: list[recipe.Job] = [(head, partial(lambda head: rows_of(head, *prepared()), head)) for head in heads]
    recipe.make(options, device, COLUMNS, jobs, shown=("case", "arch", "role", "layers", *ERRORS[:2], *SECONDS[1:]))


if __name__ == "__main__":
    recipe.main(main)
