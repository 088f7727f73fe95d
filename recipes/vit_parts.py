"""Parts of a ViT as cases: each variant of a converted part beside dense."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import timm
import torch
from recipe import Run
from torch import Tensor, nn

from flysurgery.bench import TIMED_MODES, Case
from flysurgery.bench.measuring import checked_rows, one_line
from flysurgery.bench.units import Unit, vit_sizes
from flysurgery.bench.variants import chosen_backends, definitions, dense_copy, fused_modules, problems, swapped
from flysurgery.layers import ButterflyLinear
from flysurgery.ops import BACKENDS, ks_linear

FUSED = "fused modules"
"""The variant in which whole modules are replaced for inference, not only their linears."""

INT8, INT8_ERROR = "int8 dynamic", 0.2
"""What PyTorch itself offers on a CPU, and the most error that it may leave after a whole model. More than this is no rounding."""

COMPILED = ("compile", "max-autotune")
"""Launches by way of the compiler: with its default mode, and with the one that searches longest."""

COMPLETE, LINEARS = "dense", "linears of FFNs"


class BoundLinear(nn.Module):
    """A ButterflyLinear whose weights a backend has brought into its own storage once."""

    def __init__(self, layer: ButterflyLinear, backend: str) -> None:
        super().__init__()
        self.architecture = layer.architecture
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


VARIANTS: Mapping[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "dense": lambda module, _: dense_copy(module),
    "layer": lambda module, _: copy.deepcopy(module),
    "two launches": lambda module, _: swapped(module, ButterflyLinear, LaunchEachFactor),
    FUSED: fused_modules,
    **{
        name: lambda module, _, name=name: swapped(module, ButterflyLinear, lambda layer: BoundLinear(layer, name))
        for name in ("bmm", "einsum", "bsr")
    },
    INT8: lambda module, _: quantized(module),
}
"""What a converted module is compared with. ``layer`` is the module itself, on CUDA with fused kernels where they fit."""


def variant(name: str, module: nn.Module, x: Tensor, mode: str, launch: str = "graph") -> Run | str:
    """A variant of a converted module, through the compiler where the launch is one of ``COMPILED``, or why it cannot run here."""
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
        return f"failed: {one_line(error)}"
    if launch not in COMPILED:
        return found
    return torch.compile(found, mode=None if launch == "compile" else "max-autotune")


def part_case(
    unit: Unit, batch: int, mode: str, launch: str, candidates: tuple[str, ...], device: torch.device, paper: Mapping[str, float]
) -> Case:
    """One part of a model, converted, and its variants; ``paper`` holds the ratios to dense that the paper reports."""
    module = unit.make().to(device, TIMED_MODES[mode])
    x = torch.randn(batch, *unit.shape).to(device, TIMED_MODES[mode])
    rows, dense = checked_rows(batch, 2), dense_copy(module)
    truths, works = definitions({name: dense if name in ("dense", INT8) else module for name in candidates}, x, rows)
    runs = {name: variant(name, module, x, mode, launch) for name in candidates}
    backend = chosen_backends(module, x, allow_tf32=mode == "tf32", rows=batch * unit.rows)
    return Case(runs, x, truths, rows, works, allowed={INT8: INT8_ERROR}, notes={"backend": {"layer": backend}, "paper_ratio": paper})


def share_case(model: str, model_args: Mapping[str, Any], batch: int, mode: str, device: torch.device, paper: float | None) -> Case:
    """A dense timm ViT beside the linears of its feed-forward networks, with random weights.

    The linears have biases, as those of the model; the paper leaves them out.
    """
    sizes, prefix_tokens = vit_sizes(model, model_args)
    dtype, rows = TIMED_MODES[mode], checked_rows(batch, 1)
    shapes = {COMPLETE: (batch, 3, sizes.image, sizes.image), LINEARS: (batch, sizes.tokens + prefix_tokens, sizes.width)}
    with device:  # where drawing weights takes least time
        made = {COMPLETE: timm.create_model(model, pretrained=False, **model_args), LINEARS: linears_of_ffns(sizes.width, sizes.depth)}
    parts = {name: module.eval().requires_grad_(False).to(dtype) for name, module in made.items()}
    inputs = {name: torch.randn(shape, device=device, dtype=dtype) for name, shape in shapes.items()}
    truths: dict[str, Tensor] = {}
    works = {}
    for name, part in parts.items():
        own_truths, own_works = definitions({name: part}, inputs[name], rows)
        truths, works = truths | own_truths, works | own_works
    return Case(parts, inputs, truths, rows, works, notes={"paper_ratio": {LINEARS: paper}})


def linears_of_ffns(width: int, depth: int) -> nn.Sequential:
    """The linears of all feed-forward networks of a ViT, nothing between them, with weights that keep the size of what passes."""
    linears = [nn.Linear(*sizes) for _ in range(depth) for sizes in ((width, 4 * width), (4 * width, width))]
    for linear in linears:
        nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
    return nn.Sequential(*linears)
