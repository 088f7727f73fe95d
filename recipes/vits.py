"""Time Vision Transformers and their parts, converted beside dense: Tables 3, 5 and 6 of Gonon et al. 2024 and further ones.

    python recipes/vits.py table3 --out build/vits.csv
    python recipes/vits.py headline --joules --out build/headline.csv    # two minutes

The tables:

    table3     parts of a ViT-S/16 at batch 128, in float32 to bfloat16. --batch and --model go further
    table6     its linear layers with and without bias
    cpu        parts of a ViT-S/16 on two threads of a CPU at batch 16, also beside int8 (dynamic quantization, float32 only)
    table5     what part of a dense model's time the linears of its feed-forward networks take, one after the other with nothing between
               them. More than this a faster feed-forward linear cannot win
    optimized  models as flysurgery.optimize makes them, beside dense, compiled and converted ones; "dense optimized" is fused alone
    headline   the main ones of these: ViT-S/16 with 128 images and with one, and ViT-B/16, in fp16
    training   a training step (forward, backward, fused AdamW, bfloat16 autocast), called from Python one by one, also through
               torch.compile, and ten in a row, and as a CUDA graph. Errors are those of a gradient
    finetune   images a second of flysurgery finetune, with a dense teacher and bfloat16 autocast; fused modules are for long runs

Random weights: no time depends on their values. Protocol ``paper``: separate q, k and v, attention written out, no compiler. Protocol
``today``: timm's model, one qkv, ``scaled_dot_product_attention``, also through ``torch.compile``. Each ratio is to dense in the same run
and mode; ``paper_ratio`` is what the authors report on an A100 in float32. Errors are those of the outputs. --joules measures those of a
batch too, from NVML's counter over windows of a second of replayed graphs. --arch takes gonon (widths that are multiples of 24), monarch
and lowrank, --model any ViT of timm.

Needs any device; optimized, headline, training and finetune a CUDA device, cpu a quiet CPU and half an hour.
Rows: recipes/results/vits.csv, recipes/results/optimized_vits.csv, recipes/results/training_h200.csv,
recipes/results/finetune_h200.csv
"""

import copy
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import timm
import torch
from recipe import VIT_S, Place, Run, Table, run
from torch import Tensor, nn
from vit_units import PROTOCOLS, parts, shapes_of, skeleton

import flysurgery
from flysurgery import surgery
from flysurgery.bench import TIMED_MODES, Case, Record
from flysurgery.bench.measuring import checked_rows, weights_gib
from flysurgery.bench.variants import by_definition, chosen_backends, definitions, dense_linear, fused_modules, problems
from flysurgery.errors import first_line
from flysurgery.finetune import Settings, train, training_data
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.ops import BACKENDS, ks_linear

INT8, INT8_ERROR = "int8 dynamic", 0.2
"""What PyTorch itself offers on a CPU, and the most error that it may leave after a whole model. More than this is no rounding."""

PAPER = {
    "linear N x N": (0.82, 0.50),
    "linear N x N + bias": (0.97, 0.66),
    "linear 4N x N": (0.80, 0.78),
    "linear 4N x N + bias": (0.93, 0.90),
    "linear N x 4N": (0.91, 0.58),
    "linear N x 4N + bias": (0.94, 0.61),
    "FFN": (0.91, 0.77),
    "attention": (0.87, 0.79),
    "block": (0.90, 0.78),
    "model": (0.89, 0.78),
}
"""Time over dense of bmm and of their kernel in Tables 3 and 6 of Gonon et al. 2024 (A100, float32); theirs stands beside our layer."""

PAPER_SHARES = {
    "vit_small_patch16_224": {"fp16": 0.31, "fp32": 0.46},
    "vit_base_patch16_224": {"fp16": 0.42, "fp32": 0.54},
    "vit_large_patch16_224": {"fp16": 0.46, "fp32": 0.58},
    "vit_huge_patch14_224": {"fp16": 0.53, "fp32": 0.61},
}
"""Shares in Table 5 of Gonon et al. 2024."""


class ByWay(nn.Module):
    """A ButterflyLinear that multiplies rows by a function of its own."""

    def __init__(self, layer: ButterflyLinear, run: Run) -> None:
        super().__init__()
        self.architecture, self.factors, self.bias = layer.architecture, layer.factors, layer.bias  # as large as what is stored
        self._run = run

    def forward(self, x: Tensor) -> Tensor:
        return self._run(x.reshape(-1, self.architecture.in_features)).reshape(*x.shape[:-1], self.architecture.out_features)


def bound(layer: ButterflyLinear, backend: str) -> nn.Module:
    """Its weights are brought into the backend's own storage once."""
    return ByWay(layer, BACKENDS[backend].bind(tuple(layer.factors), layer.bias))


def launch_each_factor(layer: ButterflyLinear) -> nn.Module:
    """One launch a factor on CUDA. The intermediates go through device memory."""
    first, *others = layer.factors

    def run(x: Tensor) -> Tensor:
        for factor in reversed(others):
            x = ks_linear(x, (factor,), backend="cuda")
        return ks_linear(x, (first,), layer.bias, backend="cuda")

    return ByWay(layer, run)


LAYERS = {name: partial(bound, backend=name) for name in ("bmm", "einsum", "bsr")} | {"two launches": launch_each_factor}
"""What variants have in the place of converted layers."""


def swapped(module: nn.Module, kind: Any, make: Callable[[Any], nn.Module]) -> nn.Module:
    """Copy ``module``, parameters included, and let ``make`` replace each layer of the copy that is of this class or classes."""
    module = copy.deepcopy(module)
    if isinstance(module, kind):
        return make(module)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, kind):
                parent._modules[name] = make(child)
    return module


def dense_copy(module: nn.Module) -> nn.Module:
    """Copy ``module`` with dense linears in the place of its converted layers."""
    return swapped(module, ButterflyLinear | SplitLinear, dense_linear)


def variant(name: str, module: nn.Module, x: Tensor, mode: str, compiled: str) -> Run | str:
    """A variant of a converted module, through the compiler where its name or ``compiled`` says so, or why it cannot run here.

    ``layer`` and ``converted`` are the module itself.
    """
    if name.endswith(" compiled"):
        if not x.is_cuda:
            return "left out on a CPU"
        name, compiled = name.removesuffix(" compiled"), "compile"
    if name == INT8 and (x.is_cuda or x.dtype != torch.float32):
        return "no: PyTorch quantizes at each call on the CPU, from float32"
    for problem in problems(module, x, allow_tf32=mode == "tf32") if name in LAYERS else ():
        reason = BACKENDS.get(name, BACKENDS["cuda"]).can_run(problem)
        if reason is not None:
            return f"no: {reason}"
    try:
        found = swapped(module, ButterflyLinear, LAYERS[name]) if name in LAYERS else module
        if name.startswith(("dense", INT8)):
            found = dense_copy(module)
        if name == INT8:  # whose activations are rounded to int8 at each call
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch warns that this will move to another package
                found = torch.ao.quantization.quantize_dynamic(found, {nn.Linear}, dtype=torch.qint8)
        if name in ("optimized", "dense optimized", "fused modules"):
            found = fused_modules(found, x)
    except Exception as error:  # the failure of one variant is its row
        return f"failed: {first_line(error)}"
    return torch.compile(found, mode=None if compiled == "compile" else compiled) if compiled else found


def part_case(
    place: Place,
    *,
    model: str,
    arch: str,
    protocol: str,
    unit: str,
    batch: int,
    mode: str,
    candidates: tuple[str, ...],
    compiled: str = "",
    launch: str = "graph",
    checked: int = 2,
) -> Case:
    """One part of a model, converted, and its variants; ``launch`` is what the engine does with them."""
    part = parts(protocol, model, arch)[unit]
    module = part.make().to(place.device, TIMED_MODES[mode])
    # Drawn on the CPU: a graph that could not be captured leaves CUDA's generator unusable.
    x = torch.randn(batch, *part.shape).to(place.device, TIMED_MODES[mode])
    rows, dense = checked_rows(batch, checked), dense_copy(module)
    truths, works = definitions({name: dense if name.startswith(("dense", INT8)) else module for name in candidates}, x, rows)
    runs = {name: variant(name, module, x, mode, compiled) for name in candidates}
    backend = chosen_backends(module, x, allow_tf32=mode == "tf32", rows=batch * part.rows)
    paper = PAPER.get(unit, ()) if (model, arch) == (VIT_S, "gonon") else ()
    notes = {"backend": {"layer": backend}, "paper_ratio": dict(zip(("bmm", "layer"), paper, strict=False))}
    return Case(runs, x, truths, rows, works, allowed={INT8: INT8_ERROR}, notes=notes)


def share_case(place: Place, *, model: str, batch: int, mode: str) -> Case:
    """A dense timm ViT beside the linears of its feed-forward networks, with random weights that keep the size of what passes.

    The linears have biases, as those of the model; the paper leaves them out.
    """
    vit = skeleton(model)
    dtype, rows, width = TIMED_MODES[mode], checked_rows(batch, 1), vit.embed_dim
    shapes = dict(zip(("dense", "linears of FFNs"), shapes_of(vit), strict=True))
    with place.device:  # where drawing weights takes least time
        linears = [nn.Linear(*pair) for _ in vit.blocks for pair in ((width, 4 * width), (4 * width, width))]
        for linear in linears:
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        made = {"dense": timm.create_model(model, pretrained=False), "linears of FFNs": nn.Sequential(*linears)}
    modules = {name: module.eval().requires_grad_(False).to(dtype) for name, module in made.items()}
    inputs = {name: torch.randn(batch, *shape, device=place.device, dtype=dtype) for name, shape in shapes.items()}
    found = {name: definitions({name: module}, inputs[name], rows) for name, module in modules.items()}
    truths = {name: own[name] for name, (own, _) in found.items()}
    works = {name: own[name] for name, (_, own) in found.items()}
    paper_ratio = {"linears of FFNs": PAPER_SHARES.get(model, {}).get(mode)}
    return Case(modules, inputs, truths, rows, works, notes={"paper_ratio": paper_ratio})


@torch.enable_grad()
def training_case(
    place: Place,
    *,
    model: str,
    arch: str,
    batch: int,
    mode: str,
    steps: int = 1,
    launch: str = "graph",
    candidates: tuple[str, ...] = ("converted", "dense"),
) -> Case:
    """A training step under autocast: forward, cross entropy, backward, AdamW. It gives a gradient of the first feed-forward layer.

    The learning rate is zero, so that every step gives the same gradient; it takes as long as any other. A call makes several ``steps``.
    Candidates are compiled and, where they are captured, optimized.
    """
    device, dtype = place.device, TIMED_MODES[mode]
    unit = parts("today", model, arch)["model"]
    module: Any = unit.make().to(device)
    x = torch.randn(batch, *unit.shape).to(device)
    labels = torch.randint(0, module.num_classes, (batch,)).to(device)

    def backward(run: Run, x: Tensor, labels: Tensor) -> None:
        (nn.functional.cross_entropy(run(x), labels, reduction="sum") / batch).backward()

    def gradient(model: Any) -> Tensor:
        return max(model.blocks[0].mlp.fc1.parameters(), key=Tensor.numel).grad

    def exact(model: nn.Module) -> Tensor:
        double = by_definition(model).double().requires_grad_(True).train()
        for few, their in zip(x.double().split(8), labels.split(8), strict=True):  # all at once would need much memory
            backward(double, few, their)
        return gradient(double)

    def step(model: nn.Module, kind: str) -> Run | str:
        if kind and not place.on_cuda:
            return "left out on a CPU"
        if kind == "optimized" and launch != "graph":
            return "left out: optimized steps are captured"
        model = copy.deepcopy(model).requires_grad_(True).train()
        if kind == "optimized":
            with torch.autocast(device.type, dtype):
                print(flysurgery.optimize(model, x, training="captured"), flush=True)
        forward = torch.compile(model) if kind == "compiled" else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True, capturable=place.on_cuda)

        @torch.enable_grad()
        def run(x: Tensor) -> Tensor:
            for _ in range(steps):
                optimizer.zero_grad(set_to_none=True)
                # A capture keeps no casts of an earlier step. The compiler would compile anew where this changes.
                cached = kind != "compiled" and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
                with torch.autocast(device.type, dtype, cache_enabled=cached):
                    backward(forward, x, labels)
                optimizer.step()
            return gradient(model)

        return run

    models = {"converted": module, "dense": dense_copy(module)}
    truths = {name: exact(each) for name, each in models.items()}
    plain = {name: name.partition(" ")[0] for name in candidates}
    runs = {name: step(models[plain[name]], name.partition(" ")[2]) for name in candidates}
    weights = {name: weights_gib(models[plain[name]]) for name in candidates}
    return Case(runs, x, {name: truths[plain[name]] for name in candidates}, notes={"weights_gib": weights})


FINETUNED = ("one by one", "captured", "fused and captured")
"""How finetune's updates run: launch by launch, as one CUDA graph, and as one with fused modules in model and teacher."""


def finetune_rows(place: Place, *, model: str, way: str, arch: str, batch_size: int, updates: int, seed: int) -> list[Record]:
    """The speed of ``finetune`` with a dense teacher, on generated images, as ``train`` runs it but for what ``way`` says."""
    torch.manual_seed(seed)
    teacher = timm.create_model(model, num_classes=100)
    learner = dense_copy(teacher)
    if arch != "dense":
        surgery.apply(surgery.plan(learner, arch), learner)
    how: dict[str, Any] = {"precision": "bf16"} if place.on_cuda else {"precision": "no", "cpu": True}
    settings = Settings(epochs=1, batch_size=batch_size, images_per_epoch=batch_size * updates, seed=seed, **how)
    if place.on_cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Settings, "pays_fusing", return_value=way == FINETUNED[2]))
        if way == FINETUNED[0]:
            stack.enter_context(mock.patch("flysurgery.finetune.step._can_be_captured", return_value=False))
        done = train(learner, training_data("fractals", learner, settings), settings, teacher=teacher)
    start = time.perf_counter() - began - done.seconds
    peak = torch.cuda.max_memory_allocated() / 2**30 if place.on_cuda else None
    numbers = {"images_per_second": done.images_per_second, "seconds": done.seconds, "start_seconds": start}
    return [numbers | {"loss": done.loss, "peak_gib": peak}]


def has_part(place: Place, head: Record) -> bool:
    """Whether a protocol has a part, and launches it in this way: the compiler's launches are for today's, graphs for CUDA."""
    if head["compiled"] and (head["protocol"], head["launch"]) != ("today", "eager"):
        return False
    return (place.on_cuda or head["launch"] == "eager") and head["unit"] in parts(head["protocol"], head["model"], head["arch"])


FREE = ("model", "arch")
UNITS = (*PAPER, "qkv + bias")
COMPILED = ("", "compile", "max-autotune")


def table_of_parts(units: tuple[str, ...], axes: Mapping[str, tuple[Any, ...]], **more: Any) -> Table:
    usual = {"arch": ("gonon",), "batch": (128,), "mode": ("all",), "compiled": ("",), "launch": ("graph", "eager")}
    candidates = ("dense", "dense optimized", "layer", "two launches", "fused modules", "bmm", "einsum", "bsr")
    return Table(
        {"model": (VIT_S,), "protocol": PROTOCOLS, "unit": units, **usual, **axes},
        part_case,
        quick={"batch": (1,), "compiled": ("",)},
        columns=("backend", "paper_ratio"),
        free=FREE,
        keep=has_part,
        **{"candidates": candidates, "rounds": 30, **more},
    )


MODELS: Mapping[str, Any] = {
    "measure": partial(part_case, protocol="today", unit="model"),
    "candidates": ("dense", "dense optimized", "converted", "optimized", "dense compiled", "optimized compiled"),
    "free": FREE,
    "needs_cuda": True,
    "seconds": 2.0,
}

TABLES = {
    "table3": table_of_parts(("linear N x N", "FFN", "attention", "block", "model"), {"compiled": COMPILED}),
    "table6": table_of_parts(tuple(unit for unit in UNITS if unit.startswith(("linear", "qkv"))), {}),
    "cpu": table_of_parts(
        UNITS,
        {"arch": ("gonon", "monarch"), "batch": (16,), "mode": ("fp32", "bf16"), "compiled": COMPILED[:2]},
        candidates=("dense", "layer", "bmm", "einsum", INT8),
        seconds=3.0,
        rounds=15,
        device="cpu",
        threads=2,
    ),
    "table5": Table(
        {"model": tuple(PAPER_SHARES), "batch": (128,), "mode": ("fp16", "fp32")},
        share_case,
        quick={"model": (VIT_S,), "batch": (1,)},
        columns=("paper_ratio",),
        free=("model",),
        rounds=30,
    ),
    "optimized": Table(
        {"model": (VIT_S,), "batch": (128, 1), "mode": ("all",), "arch": ("gonon", "monarch")},
        quick={"batch": (1,), "arch": ("monarch",)},
        **MODELS,
    ),
    "headline": Table(
        {"arch": ("gonon",), "mode": ("fp16",)},
        cases=[{"model": model, "batch": batch} for model, batch in ((VIT_S, 128), (VIT_S, 1), ("vit_base_patch16_224", 128))],
        few=1,
        **MODELS,
    ),
    "training": Table(
        {"model": (VIT_S,), "arch": ("gonon",), "batch": (128,), "mode": ("bf16",), "steps": (1, 10), "launch": ("eager", "graph")},
        training_case,
        quick={"batch": (1,), "mode": ("bf16",)},
        candidates=("dense", "dense optimized", "converted", "converted optimized", "dense compiled", "converted compiled"),
        free=FREE,
        keep=lambda place, head: head["launch"] == "eager" or (place.on_cuda and head["steps"] == 1),
        needs_cuda=True,
        seconds=2.0,
    ),
    "finetune": Table(
        {
            "model": (VIT_S, "vit_base_patch16_224"),
            "way": FINETUNED,
            "arch": ("dense", "gonon", "monarch"),
            "batch_size": (128,),
            "updates": (150,),
            "seed": (0,),
        },
        finetune_rows,
        timed=False,
        quick={"model": (VIT_S,), "way": FINETUNED[:1], "arch": ("monarch",), "batch_size": (2,), "updates": (2,)},
        columns=("images_per_second", "seconds", "start_seconds", "loss", "peak_gib"),
        free=FREE,
        needs_cuda=True,
    ),
}

if __name__ == "__main__":
    run(__doc__, TABLES)
