"""Whole Vision Transformers as ``flysurgery.optimize`` makes them, beside dense ones, compiled ones and converted ones.

    python recipes/optimized_vit.py --out recipes/results/optimized_vit_h200.csv
    python recipes/optimized_vit.py --max-autotune    # the dense model through torch.compile's longest search as well, some minutes more

timm's model with fused qkv and scaled_dot_product_attention, random weights; all candidates in one shuffled run, as CUDA graphs over
inputs larger than the L2 cache. "dense, patches" is the dense model optimized: what the new patch embedding and norms give without
any structure. Errors are those of the features against float64, relative, in the Frobenius norm.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import timm
import torch
from torch import Tensor, nn

import flysurgery
from flysurgery.bench import in_mode
from flysurgery.bench.compiled import compiled
from flysurgery.bench.rows import write_csv
from flysurgery.bench.stamp import take_stamp
from flysurgery.bench.timing import time_interleaved
from flysurgery.walker import example_input

CHECKED = 8
"""Images whose features are held against float64."""


@dataclass(frozen=True)
class Row:
    """One candidate; ``fused`` counts the groups of layers that became fused modules."""

    model: str
    arch: str
    mode: str
    batch: int
    candidate: str
    fused: int
    error: float
    median_ms: float
    iqr_ms: float
    ratio_to_dense: float
    launch: str


def candidates(dense: nn.Module, arch: str, x: Tensor) -> tuple[dict[str, nn.Module], dict[str, int], dict[str, nn.Module]]:
    """The models by name, how many groups of each are fused, and the model without fusion that each computes."""
    converted = copy.deepcopy(dense)
    flysurgery.convert(converted, arch=arch)
    plain = {"dense": dense, "dense, patches": dense, "converted": converted, "optimized": converted}
    models = {name: copy.deepcopy(model).eval().requires_grad_(False).to(x.dtype) for name, model in plain.items()}
    exact = {name: models[name] for name in ("dense", "converted")}
    fused = dict.fromkeys(models, 0)
    for name in ("dense, patches", "optimized"):
        report = flysurgery.optimize(models[name], x)
        fused[name] = len(report.fused)
        if name == "optimized":
            print(report)
    twins = {"dense": "dense", "dense, patches": "dense", "converted": "converted", "optimized": "converted"}
    return models, fused, {name: exact[twins[name]] for name in models}


def measure(name: str, arch: str, mode: str, batch: int, autotune: bool) -> list[Row]:
    """Time all candidates of one model, architecture, precision and batch."""
    with in_mode(mode) as dtype:
        torch.manual_seed(0)
        dense = timm.create_model(name, pretrained=False).cuda()
        x = torch.randn(batch, *cast(Tensor, example_input(dense)).shape[1:], device="cuda", dtype=dtype)
        models, fused, exact = candidates(dense, arch, x)
        runs: dict[str, Callable[[Tensor], Tensor]] = dict(models)
        if autotune:
            runs["dense, max-autotune"] = torch.compile(models["dense"], mode="max-autotune-no-cudagraphs")
        runs["dense, compiled"] = compiled(models["dense"], "compile")
        with torch.inference_mode():
            errors = {}
            for each, run in runs.items():
                truth = copy.deepcopy(exact.get(each, models["dense"])).double()(x[:CHECKED].double())
                errors[each] = float((run(x)[:CHECKED].double() - truth).norm() / truth.norm())
            timings = time_interleaved(runs, x, rounds=15)
    reference = timings["dense"].median_ms
    return [
        Row(name, arch, mode, batch, each, fused.get(each, 0), errors[each], t.median_ms, t.iqr_ms, t.median_ms / reference, t.launch)
        for each, t in timings.items()
    ]


def main() -> None:
    """Measure, print and write after every table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--arch", nargs="*", default=["gonon", "monarch"])
    parser.add_argument("--modes", nargs="*", default=["fp16", "bf16", "tf32", "fp32"])
    parser.add_argument("--batches", nargs="*", type=int, default=[128, 1])
    parser.add_argument("--max-autotune", action="store_true")
    parser.add_argument("--out", type=Path, help="CSV file to write")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA device, and PyTorch finds none")
    rows: list[Row] = []
    for batch in options.batches:
        for mode in options.modes:
            for arch in options.arch:
                found = measure(options.model, arch, mode, batch, options.max_autotune)
                for row in found:
                    print(row, flush=True)
                rows += found
                if options.out is not None:
                    write_csv(options.out, rows, take_stamp(torch.device("cuda")))


if __name__ == "__main__":
    main()
