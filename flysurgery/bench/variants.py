"""Makes variants of a converted module: dense, by its definition, optimized."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flysurgery.bench.ceilings import Work, work_of
from flysurgery.inference import optimize
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.ops import Problem, explain
from flysurgery.surgery.transaction import dense_layer

OPTIMIZED = ", optimized"  # ends the names of models that ``optimize`` made


def dense_linear(layer: ButterflyLinear | SplitLinear) -> nn.Linear:
    """Multiply the factors of a layer out, in float64, rounded once; nothing of it is trained."""
    linear: Any = dense_layer(layer)
    return linear.requires_grad_(False)


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


def problems(module: nn.Module, x: Tensor, *, allow_tf32: bool, rows: int | None = None) -> list[Problem]:
    """List the multiplications of a module's converted layers, for a number of rows or for any."""
    layers = [each for each in module.modules() if isinstance(each, ButterflyLinear)]
    architectures = dict.fromkeys((layer.architecture, layer.bias is not None) for layer in layers)
    return [Problem(arch, rows, x.dtype, x.device.type, bias=bias, allow_tf32=allow_tf32) for arch, bias in architectures]


def chosen_backends(module: nn.Module, x: Tensor, *, allow_tf32: bool, rows: int) -> str | None:
    """Give the backends that a module's layers choose, joined by "+"; None for a module without converted layers."""
    found = {explain(problem).choice for problem in problems(module, x, allow_tf32=allow_tf32, rows=rows)}
    return "+".join(sorted(found)) or None
