"""Vision Transformers and their parts as cases: each variant of a converted part beside dense, and training steps."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from unittest import mock

import timm
import torch
from recipe import VIT_S, Place, Run
from torch import Tensor, nn
from vit_units import parts, vit_sizes

import flysurgery
from flysurgery import surgery
from flysurgery.bench import TIMED_MODES, Case, Record
from flysurgery.bench.measuring import checked_rows, weights_gib
from flysurgery.bench.variants import by_definition, chosen_backends, definitions, dense_copy, fused_modules, problems, swapped
from flysurgery.errors import first_line
from flysurgery.finetune import Settings, train, training_data
from flysurgery.layers import ButterflyLinear
from flysurgery.ops import BACKENDS, ks_linear

INT8, INT8_ERROR = "int8 dynamic", 0.2
"""What PyTorch itself offers on a CPU, and the most error that it may leave after a whole model. More than this is no rounding."""

COMPILED = " compiled"
"""Ends the names of candidates that go through ``torch.compile``."""

COMPLETE, LINEARS = "dense", "linears of FFNs"

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


class BoundLinear(nn.Module):
    """A ButterflyLinear whose weights a backend has brought into its own storage once."""

    def __init__(self, layer: ButterflyLinear, backend: str) -> None:
        super().__init__()
        self.architecture, self.factors, self.bias = layer.architecture, layer.factors, layer.bias  # as large as what is stored
        self._run = BACKENDS[backend].bind(tuple(layer.factors), layer.bias)

    def forward(self, x: Tensor) -> Tensor:  # shapes: (*batch, in_features) -> (*batch, out_features)
        product = self._run(x.reshape(-1, self.architecture.in_features))
        return product.reshape(*x.shape[:-1], self.architecture.out_features)


class LaunchEachFactor(nn.Module):
    """A ButterflyLinear on CUDA with one launch a factor. The intermediates go through device memory."""

    def __init__(self, layer: ButterflyLinear) -> None:
        super().__init__()
        self.factors, self.bias = layer.factors, layer.bias

    def forward(self, x: Tensor) -> Tensor:  # shapes: (*batch, in_features) -> (*batch, out_features)
        first, *others = self.factors
        for factor in reversed(others):
            x = ks_linear(x, (factor,), backend="cuda")
        return ks_linear(x, (first,), self.bias, backend="cuda")


def quantized(module: nn.Module) -> nn.Module:
    """A dense copy with int8 weights, whose activations are rounded to int8 at each call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that this will move to another package
        return torch.ao.quantization.quantize_dynamic(dense_copy(module), {nn.Linear}, dtype=torch.qint8)


def _bound(backend: str) -> Callable[[nn.Module, Tensor], nn.Module]:
    return lambda module, _: swapped(module, ButterflyLinear, lambda layer: BoundLinear(layer, backend))


VARIANTS: Mapping[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "dense": lambda module, _: dense_copy(module),
    "layer": lambda module, _: copy.deepcopy(module),
    "two launches": lambda module, _: swapped(module, ButterflyLinear, LaunchEachFactor),
    "fused modules": fused_modules,
    **{name: _bound(name) for name in ("bmm", "einsum", "bsr")},
    INT8: lambda module, _: quantized(module),
    "dense optimized": lambda module, x: fused_modules(dense_copy(module), x),
    "converted": lambda module, _: copy.deepcopy(module),
    "optimized": fused_modules,
}
"""What a converted module is compared with. ``layer`` and ``converted`` are the module itself."""


def variant(name: str, module: nn.Module, x: Tensor, mode: str, compiled: str = "") -> Run | str:
    """A variant of a converted module, through the compiler where its name or ``compiled`` says so, or why it cannot run here."""
    if name.endswith(COMPILED):
        name, compiled = name.removesuffix(COMPILED), "compile" if x.is_cuda else "left out on a CPU"
    if compiled.startswith("left out"):
        return compiled
    if name == INT8 and (x.is_cuda or x.dtype != torch.float32):
        return "no: PyTorch quantizes at each call on the CPU, from float32"
    backend = "cuda" if name == "two launches" else name
    for problem in problems(module, x, allow_tf32=mode == "tf32") if backend in BACKENDS and name != "dense" else ():
        reason = BACKENDS[backend].can_run(problem)
        if reason is not None:
            return f"no: {reason}"
    try:
        found = VARIANTS[name](module, x)
    except Exception as error:  # the failure of one variant is its row
        return f"failed: {first_line(error)}"
    if not compiled:
        return found
    return torch.compile(found, mode=None if compiled == "compile" else compiled)


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
) -> Case:
    """One part of a model, converted, and its variants; ``launch`` is what the engine does with them."""
    part = parts(protocol, model, arch)[unit]
    module = part.make().to(place.device, TIMED_MODES[mode])
    # Drawn on the CPU: a graph that could not be captured leaves CUDA's generator unusable.
    x = torch.randn(batch, *part.shape).to(place.device, TIMED_MODES[mode])
    rows, dense = checked_rows(batch, 2), dense_copy(module)
    truths, works = definitions({name: dense if name.startswith(("dense", INT8)) else module for name in candidates}, x, rows)
    runs = {name: variant(name, module, x, mode, compiled) for name in candidates}
    backend = chosen_backends(module, x, allow_tf32=mode == "tf32", rows=batch * part.rows)
    paper = PAPER.get(unit, ()) if (model, arch) == (VIT_S, "gonon") else ()
    notes = {"backend": {"layer": backend}, "paper_ratio": dict(zip(("bmm", "layer"), paper, strict=False))}
    return Case(runs, x, truths, rows, works, allowed={INT8: INT8_ERROR}, notes=notes)


def share_case(place: Place, *, model: str, batch: int, mode: str) -> Case:
    """A dense timm ViT beside the linears of its feed-forward networks, with random weights.

    The linears have biases, as those of the model; the paper leaves them out.
    """
    sizes, prefix_tokens = vit_sizes(model)
    dtype, rows = TIMED_MODES[mode], checked_rows(batch, 1)
    shapes = {COMPLETE: (batch, 3, sizes.image, sizes.image), LINEARS: (batch, sizes.tokens + prefix_tokens, sizes.width)}
    with place.device:  # where drawing weights takes least time
        made = {COMPLETE: timm.create_model(model, pretrained=False), LINEARS: linears_of_ffns(sizes.width, sizes.depth)}
    modules = {name: module.eval().requires_grad_(False).to(dtype) for name, module in made.items()}
    inputs = {name: torch.randn(shape, device=place.device, dtype=dtype) for name, shape in shapes.items()}
    found = {name: definitions({name: module}, inputs[name], rows) for name, module in modules.items()}
    truths = {name: own[name] for name, (own, _) in found.items()}
    works = {name: own[name] for name, (_, own) in found.items()}
    return Case(modules, inputs, truths, rows, works, notes={"paper_ratio": {LINEARS: PAPER_SHARES.get(model, {}).get(mode)}})


def linears_of_ffns(width: int, depth: int) -> nn.Sequential:
    """The linears of all feed-forward networks of a ViT, nothing between them, with weights that keep the size of what passes."""
    linears = [nn.Linear(*sizes) for _ in range(depth) for sizes in ((width, 4 * width), (4 * width, width))]
    for linear in linears:
        nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
    return nn.Sequential(*linears)


TRAINED = ("dense", "dense optimized", "converted", "converted optimized", "dense compiled", "converted compiled")


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

    def backward(run: Callable[[Tensor], Tensor], x: Tensor, labels: Tensor) -> None:
        (nn.functional.cross_entropy(run(x), labels, reduction="sum") / batch).backward()

    def gradient(model: Any) -> Tensor:
        found = max(model.blocks[0].mlp.fc1.parameters(), key=Tensor.numel).grad
        assert found is not None
        return found

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
    runs: dict[str, Run | str] = {}
    for name in candidates:
        plain, _, kind = name.partition(" ")
        runs[name] = step(models[plain], kind)
    weights = {name: weights_gib(models[name.split()[0]]) for name in candidates}
    return Case(runs, x, {name: truths[name.split()[0]] for name in candidates}, notes={"weights_gib": weights})


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
    changes = [mock.patch.object(Settings, "pays_fusing", return_value=way == FINETUNED[2])]
    if way == FINETUNED[0]:
        changes.append(mock.patch("flysurgery.finetune.step._can_be_captured", return_value=False))
    if place.on_cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        done = train(learner, training_data("fractals", learner, settings), settings, teacher=teacher)
    start = time.perf_counter() - began - done.seconds
    peak = torch.cuda.max_memory_allocated() / 2**30 if place.on_cuda else None
    numbers = {"images_per_second": done.images_per_second, "seconds": done.seconds, "start_seconds": start}
    return [numbers | {"loss": done.loss, "peak_gib": peak}]
