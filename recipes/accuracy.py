"""The accuracy of a model converted in many ways, each before and after the same short fine-tuning with its dense self as teacher.

    python recipes/accuracy.py digits --out build/rows.csv
    python recipes/accuracy.py fractals --minutes 9 --out build/rows.csv

The tables, each of one model:

    digits    the demo model in checkpoints/digits_vit, fine-tuned for 6 epochs of the 120 that it was trained for. One of the 599 held-out
              digits is 0.17 points
    fractals  a ViT-S/16 of 100 classes of generated images. The first call trains it for 4.5 minutes and keeps it in build/fractals; it
              is fine-tuned on 2 % as many images

A target fixes how many weights each matrix keeps, and a method chooses them: projections onto the target's architectures (svd, calibrated,
sequential, permuted), plain low rank with as many parameters, or the entries of largest magnitude. The first row is the dense model, which
is fine-tuned as well. Errors of a role are relative output errors ``norm(W x - W' x) / norm(W x)`` on held-out images, the mean over its
layers, each of which is given what the dense model gives it; there are none where hidden units changed places. A case that fails is
printed and has no row. --quick takes few cases and a moment of fine-tuning, and for fractals a tiny model; its numbers mean nothing.

Needs ``pip install 'flysurgery[train]'``, and for digits ten minutes of one CPU core, for fractals a CUDA device and half an hour.
Rows: recipes/results/accuracy.csv
"""

import copy
import json
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from recipe import VIT_S, Place, Table, run
from torch import Tensor, nn
from torch.nn.utils import prune
from weight_ways import low_rank

from flysurgery import surgery
from flysurgery.bench import Record
from flysurgery.checkpoint import build_base, load_dense, save_dense
from flysurgery.evaluation import ImageData, evaluate, load_calibration, load_data
from flysurgery.finetune import Settings, train, training_data
from flysurgery.surgery import LayerPlan, Plan

TARGETS: Mapping[str, Mapping[str, Any]] = {"gonon": {"arch": "gonon"}, "monarch": {"arch": "monarch", "nblocks": 4}}
"""Options of ``surgery.plan``."""

BUDGETS = {"budget 0.4": 0.4, "budget 0.45": 0.45}
"""Further targets, whose architectures are chosen for all layers together, with the calibration images."""

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
DEMO, FOLDER = Path(__file__).parents[1] / "checkpoints" / "digits_vit", Path("build/fractals")
TRAIN_MINUTES = 4.5
TINY_VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}


class Subject(NamedTuple):
    """A dense model on its device and what its rows are made with; ``settings`` are those of fine-tuning, for a share of its training."""

    dense: nn.Module
    base: str
    base_args: Mapping[str, Any]
    calibration: Tensor
    held_out: ImageData
    settings: Settings
    finetune_share: float


@cache
def subject_of(model: str, place: Place) -> Subject:
    """The demo model, or the ViT on generated images, which is trained where the folder has none."""
    where: dict[str, Any] = {"cpu": place.device.type == "cpu", "smoothing": 0.0}
    if model == "digits":
        folder, samples, share = DEMO, None, 6 / 120
        length: dict[str, Any] = {"minutes": 1e-3, "blocks_weight": 0.0} if place.quick else {"epochs": 6}
        settings = Settings(**length, **where, log_every=1000, workers=0, seed=place.protocol.seed)
    else:
        folder, samples, share = FOLDER / "dense", 64 if place.quick else 512, 0.02
        where |= {"precision": "no" if place.quick else "bf16", "optimizer": "adamw", "log_every": 25}
        if not (FOLDER / "images.json").is_file():
            _train_dense(place, where)
        batch, rate = (16, 3e-4) if place.quick else (128, 1e-4)
        images = int(share * json.loads((FOLDER / "images.json").read_text(encoding="utf-8")))
        length = {"epochs": 1, "images_per_epoch": max(1, images // batch) * batch}
        settings = Settings(**length, **where, batch_size=batch, learning_rate=rate, seed=place.protocol.seed + 2)  # other images
    dense, base, base_args = load_dense(folder)
    dense = dense.eval().to(place.device)
    calibration = load_calibration(model, dense, samples=samples).inputs.to(place.device)
    return Subject(dense, base, base_args, calibration, load_data(model, dense), settings, share)


def _train_dense(place: Place, where: Mapping[str, Any]) -> None:
    """Train the ViT for ``TRAIN_MINUTES``, on images of which none comes twice, and keep it."""
    torch.manual_seed(place.protocol.seed)
    args = TINY_VIT if place.quick else {"num_classes": 100}
    length = {"epochs": 1, "images_per_epoch": 960, "batch_size": 16} if place.quick else {"minutes": TRAIN_MINUTES, "batch_size": 256}
    settings = Settings(**length, **where, learning_rate=1e-3, seed=place.protocol.seed)
    model = build_base(VIT_S, args).to(place.device)
    found = train(model, training_data("fractals", model, settings), settings)
    save_dense(found.model, FOLDER / "dense", VIT_S, args, force=True)
    (FOLDER / "images.json").write_text(f"{found.images}\n", encoding="utf-8")
    print(f"the dense model is trained on {found.images} images in {found.seconds:.0f} s", flush=True)


@cache
def plan_of(model: str, place: Place, target: str) -> Plan:
    subject = subject_of(model, place)
    options = TARGETS.get(target, {"arch": surgery.PLACEHOLDER})
    plan = surgery.plan(subject.dense, base=subject.base, base_args=subject.base_args, **options)
    if target in BUDGETS:
        plan, _ = surgery.allocate(plan, subject.dense, budget=BUDGETS[target], calibrate=subject.calibration)
    return plan


def rows(place: Place, *, model: str, target: str, method: str) -> list[Record]:
    subject = subject_of(model, place)
    made, share, errors = copy.deepcopy(subject.dense), 1.0, dict[str, float]()
    if target != DENSE:
        plan, share = convert(made, plan_of(model, place, target), method, subject.calibration)
        if method != "permuted":
            images = torch.stack([subject.held_out.dataset[index][0] for index in range(min(64, subject.held_out.samples))])
            errors = output_errors(subject.dense, made, plan, images.to(place.device))
    row: Record = {"replaced_share": share, "model_params": parameters(made)} | {f"error_{role}": each for role, each in errors.items()}
    row["top1"] = evaluate(made, subject.held_out, batch_size=128).top1
    train(made, training_data(model, made, subject.settings), subject.settings, teacher=subject.dense)
    row["top1_finetuned"] = evaluate(made, subject.held_out, batch_size=128).top1
    return [row | {"samples": subject.held_out.samples, "finetune_share": subject.finetune_share}]


def convert(model: nn.Module, plan: Plan, method: str, calibration: Tensor) -> tuple[Plan, float]:
    """Convert a dense model in place; the plan that was carried out, and the share of the parameters that its layers keep.

    The layers are the replaced ones and those that a budget leaves dense; biases count.
    """
    if method.startswith("lowrank"):
        plan = low_rank(plan)
    if method == "magnitude":
        for layer in plan.replaced:
            prune.l1_unstructured(model.get_submodule(layer.fqn), "weight", amount=layer.weights_before - layer.weights_after)
    else:
        options: dict[str, Any] = {name: calibration if name == "calibrate" else on for name, on in METHODS[method].items()}
        surgery.apply(plan, model, **options)
    own = [layer for layer in plan.layers if layer.is_replaced or (layer.reason is not None and layer.reason.code == "budget")]
    return plan, sum(layer.params_after for layer in own) / sum(layer.params_before for layer in own)


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

    with ExitStack() as stack, torch.no_grad():
        for layer in plan.replaced:
            stack.enter_context(dense.get_submodule(layer.fqn).register_forward_hook(partial(compare, layer)))
        dense(images)
    return {role: sum(values) / len(values) for role, values in errors.items()}


def table_of(model: str, **more: Any) -> Table:
    errors = ("error_qkv", "error_ffn_in", "error_ffn_out")
    return Table(
        {"model": (model,), "target": (DENSE, *TARGETS, *BUDGETS), "method": (DENSE, *METHODS)},
        rows,
        timed=False,
        quick={"target": (DENSE, "monarch"), "method": (DENSE, "svd", "calibrated")},
        columns=("replaced_share", "model_params", *errors, "top1", "top1_finetuned", "samples", "finetune_share"),
        keep=lambda place, head: (head["target"] == DENSE) == (head["method"] == DENSE),
        **more,
    )


TABLES = {"digits": table_of("digits", device="cpu"), "fractals": table_of("fractals", needs_cuda=True)}

if __name__ == "__main__":
    run(__doc__, TABLES)
