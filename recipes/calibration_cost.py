"""What it costs beyond the forward passes to calibrate a ViT-S/16, to permute it, and to plan it under a budget.

    python recipes/calibration_cost.py --threads 2 --out recipes/results/calibration_vit_s16_cpu.csv
    python recipes/calibration_cost.py --device cuda --out recipes/results/calibration_vit_s16_h200.csv

The weights are random and the images smooth noise, so the time is that of a real model and the errors are not. There is one row for each
case and role: processor and wall seconds of the whole case, and of one bare pass over the same images, which is what none can do without.
A plan's row has no errors; its own calibration comes on top.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import recipe
import timm
import torch
from torch import nn
from torch.nn import functional

from flysurgery.bench import check_file, take_stamp, write_csv
from flysurgery.calibration import Samples
from flysurgery.cli.options import device_of
from flysurgery.surgery import PLACEHOLDER, Report, allocate, apply, plan

CASES = ("calibrated", "permuted", "plan of budget 0.4")


@dataclass(frozen=True)
class Row:
    """One role in one case; errors are relative output errors on held-out samples, seconds those of the whole case."""

    model: str
    case: str
    arch: str
    samples: int
    role: str
    layers: int | None
    mean_output_error: float | None
    mean_plain_output_error: float | None
    worst_ratio: float | None
    forward_cpu_s: float
    forward_wall_s: float
    case_cpu_s: float
    case_wall_s: float
    beyond_forward_wall_s: float


def smooth_images(count: int, device: torch.device) -> torch.Tensor:
    """Noise at four scales, the coarse ones stronger, as photographs have it; shape (count, 3, 224, 224)."""
    generator = torch.Generator(device).manual_seed(0)
    images = torch.zeros(count, 3, 224, 224, device=device)
    for size in (4, 14, 56, 224):
        noise = torch.randn(count, 3, size, size, generator=generator, device=device) / size**0.5
        images += functional.interpolate(noise, size=(224, 224), mode="bilinear")
    return images


def seconds_of(work: Callable[[], Report | None], device: torch.device) -> tuple[float, float, Report | None]:
    """Processor and wall seconds of ``work``, and what it gave."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.process_time() - cpu, time.perf_counter() - wall, found


def forward_passes(model: nn.Module, samples: Samples) -> None:
    with torch.no_grad():
        for batch in (*samples.fit(), *samples.held_out()):
            model(batch)


def run_case(case: str, model: nn.Module, arch: str, samples: Samples) -> Report | None:
    if case.startswith("plan"):
        allocate(plan(model, PLACEHOLDER), model, budget=0.4, calibrate=samples)
        return None
    return apply(plan(model, arch), model, calibrate=samples, permute=case == "permuted")


def main() -> None:
    """Time the cases, print the rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--arch", default="gonon")
    parser.add_argument("--samples", type=recipe.count, default=512)
    parser.add_argument("--threads", type=recipe.count, help="CPU threads")
    parser.add_argument("--device", help="cpu, cuda, ...; by default cuda where there is one")
    parser.add_argument("--depth", type=recipe.count, default=12, help="blocks of the model")
    parser.add_argument("--out", type=Path, help="CSV file to write", metavar="FILE")
    options = parser.parse_args()
    device = device_of(options.device)
    if options.out is not None:
        check_file(options.out, "--out")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dense = timm.create_model("vit_small_patch16_224", depth=options.depth).eval().to(device)
    samples = Samples(smooth_images(options.samples, device), "smooth noise")
    forward_passes(dense, Samples(samples.inputs[:8]))
    forward_cpu, forward_wall, _ = seconds_of(lambda: forward_passes(dense, samples), device)
    stamp = take_stamp(device)
    rows: list[Row] = []
    for case in options.cases:
        model = copy.deepcopy(dense)
        cpu, wall, report = seconds_of(lambda case=case, model=model: run_case(case, model, options.arch, samples), device)
        for role in ("all",) if report is None else ("qkv", "ffn_in", "ffn_out"):
            layers = () if report is None else report.replaced
            found = [row.calibration for row in layers if row.role == role and row.calibration is not None]
            row = Row(
                model=f"vit_small_patch16_224, {options.depth} blocks, random weights",
                case=case,
                arch="any" if report is None else options.arch,
                samples=options.samples,
                role=role,
                layers=len(found) or None,
                mean_output_error=mean(each.output_error for each in found) if found else None,
                mean_plain_output_error=mean(each.plain_output_error for each in found) if found else None,
                worst_ratio=max(each.ratio for each in found) if found else None,
                forward_cpu_s=forward_cpu,
                forward_wall_s=forward_wall,
                case_cpu_s=cpu,
                case_wall_s=wall,
                beyond_forward_wall_s=wall - forward_wall,
            )
            rows.append(row)
            print(row, flush=True)
        if options.out is not None:
            write_csv(options.out, rows, stamp)


if __name__ == "__main__":
    recipe.main(main)
