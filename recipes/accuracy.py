"""The accuracy of a model converted in many ways, each before and after the same short fine-tuning with its dense self as teacher.

    python recipes/accuracy.py digits --out build/rows.csv
    python recipes/accuracy.py fractals --folder build/fractals --minutes 9 --out build/rows.csv

The models:

    digits    the demo model in checkpoints/digits_vit, fine-tuned for 6 epochs of the 120 that it was trained for. One of the 599 held-out
              digits is 0.17 points
    fractals  a ViT-S/16 of 100 classes of generated images. The first call trains it for --train-minutes and keeps it in --folder

A target fixes how many weights each matrix keeps, and a method chooses them: projections onto the target's architectures (svd, calibrated,
sequential, permuted), plain low rank with as many parameters, or the entries of largest magnitude. The first row is the dense model, which
is fine-tuned as well. Errors of a role are relative output errors ``norm(W x - W' x) / norm(W x)`` on held-out images, the mean over its
layers, each of which is given what the dense model gives it; there are none where hidden units changed places. A case that fails is
printed and has no row. --quick takes few cases and one epoch, and for fractals a tiny model, whose numbers mean nothing.

Needs ``pip install 'flysurgery[train]'``, and for digits ten minutes of one CPU core, for fractals a CUDA device and half an hour.
Rows: recipes/results/accuracy.csv
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import recipe
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from weight_ways import low_rank

from flysurgery import surgery
from flysurgery.bench import Record
from flysurgery.checkpoint import build_base, load_dense, save_dense
from flysurgery.errors import FlysurgeryError
from flysurgery.evaluation import ImageData, evaluate, load_calibration, load_data
from flysurgery.finetune import Outcome, Settings, train, training_data
from flysurgery.surgery import LayerPlan, Plan

TARGETS: Mapping[str, Mapping[str, Any]] = {
    "gonon": {"arch": "gonon"},
    "monarch": {"arch": "monarch", "nblocks": 4},
    "budget 0.4": {"arch": surgery.PLACEHOLDER},
    "budget 0.45": {"arch": surgery.PLACEHOLDER},
}
"""Options of ``surgery.plan``."""

BUDGETS = {"budget 0.4": 0.4, "budget 0.45": 0.45}
"""The targets whose architectures are chosen for all layers together, with the calibration images."""

METHODS: Mapping[str, Mapping[str, bool]] = {
    "svd": {},
    "calibrated": {"calibrate": True},
    "lowrank": {},
    "lowrank calibrated": {"calibrate": True},
    "magnitude": {},
    "sequential": {"calibrate": True, "sequential": True},
    "permuted": {"calibrate": True, "permute": True},
}
"""Options of ``surgery.apply``."""

DENSE = "dense"
DEMO, DEMO_EPOCHS = Path(__file__).parents[1] / "checkpoints" / "digits_vit", 120
VIT: dict[str, Any] = {"num_classes": 100}
TINY_VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
TINY_IMAGES = 960


ERRORS = ("error_qkv", "error_ffn_in", "error_ffn_out")
ACCURACIES = ("top1", "top1_finetuned", "samples", "finetune_share")
"""Shares of ``samples``. ``finetune_share`` is the images of the fine-tuning over those of the training."""

COLUMNS = ("model", "target", "method", "replaced_share", "model_params", *ERRORS, *ACCURACIES)


@dataclass(frozen=True)
class Subject:
    """A dense model on its device and what its rows are made with. ``fine_tune`` trains its argument in place."""

    name: str
    dense: nn.Module
    base: str
    base_args: Mapping[str, Any]
    calibration: Tensor
    held_out: ImageData
    fine_tune: Callable[[nn.Module], object]
    finetune_share: float

    def plan(self, target: str) -> Plan:
        """The architecture of each layer."""
        plan = surgery.plan(self.dense, base=self.base, base_args=self.base_args, **TARGETS[target])
        if target in BUDGETS:
            plan, _ = surgery.allocate(plan, self.dense, budget=BUDGETS[target], calibrate=self.calibration)
        return plan

    def row(self, target: str, method: str, plan_of: Callable[[str], Plan]) -> Record:
        """Convert a copy, measure, fine-tune and measure again."""
        model, share, errors = copy.deepcopy(self.dense), 1.0, dict[str, float]()
        if target != DENSE:
            plan, share = convert(model, plan_of(target), method, self.calibration)
            if method != "permuted":
                images = torch.stack([self.held_out.dataset[index][0] for index in range(min(64, self.held_out.samples))])
                errors = output_errors(self.dense, model, plan, images.to(self.calibration.device))
        row: Record = {"model": self.name, "target": target, "method": method, "replaced_share": share, "model_params": parameters(model)}
        row |= {f"error_{role}": error for role, error in errors.items()}
        row["top1"] = evaluate(model, self.held_out, batch_size=128).top1
        self.fine_tune(model)
        row["top1_finetuned"] = evaluate(model, self.held_out, batch_size=128).top1
        return row | {"samples": self.held_out.samples, "finetune_share": self.finetune_share}


def convert(model: nn.Module, plan: Plan, method: str, calibration: Tensor) -> tuple[Plan, float]:
    """Convert a dense model in place; the plan that was carried out, and the share of the parameters that its layers keep.

    The layers are the replaced ones and those that a budget leaves dense; biases count.
    """
    if method.startswith("lowrank"):
        plan = replace(plan, layers=tuple(low_rank(layer) if layer.is_replaced else layer for layer in plan.layers))
    if method == "magnitude":
        for layer in plan.replaced:
            _prune(model.get_submodule(layer.fqn), layer)
    else:
        options: dict[str, Any] = {name: calibration if name == "calibrate" else on for name, on in METHODS[method].items()}
        surgery.apply(plan, model, **options)
    own = [layer for layer in plan.layers if layer.is_replaced or (layer.reason is not None and layer.reason.code == "budget")]
    return plan, sum(layer.params_after for layer in own) / sum(layer.params_before for layer in own)


def _prune(module: nn.Module, layer: LayerPlan) -> None:
    """Keep as many of the matrix's largest entries as the plan keeps weights; they alone are trained on."""
    dense = sum((part.stop - part.start) * layer.in_features for part in layer.parts if part.architecture is None)
    kept = dense + sum(part.architecture.num_parameters for part in layer.parts if part.architecture is not None)
    prune.l1_unstructured(module, "weight", amount=layer.out_features * layer.in_features - kept)


def parameters(model: nn.Module) -> int:
    """All parameters, of pruned matrices those that are kept."""
    dropped = sum(int((mask == 0).sum()) for name, mask in model.named_buffers() if name.endswith("weight_mask"))
    return sum(parameter.numel() for parameter in model.parameters()) - dropped


def output_errors(dense: nn.Module, model: nn.Module, plan: Plan, images: Tensor) -> dict[str, float]:
    """The mean relative output error of the layers of each role, each given what the dense model gives it."""
    errors: dict[str, list[float]] = {}

    def compare(layer: LayerPlan, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        bias = module.bias if isinstance(module.bias, Tensor) else 0
        lost = model.get_submodule(layer.fqn)(inputs[0]) - output
        errors.setdefault(layer.role, []).append(float(lost.norm() / (output - bias).norm()))

    handles = [dense.get_submodule(layer.fqn).register_forward_hook(partial(compare, layer)) for layer in plan.replaced]
    try:
        with torch.no_grad():
            dense(images)
    finally:
        for handle in handles:
            handle.remove()
    return {role: sum(values) / len(values) for role, values in errors.items()}


def digits(options: argparse.Namespace, device: torch.device) -> Subject:
    """The demo model."""
    dense, base, base_args = load_dense(DEMO)
    dense = dense.eval().to(device)
    epochs = options.epochs or (1 if options.quick else 6)
    settings = Settings(epochs=epochs, smoothing=0.0, log_every=1000, workers=0, seed=options.seed, cpu=device.type == "cpu")

    def fine_tune(model: nn.Module) -> None:
        train(model, training_data("digits", model, settings), settings, teacher=dense)

    calibration = load_calibration("digits", dense).inputs.to(device)
    return Subject("digits", dense, base, base_args, calibration, load_data("digits", dense), fine_tune, epochs / DEMO_EPOCHS)


def fractals(options: argparse.Namespace, device: torch.device) -> Subject:
    """The ViT on generated images, which is trained where the folder has none."""
    if not (options.folder / "images.json").is_file():
        _train_dense(options, device)
    dense, base, base_args = load_dense(options.folder / "dense")
    dense = dense.eval().to(device)
    trained = json.loads((options.folder / "images.json").read_text(encoding="utf-8"))
    images = int(options.finetune_share * trained)

    def fine_tune(model: nn.Module) -> None:
        _learn(model, options, seed=options.seed + 2, images=images, teacher=dense)

    calibration = load_calibration("fractals", dense, samples=64 if options.quick else 512).inputs.to(device)
    return Subject("fractals", dense, base, base_args, calibration, load_data("fractals", dense), fine_tune, options.finetune_share)


def _train_dense(options: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(options.seed)
    args = TINY_VIT if options.quick else VIT
    model = build_base(recipe.VIT_S, args).to(device)
    found = _learn(model, options, seed=options.seed, images=TINY_IMAGES if options.quick else None)
    options.folder.mkdir(parents=True, exist_ok=True)
    save_dense(found.model, options.folder / "dense", recipe.VIT_S, args, force=True)
    (options.folder / "images.json").write_text(f"{found.images}\n", encoding="utf-8")
    print(f"the dense model is trained on {found.images} images in {found.seconds:.0f} s", flush=True)


def _learn(model: nn.Module, options: argparse.Namespace, *, seed: int, images: int | None, teacher: nn.Module | None = None) -> Outcome:
    """Train in place on about so many new images, never the same twice; without a number for ``--train-minutes``."""
    device = next(model.parameters()).device
    tuning = teacher is not None
    batch, rate = (16, 3e-4 if tuning else 1e-3) if options.quick else (128, 1e-4) if tuning else (256, 1e-3)
    length: dict[str, Any] = {"minutes": options.train_minutes}
    if images is not None:
        length = {"epochs": 1, "images_per_epoch": max(1, images // batch) * batch}
    settings = Settings(
        **length,
        batch_size=batch,
        learning_rate=rate,
        optimizer="adamw",
        smoothing=0.0,
        precision="no" if options.quick else "bf16",
        log_every=25,
        seed=seed,
        cpu=device.type == "cpu",
    )
    return train(model, training_data("fractals", model, settings), settings, teacher=teacher)


def main() -> None:
    """Convert, measure and write."""
    parser = recipe.parser_of(__doc__)
    recipe.add_options(parser)
    parser.add_argument("model", choices=("digits", "fractals"), metavar="MODEL", help="one of the models above")
    parser.add_argument("--targets", nargs="+", choices=TARGETS)
    parser.add_argument("--methods", nargs="+", choices=METHODS)
    parser.add_argument("--minutes", type=recipe.duration, help="begin no row after this many minutes")
    parser.add_argument("--epochs", type=recipe.count, help="of a fine-tuning on digits, 6 by default, 1 with --quick")
    parser.add_argument("--folder", type=Path, default=Path("build/fractals"), help="where the dense model of fractals is kept")
    parser.add_argument("--train-minutes", type=recipe.duration, default=4.5, help="length of its training")
    parser.add_argument("--finetune-share", type=recipe.duration, default=0.02, help="images of its fine-tuning over those of its training")
    options = parser.parse_args()
    if options.model == "digits":
        options.device = options.device or "cpu"
    device, _ = recipe.device_and_modes(options)
    if options.model == "fractals" and device.type == "cpu" and not options.quick:
        raise SystemExit("this needs a CUDA device, and PyTorch finds none; --quick runs anywhere")
    targets = options.targets or (("monarch",) if options.quick else TARGETS)
    methods = options.methods or (("svd", "calibrated") if options.quick else METHODS)

    @cache
    def subject() -> Subject:
        return (digits if options.model == "digits" else fractals)(options, device)

    plan_of = cache(lambda target: subject().plan(target))

    def rows_of(target: str, method: str) -> list[Record]:
        return [subject().row(target, method, plan_of)]

    cases = [(DENSE, DENSE), *((target, method) for target in targets for method in methods)]
    jobs = [({"model": options.model, "target": target, "method": method}, partial(rows_of, target, method)) for target, method in cases]
    shown = ("target", "method", "replaced_share", "top1", "top1_finetuned", *ERRORS)

    def prepared(todo: list[recipe.Job]) -> list[recipe.Job]:
        """The jobs, once their dense model is there: without it none can run."""
        if todo:
            subject()
        return todo

    failing = (FlysurgeryError, RuntimeError)
    recipe.make(options, device, COLUMNS, jobs, shown=shown, minutes=options.minutes, may_fail=failing, order=prepared)


if __name__ == "__main__":
    recipe.main(main)
