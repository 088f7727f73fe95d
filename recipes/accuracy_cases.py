"""The rows of an accuracy table: one model converted in many ways, each before and after the same short fine-tuning.

A case is a target, which fixes how many weights each matrix keeps, and a method, which chooses them: projections onto the target's
architectures, plain low rank with as many parameters, or the entries of largest magnitude.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from flysurgery import surgery
from flysurgery.bench import Sheet, Stamp, take_stamp, write_records
from flysurgery.bench.rows import columns_of, flat
from flysurgery.errors import FlysurgeryError
from flysurgery.evaluation import ImageData, evaluate
from flysurgery.patterns import named
from flysurgery.surgery import LayerPlan, Plan

TARGETS = ("gonon", "monarch", "budget 0.4", "budget 0.45")
METHODS = ("svd", "calibrated", "lowrank", "lowrank calibrated", "magnitude", "sequential", "permuted")
ROLES = ("qkv", "ffn_in", "ffn_out")
DENSE = "dense"

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "gonon": {"arch": "gonon"},
    "monarch": {"arch": "monarch", "nblocks": 4},
    "budget 0.4": {"arch": surgery.PLACEHOLDER},
    "budget 0.45": {"arch": surgery.PLACEHOLDER},
}
"""What each target means, as options of ``surgery.plan``."""

BUDGETS = {"budget 0.4": 0.4, "budget 0.45": 0.45}
"""The targets whose architectures are chosen for all layers together, with the calibration images."""

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


@dataclass(frozen=True)
class Workshop:
    """What one process makes rows with: the dense model on its device, inputs to calibrate with, images to measure on, and ``fine_tune``,
    which trains its argument in place. None of them changes."""

    dense: nn.Module
    base: str
    base_args: Mapping[str, Any]
    calibration: Tensor
    held_out: ImageData
    fine_tune: Callable[[nn.Module], None] | None
    finetune_share: float
    plans: Path | None = None

    def plan(self, target: str) -> Plan | None:
        """The architectures of each layer; None for the dense model. What a budget chose is kept in the folder ``plans``.

        Raises:
            FlysurgeryError: the plan failed.
        """
        if target == DENSE:
            return None
        file = None if self.plans is None else self.plans / f"{target}.json"
        if file is not None and file.is_file():
            return Plan.from_json(json.loads(file.read_text(encoding="utf-8")))
        plan = surgery.plan(self.dense, base=self.base, base_args=self.base_args, **OPTIONS[target])
        if target in BUDGETS:
            plan, _ = surgery.allocate(plan, self.dense, budget=BUDGETS[target], calibrate=self.calibration)
            if file is not None:
                file.write_text(json.dumps(plan.to_json()) + "\n", encoding="utf-8")
        return plan

    def row(self, case: Case, plan: Plan | None) -> Row:
        """Convert a copy, measure, fine-tune and measure again; all but the points, which need the dense model's row.

        Raises:
            FlysurgeryError, RuntimeError: no row came of it.
        """
        made = Made(copy.deepcopy(self.dense), 1.0, 0.0, None) if plan is None else make(case, self.dense, plan, self.calibration)
        device = next(self.dense.parameters()).device
        model = made.model.to(device)
        errors: Any = {}
        if made.plan is not None and case.method != "permuted":
            images = torch.stack([self.held_out.dataset[index][0] for index in range(min(64, self.held_out.samples))])
            errors = output_errors(self.dense, model, made.plan, images.to(device))
        row = Row(
            target=case.target,
            method=case.method,
            replaced_share=made.replaced_share,
            model_params=_parameters(model),
            **errors,
            top1=evaluate(model, self.held_out, batch_size=128).top1,
            samples=self.held_out.samples,
            convert_seconds=made.seconds,
        )
        if self.fine_tune is None:
            return row
        started = time.perf_counter()
        self.fine_tune(model)
        seconds = time.perf_counter() - started
        after = evaluate(model, self.held_out, batch_size=128).top1
        return replace(row, top1_finetuned=after, finetune_seconds=seconds, finetune_share=self.finetune_share)


def make(case: Case, dense: nn.Module, plan: Plan, calibration: Tensor) -> Made:
    """Convert a copy of ``dense`` by ``plan``; ``calibration`` holds inputs of it.

    Raises:
        FlysurgeryError: the method failed.
    """
    model = copy.deepcopy(dense).eval()
    started = time.perf_counter()
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


def check_out(out: Path, device: torch.device) -> None:
    """See before the first row that ``out`` can be written.

    Raises:
        OptionError: it cannot, or it holds something else than such rows.
    """
    Sheet(out, device, Row)


def run(
    open_workshop: Callable[[], Workshop],
    cases: Sequence[Case],
    out: Path,
    *,
    device: torch.device,
    gpus: Sequence[str] = (),
    minutes: float | None = None,
    echo: Callable[[str], None] = print,
) -> list[Row]:
    """Make the rows of the dense model, which is fine-tuned as well to tell what the fine-tuning alone gives, and of ``cases``.

    The rows are made in as many processes as there are ``gpus``, each with one of these for its CUDA_VISIBLE_DEVICES and a workshop
    of its own; without any, in this process. After each row ``out`` (CSV) is written whole, and ``out`` with the ending .json, from
    which a later call takes the rows that are there already, with their stamps. No row is begun once ``minutes`` are over.

    Raises:
        OptionError: ``out`` cannot be written, or holds something else.
    """
    check_out(out, device)
    started = time.perf_counter()
    rows, stamps = _earlier(out.with_suffix(".json"))
    waiting = [case for case in (Case(DENSE, DENSE), *cases) if case not in rows]
    unplanned = list(dict.fromkeys(case.target for case in waiting))
    plans: dict[str, Plan | None] = {}
    running: dict[Future[Any], Case | str] = {}
    stamp = take_stamp(device)
    with _executor(open_workshop, gpus) as executor:
        while waiting or running:
            over = minutes is not None and time.perf_counter() - started > 60 * minutes
            while not over and len(running) < max(1, len(gpus)):
                ready = next((case for case in waiting if case.target in plans), None)
                if unplanned:
                    target = unplanned.pop(0)
                    running[executor.submit(_plan, target)] = target
                elif ready is not None:
                    waiting.remove(ready)
                    running[executor.submit(_row, ready, plans[ready.target])] = ready
                else:
                    break
            if not running:
                echo(f"stopped before {', '.join(f'{case.target} {case.method}' for case in waiting)}")
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                failed = future.exception()
                if failed is not None and not isinstance(failed, FitError):
                    raise failed
                reason = "" if failed is None else next(iter(str(failed).splitlines()), type(failed).__name__)
                if isinstance(job, Case):
                    rows[job] = future.result() if failed is None else Row(job.target, job.method, status=reason)
                elif failed is None:
                    plans[job] = future.result()
                else:
                    rows |= {case: Row(job, case.method, status=reason) for case in waiting if case.target == job}
                    waiting = [case for case in waiting if case.target != job]
                if isinstance(job, str) and failed is None:
                    continue
                stamps |= {case: stamp for case in rows if case not in stamps}
                _write(out, _table(rows), stamps)
                echo(_shown(rows[job]) if isinstance(job, Case) else f"{job}: {reason}")
    return _table(rows)


_workshop: list[Workshop] = []
"""The workshop of this process, once it is open."""


def _executor(open_workshop: Callable[[], Workshop], gpus: Sequence[str]) -> Executor:
    """Processes that see one of ``gpus`` each, or one thread; every one with a workshop."""
    if not gpus:
        return ThreadPoolExecutor(1, initializer=_open, initargs=(open_workshop,))
    context = multiprocessing.get_context("spawn")
    left = context.SimpleQueue()
    for gpu in gpus:
        left.put(gpu)
    return ProcessPoolExecutor(len(gpus), context, initializer=_open, initargs=(open_workshop, left))


def _open(open_workshop: Callable[[], Workshop], gpus: Any = None) -> None:
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus.get()  # before CUDA is used
    _workshop[:] = [open_workshop()]


def _plan(target: str) -> Plan | None:
    return _workshop[0].plan(target)


def _row(case: Case, plan: Plan | None) -> Row:
    return _workshop[0].row(case, plan)


def _write(out: Path, rows: Sequence[Row], stamps: Mapping[Case, Stamp]) -> None:
    records = [flat(row) | flat(stamps[Case(row.target, row.method)]) for row in rows]
    write_records(out, records)
    out.with_suffix(".json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


def _table(rows: Mapping[Case, Row]) -> list[Row]:
    """The rows in the order of the table, with their distances from the dense model as it came, where that is known."""
    first = Case(DENSE, DENSE)
    reference = rows[first].top1 if first in rows else None

    def points(top1: float | None) -> float | None:
        return None if top1 is None or reference is None else 100 * (top1 - reference)

    ordered = [rows[case] for case in (first, *all_cases()) if case in rows]
    return [replace(row, points=points(row.top1), points_finetuned=points(row.top1_finetuned)) for row in ordered]


def _parameters(model: nn.Module) -> int:
    """All parameters, of pruned matrices those that are kept."""
    dropped = sum(int((mask == 0).sum()) for name, mask in model.named_buffers() if name.endswith("weight_mask"))
    return sum(parameter.numel() for parameter in model.parameters()) - dropped


def _earlier(file: Path) -> tuple[dict[Case, Row], dict[Case, Stamp]]:
    """The rows of earlier calls that are ok, and the stamp of each; what has none was written by an older version, and is made anew."""
    rows, stamps = dict[Case, Row](), dict[Case, Stamp]()
    for each in json.loads(file.read_text(encoding="utf-8")) if file.is_file() else ():
        if each["status"] == "ok" and "commit" in each:
            case = Case(each["target"], each["method"])
            rows[case] = Row(**{name: each[name] for name in columns_of(Row)})
            stamps[case] = Stamp(**{name: each[name] for name in columns_of(Stamp)})
    return rows, stamps


def _shown(row: Row) -> str:
    if row.status != "ok":
        return f"{row.target}, {row.method}: {row.status}"
    line = f"{row.target}, {row.method}: {row.replaced_share:.1%} kept, top-1 {row.top1:.2%}"
    if row.top1_finetuned is not None:
        line += f", fine-tuned {row.top1_finetuned:.2%} in {row.finetune_seconds:.0f} s"
    errors = {role: getattr(row, f"error_{role}") for role in ROLES}
    return line + "".join(f"; {role} {error:.3f}" for role, error in errors.items() if error is not None)
