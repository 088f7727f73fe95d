"""The rows of an accuracy table: one model converted in many ways, each before and after the same short fine-tuning.

Shared by the recipes of the digits and of the fractals. A case is a target, which fixes how many weights each matrix keeps, and a
method, which chooses them: projections onto the target's architectures, plain low rank with as many parameters, or the entries of
largest magnitude.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from flysurgery import surgery
from flysurgery.bench import take_stamp, write_csv
from flysurgery.errors import FlysurgeryError
from flysurgery.evaluation import ImageData, evaluate
from flysurgery.patterns import named
from flysurgery.surgery import LayerPlan, Plan

TARGETS = ("gonon", "monarch", "budget 0.4")
METHODS = ("svd", "calibrated", "sequential", "permuted", "lowrank", "lowrank calibrated", "magnitude")
ROLES = ("qkv", "ffn_in", "ffn_out")
DENSE = "dense"

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "gonon": {"arch": "gonon"},
    "monarch": {"arch": "monarch", "nblocks": 4},
    "budget 0.4": {"arch": surgery.PLACEHOLDER},
}
"""What each target means, as options of ``surgery.plan``."""

BUDGETS = {"budget 0.4": 0.4}
"""The targets whose architectures are chosen for all layers together, with the calibration images, once for all methods."""

FitError = (FlysurgeryError, RuntimeError)
"""What a case may fail with and still be a row of the table."""


@dataclass(frozen=True)
class Case:
    """One way to convert."""

    target: str
    method: str


@dataclass(frozen=True)
class Made:
    """A converted copy. ``replaced_share`` is the parameters of the replaced layers, and of those that a budget leaves dense, after over
    before, biases included."""

    model: nn.Module
    replaced_share: float
    seconds: float
    plan: Plan | None


@dataclass(frozen=True)
class Row:
    """One case. Accuracies are shares, points are against the dense model as it came, percentages of ``samples``.

    The errors of a role are relative output errors ``norm(W x - W' x) / norm(W x)`` on held-out images, the mean over its layers, each
    of which is given what the dense model gives it; None where hidden units changed places. ``finetune_share`` is the number of
    images of the fine-tuning over that of the training. ``status`` is "ok" or why there are no numbers.
    """

    target: str
    method: str
    replaced_share: float | None = None
    model_params: int | None = None
    error_qkv: float | None = None
    error_ffn_in: float | None = None
    error_ffn_out: float | None = None
    top1: float | None = None
    points: float | None = None
    top1_finetuned: float | None = None
    points_finetuned: float | None = None
    samples: int | None = None
    convert_seconds: float | None = None
    finetune_seconds: float | None = None
    finetune_share: float | None = None
    status: str = "ok"


def all_cases(targets: Sequence[str] = TARGETS, methods: Sequence[str] = METHODS) -> tuple[Case, ...]:
    """Every method for every target, target by target."""
    return tuple(Case(target, method) for target in targets for method in methods)


def make(
    case: Case, dense: nn.Module, base: str, base_args: Mapping[str, Any], calibration: Tensor, plans: dict[str, Plan] | None = None
) -> Made:
    """Convert a copy of ``dense``; ``calibration`` holds inputs of it. ``plans`` keeps the targets' plans from one call to the next.

    Raises:
        FlysurgeryError: the plan or the method failed.
    """
    model = copy.deepcopy(dense).eval()
    started = time.perf_counter()
    plans = {} if plans is None else plans
    if case.target not in plans:
        plans[case.target] = _plan(case.target, model, base, base_args, calibration)
    plan = plans[case.target]
    before, after = (sum(getattr(layer, name) for layer in _selected(plan)) for name in ("params_before", "params_after"))
    if case.method == "magnitude":
        for layer in plan.replaced:
            _prune(model.get_submodule(layer.fqn), layer)
        return Made(model, after / before, time.perf_counter() - started, plan)
    if case.method.startswith("lowrank"):
        plan = replace(plan, layers=tuple(_low_rank(layer) if layer.is_replaced else layer for layer in plan.layers))
        after = sum(layer.params_after for layer in _selected(plan))
    options: dict[str, Any] = {}
    if case.method in ("calibrated", "lowrank calibrated", "sequential", "permuted"):
        options["calibrate"] = calibration
    if case.method in ("sequential", "permuted"):
        options["sequential" if case.method == "sequential" else "permute"] = True
    surgery.apply(plan, model, **options)
    return Made(model, after / before, time.perf_counter() - started, plan)


def _plan(target: str, model: nn.Module, base: str, base_args: Mapping[str, Any], calibration: Tensor) -> Plan:
    plan = surgery.plan(model, base=base, base_args=base_args, **OPTIONS[target])
    if target in BUDGETS:
        plan, _ = surgery.allocate(plan, model, budget=BUDGETS[target], calibrate=calibration)
    return plan


def _selected(plan: Plan) -> list[LayerPlan]:
    """The layers that the target is about: the replaced ones, and those that a budget leaves dense."""
    return [layer for layer in plan.layers if layer.is_replaced or (layer.reason is not None and layer.reason.code == "budget")]


def _low_rank(layer: LayerPlan) -> LayerPlan:
    """The layer with every architecture replaced by one of low rank that has at most as many weights."""
    parts = []
    for part in layer.parts:
        architecture = part.architecture
        if architecture is not None:
            out_features = part.stop - part.start
            rank = max(1, architecture.num_parameters // (out_features + layer.in_features))
            architecture = named("lowrank", out_features, layer.in_features, rank=rank)
        parts.append(replace(part, architecture=architecture))
    return replace(layer, parts=tuple(parts))


def _prune(module: nn.Module, layer: LayerPlan) -> None:
    """Keep of the matrix as many of its largest entries as the plan keeps weights; they alone are trained on."""
    kept = sum(
        part.architecture.num_parameters if part.architecture is not None else (part.stop - part.start) * layer.in_features
        for part in layer.parts
    )
    prune.l1_unstructured(module, "weight", amount=layer.out_features * layer.in_features - kept)


def output_errors(dense: nn.Module, model: nn.Module, plan: Plan, images: Tensor) -> dict[str, float]:
    """The mean relative output error of the layers of each role, each given what the dense model gives it."""
    sums: dict[str, list[float]] = {}

    def compare(layer: LayerPlan) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            bias = module.bias if isinstance(module.bias, Tensor) else 0
            lost = model.get_submodule(layer.fqn)(inputs[0]) - output
            sums.setdefault(layer.role, []).append(float(lost.norm() / (output - bias).norm()))

        return hook

    handles = [dense.get_submodule(layer.fqn).register_forward_hook(compare(layer)) for layer in plan.replaced]
    try:
        with torch.no_grad():
            dense(images)
    finally:
        for handle in handles:
            handle.remove()
    return {f"error_{role}": sum(values) / len(values) for role, values in sums.items() if role in ROLES}


def run(
    dense: nn.Module,
    base: str,
    base_args: Mapping[str, Any],
    cases: Sequence[Case],
    *,
    calibration: Tensor,
    held_out: ImageData,
    fine_tune: Callable[[nn.Module], None] | None,
    finetune_share: float,
    out: Path,
    device: torch.device,
    minutes: float | None = None,
    echo: Callable[[str], None] = print,
) -> list[Row]:
    """Convert, measure, fine-tune and measure again, case by case; ``fine_tune`` trains its argument in place.

    The dense model is the first row, and is fine-tuned as well, to tell what the fine-tuning alone gives. After each row ``out``
    (CSV) is written whole, and ``out`` with the ending .json, from which a later call takes the rows that are there already. No row
    is begun once ``minutes`` are over.
    """
    started = time.perf_counter()
    dense = dense.to(device).eval()
    rows = _earlier(out.with_suffix(".json"))
    plans: dict[str, Plan] = {}
    images = torch.stack([held_out.dataset[index][0] for index in range(min(64, held_out.samples))]).to(device)
    for case in (Case(DENSE, DENSE), *cases):
        if any((row.target, row.method) == (case.target, case.method) for row in rows):
            continue
        spent = (time.perf_counter() - started) / 60
        if minutes is not None and spent > minutes:
            echo(f"stopped before {case.target}, {case.method}: {spent:.1f} of {minutes:g} minutes are over")
            break
        reference = next((row.top1 for row in rows if row.target == DENSE), None)
        try:
            row = _row(case, dense, base, base_args, calibration, held_out, fine_tune, finetune_share, images, device, reference, plans)
        except FitError as error:
            row = Row(case.target, case.method, status=str(error).splitlines()[0])
        rows.append(row)
        write_csv(out, rows, take_stamp(device))
        out.with_suffix(".json").write_text(json.dumps([asdict(each) for each in rows], indent=1) + "\n", encoding="utf-8")
        echo(_shown(row))
    return rows


def _row(
    case: Case,
    dense: nn.Module,
    base: str,
    base_args: Mapping[str, Any],
    calibration: Tensor,
    held_out: ImageData,
    fine_tune: Callable[[nn.Module], None] | None,
    finetune_share: float,
    images: Tensor,
    device: torch.device,
    reference: float | None,
    plans: dict[str, Plan],
) -> Row:
    unchanged = Made(copy.deepcopy(dense), 1.0, 0.0, None)
    made = unchanged if case.target == DENSE else make(case, dense, base, base_args, calibration, plans)
    model = made.model.to(device)
    errors: Any = output_errors(dense, model, made.plan, images) if made.plan is not None and case.method != "permuted" else {}
    before = evaluate(model, held_out, batch_size=128, device=device).top1
    reference = before if reference is None else reference
    row = Row(
        target=case.target,
        method=case.method,
        replaced_share=made.replaced_share,
        model_params=_parameters(model),
        **errors,
        top1=before,
        points=100 * (before - reference),
        samples=held_out.samples,
        convert_seconds=made.seconds,
    )
    if fine_tune is None:
        return row
    started = time.perf_counter()
    fine_tune(model)
    seconds = time.perf_counter() - started
    after = evaluate(model, held_out, batch_size=128, device=device).top1
    return replace(
        row, top1_finetuned=after, points_finetuned=100 * (after - reference), finetune_seconds=seconds, finetune_share=finetune_share
    )


def _parameters(model: nn.Module) -> int:
    """All parameters, of pruned matrices those that are kept."""
    dropped = sum(int((mask == 0).sum()) for name, mask in model.named_buffers() if name.endswith("weight_mask"))
    return sum(parameter.numel() for parameter in model.parameters()) - dropped


def _earlier(file: Path) -> list[Row]:
    found = [Row(**each) for each in json.loads(file.read_text(encoding="utf-8"))] if file.is_file() else []
    return [row for row in found if row.status == "ok"]


def _shown(row: Row) -> str:
    if row.status != "ok":
        return f"{row.target}, {row.method}: {row.status}"
    line = f"{row.target}, {row.method}: {row.replaced_share:.1%} kept, top-1 {row.top1:.2%} ({row.points:+.2f})"
    if row.top1_finetuned is not None:
        line += f", fine-tuned {row.top1_finetuned:.2%} ({row.points_finetuned:+.2f}) in {row.finetune_seconds:.0f} s"
    errors = {role: getattr(row, f"error_{role}") for role in ROLES}
    return line + "".join(f"; {role} {error:.3f}" for role, error in errors.items() if error is not None)
