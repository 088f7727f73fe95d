"""The accuracy of the demo model after each way to make it smaller, beside what each layer's output loses: results/digits_accuracy.csv.

    python recipes/digits_accuracy.py [--finetune-steps N] [--out FILE]

Rows: dense; the plain projection; calibrated; calibrated block by block; with hidden units in a new order; low rank with the same number
of weights a layer, plain and calibrated; magnitude pruning to the same density, which stores as many weights and their places; and a
budget of 0.4 shared among the layers, whose density counts those that it leaves dense.
Calibration images come from the training part, accuracy and pruning errors from the 599 held-out digits. One digit is 0.17 points.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn

from flysurgery.checkpoint import load_dense
from flysurgery.evaluation import evaluate, load_calibration, load_data
from flysurgery.patterns import low_rank
from flysurgery.surgery import PLACEHOLDER, Plan, Report, allocate, apply, plan

HERE = Path(__file__).parent
DEMO = HERE.parent / "checkpoints" / "digits_vit"
ROLES = ("qkv", "ffn_in", "ffn_out")
BUDGET = 0.4


def equal_low_rank(model: nn.Module, other: Plan) -> Plan:
    """Low rank in the layers of ``other``, of the largest rank with no more weights in any part."""
    patterns = {}
    for layer in other.replaced:
        for part in layer.parts:
            assert part.architecture is not None
            rows = part.stop - part.start
            rank = part.architecture.num_parameters // (rows + layer.in_features)
            patterns[rows, layer.in_features] = low_rank(rows, layer.in_features, rank)
    return plan(model, patterns=list(patterns.values()))


@torch.no_grad()
def prune(model: nn.Module, like: Plan) -> None:
    """Keep, in each part, as many of the largest entries as ``like`` stores weights."""
    for layer in like.replaced:
        weight = model.get_parameter(f"{layer.fqn}.weight")
        for part in layer.parts:
            assert part.architecture is not None
            rows = weight[part.start : part.stop]
            smallest_kept = rows.abs().flatten().topk(part.architecture.num_parameters).values[-1]
            rows[rows.abs() < smallest_kept] = 0


def finetuner(steps: int) -> Callable[[nn.Module], None] | None:
    """What trains a model for some steps, where this version of the package has it."""
    if not steps:
        return None
    if importlib.util.find_spec("flysurgery.finetune") is None:
        raise SystemExit("--finetune-steps needs flysurgery.finetune, which this version does not have")
    raise SystemExit("--finetune-steps is not connected yet; fine-tune a converted folder with `flysurgery finetune`")


def errors(report: Report | None) -> dict[str, str]:
    """Mean relative output errors on held-out calibration images by role, and the worst share of the plain projection's."""
    found = {} if report is None else {r: [row.calibration for row in report.replaced if row.role == r] for r in ROLES}
    cells: dict[str, str] = {}
    for role in ROLES:
        known = [each for each in found.get(role, []) if each is not None]
        cells[f"{role}_error"] = f"{mean(each.output_error for each in known):.4f}" if known else ""
        cells[f"{role}_worst_ratio"] = f"{max(each.ratio for each in known):.3f}" if known else ""
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--finetune-steps", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "digits_accuracy.csv")
    arguments = parser.parse_args()
    finetuner(arguments.finetune_steps)
    dense, _, _ = load_dense(DEMO)
    data = load_data("digits", dense)
    samples = load_calibration("digits", dense)
    calibrated: dict[str, Any] = {"calibrate": samples}
    ways: dict[str, dict[str, Any]] = {
        "plain projection": {},
        "calibrated": calibrated,
        "calibrated, sequential": {**calibrated, "sequential": True},
        "calibrated, permuted": {**calibrated, "permute": True},
        "calibrated, sequential, permuted": {**calibrated, "sequential": True, "permute": True},
    }
    rows: list[dict[str, Any]] = []

    def add(
        arch: str, method: str, model: nn.Module, used: Plan | None, report: Report | None, seconds: float, density: float | None = None
    ) -> None:
        accuracy = evaluate(model, data)
        layers = () if used is None else used.replaced
        before, after = sum(layer.weights_before for layer in layers), sum(layer.weights_after for layer in layers)
        density = density or (after / before if layers else 1.0)
        rows.append(
            {"arch": arch, "method": method, "top1": f"{accuracy.top1:.4f}", "density": f"{density:.3f}"}
            | errors(report)
            | {"seconds": f"{seconds:.1f}"}
        )
        print(rows[-1], flush=True)

    add("", "dense", dense, None, None, 0.0)
    for arch in ("gonon", "monarch"):
        base = plan(load_dense(DEMO)[0], arch)
        equal = equal_low_rank(load_dense(DEMO)[0], base)
        cases = [(arch, name, base, options) for name, options in ways.items()]
        cases += [(f"low rank, weights as {arch}", name, equal, ways[name]) for name in ("plain projection", "calibrated, sequential")]
        for label, name, used, options in cases:
            model, _, _ = load_dense(DEMO)
            started = time.perf_counter()
            report = apply(used, model, **options)
            add(label, name, model, used, report, time.perf_counter() - started)
        model, _, _ = load_dense(DEMO)
        prune(model, base)
        add(f"unstructured, weights as {arch}", "magnitude pruning", model, base, None, 0.0)
    model, _, _ = load_dense(DEMO)
    selected = plan(model, PLACEHOLDER)
    for name, allocation, options in (("plain projection", {}, {}), ("calibrated, sequential", calibrated, ways["calibrated, sequential"])):
        started = time.perf_counter()
        model, _, _ = load_dense(DEMO)
        used, tradeoff = allocate(selected, model, budget=BUDGET, **allocation)
        report = apply(used, model, **options)
        add(f"budget {BUDGET:g}", name, model, used, report, time.perf_counter() - started, density=tradeoff.chosen.share)
    with arguments.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
