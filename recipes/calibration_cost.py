"""What a calibration of a ViT-S/16 costs beyond its forward passes, and what it does to the layers' output errors.

    python recipes/calibration_cost.py [--arch gonon] [--samples 512] [--threads 2] [--out FILE]

The weights are random and the images smooth noise, so the time is that of a real model and the errors are not. Writes one row for each
role: processor and wall seconds of the whole run, and of one bare pass over the same images, which is what a calibration cannot do without.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from statistics import mean

import timm
import torch
from torch.nn import functional

from flysurgery.calibration import Samples
from flysurgery.surgery import apply, plan

HERE = Path(__file__).parent


def smooth_images(count: int) -> torch.Tensor:
    """Noise at four scales, the coarse ones stronger, as photographs have it; shape (count, 3, 224, 224)."""
    generator = torch.Generator().manual_seed(0)
    images = torch.zeros(count, 3, 224, 224)
    for size in (4, 14, 56, 224):
        noise = torch.randn(count, 3, size, size, generator=generator) / size**0.5
        images += functional.interpolate(noise, size=(224, 224), mode="bilinear")
    return images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="gonon")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "calibration_vit_s16_cpu.csv")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch16_224").eval()
    samples = Samples(smooth_images(arguments.samples), "smooth noise")

    wall, cpu = time.perf_counter(), time.process_time()
    with torch.no_grad():
        for batch in (*samples.fit(), *samples.held_out()):
            model(batch)
    forward_wall, forward_cpu = time.perf_counter() - wall, time.process_time() - cpu
    wall, cpu = time.perf_counter(), time.process_time()
    report = apply(plan(model, arguments.arch), model, calibrate=samples)
    whole_wall, whole_cpu = time.perf_counter() - wall, time.process_time() - cpu

    rows = []
    for role in ("qkv", "ffn_in", "ffn_out"):
        found = [row.calibration for row in report.replaced if row.role == role and row.calibration is not None]
        rows.append(
            {
                "model": "vit_small_patch16_224, random weights",
                "arch": arguments.arch,
                "samples": arguments.samples,
                "role": role,
                "layers": len(found),
                "mean_output_error": f"{mean(each.output_error for each in found):.4f}",
                "mean_plain_output_error": f"{mean(each.plain_output_error for each in found):.4f}",
                "worst_ratio": f"{max(each.ratio for each in found):.3f}",
                "threads": arguments.threads,
                "forward_cpu_s": f"{forward_cpu:.0f}",
                "forward_wall_s": f"{forward_wall:.0f}",
                "calibration_cpu_s": f"{whole_cpu:.0f}",
                "calibration_wall_s": f"{whole_wall:.0f}",
                "beyond_forward_cpu_s": f"{whole_cpu - forward_cpu:.0f}",
                "torch": torch.__version__,
            }
        )
    with arguments.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
