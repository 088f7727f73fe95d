"""Makes variants of a converted module: dense, by a named backend, in two launches, optimized, compiled."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flysurgery.bench.ceilings import Work, work_of
from flysurgery.factors import factors_to_dense
from flysurgery.inference import optimize
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.ops import BACKENDS, Problem, explain, ks_linear

INT8 = "int8 dynamic"
INT8_ERROR = 0.2
"""The most error that int8 may leave after a whole model. More than this is no rounding."""

COMPILED = ("compile", "max-autotune")
"""Launches by way of the compiler: with its default mode, and with the one that searches longest."""

OPTIMIZED = ", optimized"
"""Ends the names of models that ``optimize`` made."""

Layer = ButterflyLinear | SplitLinear


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


class Joined(nn.Module):
    """Modules that read the same x. Their outputs are joined on the last dimension."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:  # shapes: (*batch, in_features) -> (*batch, out_features)
        return torch.cat([part(x) for part in self.parts], dim=-1)


def swapped(module: nn.Module, make: Callable[[Layer], nn.Module]) -> nn.Module:
    """Copy ``module``, parameters included, and let ``make`` replace each converted layer of the copy."""
    module = copy.deepcopy(module)
    if isinstance(module, ButterflyLinear | SplitLinear):
        return make(module)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, ButterflyLinear | SplitLinear):
                parent._modules[name] = make(child)
    return module


def each_part(module: nn.Module, make: Callable[[ButterflyLinear], nn.Module]) -> nn.Module:
    """Copy ``module`` and let ``make`` replace each ButterflyLinear; of a SplitLinear part by part, where dense parts stay."""

    def replace(layer: Layer) -> nn.Module:
        if isinstance(layer, ButterflyLinear):
            return make(layer)
        return Joined([make(part) if isinstance(part, ButterflyLinear) else part for part in layer.children()])

    return swapped(module, replace)


def bound(module: nn.Module, backend: str) -> nn.Module:
    """Copy ``module`` with its layers' weights in the storage of one backend."""
    return each_part(module, lambda layer: BoundLinear(layer, backend))


def dense_linear(layer: Layer) -> nn.Linear:
    """Multiply the factors of a layer out to one ``nn.Linear``, in float64, rounded once."""
    parts = [layer] if isinstance(layer, ButterflyLinear) else list(layer.children())
    weights, biases = [], []
    for part in parts:
        if isinstance(part, ButterflyLinear):
            weights.append(factors_to_dense([factor.detach().double() for factor in part.factors]).to(part.factors[0].dtype))
            biases.append(part.bias)
        elif isinstance(part, nn.Linear):
            weights.append(part.weight.detach())
            biases.append(part.bias)
    new = nn.Linear(layer.in_features, layer.out_features, bias=biases[0] is not None, device="meta")
    new.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
    if biases[0] is not None:
        new.bias = nn.Parameter(torch.cat([bias.detach() for bias in biases]), requires_grad=False)
    return new.train(layer.training)


def quantized(module: nn.Module) -> nn.Module:
    """Give dense linears int8 weights, and round activations to int8 at each call: what PyTorch itself offers on a CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that this will move to another package
        return torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)


def by_definition(module: nn.Module) -> nn.Module:
    """Copy ``module`` so that it multiplies by einsum. In float64 this is what all variants are held against."""
    module = copy.deepcopy(module)
    for part in module.modules():
        if isinstance(part, ButterflyLinear):
            part.backend = "einsum"
    return module


def definitions(modules: Mapping[str, nn.Module], x: Tensor, rows: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Work]]:
    """Give what each module must compute for some rows of x, in float64, and what it must spend for x.

    A module that stands under several names is evaluated once.
    """
    truths: dict[int, Tensor] = {}
    works: dict[int, Work] = {}
    wide = x[list(rows)].double()
    with torch.no_grad():
        for module in {id(each): each for each in modules.values()}.values():
            plain = by_definition(module)
            works[id(module)] = work_of(plain, x)
            truths[id(module)] = plain.double()(wide)
    return {name: truths[id(each)] for name, each in modules.items()}, {name: works[id(each)] for name, each in modules.items()}


def fused_modules(module: nn.Module, x: Tensor) -> nn.Module:
    """Copy ``module`` and optimize the copy for inputs like x."""
    fused = copy.deepcopy(module)
    optimize(fused, x)
    return fused


def forget_compiled() -> None:
    """Reset the compiler, which gives up on code that it has compiled for many models."""
    torch.compiler.reset()


def compiled(module: nn.Module, launch: str) -> Callable[..., Any]:
    """Give the module, to be compiled at its first call; ``launch`` is one of ``COMPILED``."""
    return torch.compile(module, mode=None if launch == "compile" else "max-autotune")


VARIANTS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "dense": lambda module: swapped(module, dense_linear),
    "layer": copy.deepcopy,
    "two launches": lambda module: each_part(module, LaunchEachFactor),
    "bmm": lambda module: bound(module, "bmm"),
    "einsum": lambda module: bound(module, "einsum"),
    "bsr": lambda module: bound(module, "bsr"),
    INT8: lambda module: quantized(swapped(module, dense_linear)),
}
"""What a converted module is compared with. ``layer`` is the module itself, on CUDA with fused kernels where they fit."""


def obstacle(variant: str, module: nn.Module, x: Tensor, *, allow_tf32: bool) -> str | None:
    """Say why a variant cannot run here; None when it can."""
    if variant == INT8 and (x.device.type != "cpu" or x.dtype != torch.float32):
        return "no: PyTorch quantizes at each call on the CPU, from float32"
    backend = "cuda" if variant == "two launches" else variant
    if backend not in BACKENDS or variant == "dense":
        return None
    reasons = (BACKENDS[backend].can_run(problem) for problem in problems(module, x, allow_tf32=allow_tf32))
    return next((f"no: {reason}" for reason in reasons if reason is not None), None)


def problems(module: nn.Module, x: Tensor, *, allow_tf32: bool, rows: int | None = None) -> list[Problem]:
    """List the multiplications of a module's converted layers, for a number of rows or for any."""
    layers = [each for each in module.modules() if isinstance(each, ButterflyLinear)]
    architectures = dict.fromkeys((layer.architecture, layer.bias is not None) for layer in layers)
    return [Problem(arch, rows, x.dtype, x.device.type, bias=bias, allow_tf32=allow_tf32) for arch, bias in architectures]


def chosen_backends(module: nn.Module, x: Tensor, *, allow_tf32: bool, rows: int) -> str | None:
    """Give the backends that a module's layers choose, joined by "+"; None for a module without converted layers."""
    found = {explain(problem).choice for problem in problems(module, x, allow_tf32=allow_tf32, rows=rows)}
    return "+".join(sorted(found)) or None
