"""The same module with its converted layers multiplied in other ways: dense, by a named backend, in two launches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from flysurgery.factors import factors_to_dense
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.ops import BACKENDS, Problem, explain, ks_linear

INT8 = "int8 dynamic"
INT8_ERROR = 0.2
"""What is left of eight bits after a whole model: more than this is no rounding."""

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
    """A ButterflyLinear on CUDA with one launch a factor, the intermediates going through device memory."""

    def __init__(self, layer: ButterflyLinear) -> None:
        super().__init__()
        self.factors, self.bias = layer.factors, layer.bias

    def forward(self, x: Tensor) -> Tensor:  # shapes: (*batch, in_features) -> (*batch, out_features)
        *others, first = range(len(self.factors) - 1, -1, -1)
        for index in others:
            x = ks_linear(x, (self.factors[index],), backend="cuda")
        return ks_linear(x, (self.factors[first],), self.bias, backend="cuda")


class Joined(nn.Module):
    """Modules that read the same x, their outputs joined on the last dimension."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:  # shapes: (*batch, in_features) -> (*batch, out_features)
        return torch.cat([part(x) for part in self.parts], dim=-1)


def swapped(module: nn.Module, make: Callable[[Layer], nn.Module]) -> nn.Module:
    """A copy of ``module`` in which ``make`` has replaced each converted layer; parameters that stay are copied as well."""
    module = copy.deepcopy(module)
    if isinstance(module, ButterflyLinear | SplitLinear):
        return make(module)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, ButterflyLinear | SplitLinear):
                parent._modules[name] = make(child)
    return module


def each_part(make: Callable[[ButterflyLinear], nn.Module]) -> Callable[[Layer], nn.Module]:
    """From a replacement for a ButterflyLinear to one for a SplitLinear as well, part by part; dense parts stay."""

    def replace(layer: Layer) -> nn.Module:
        if isinstance(layer, ButterflyLinear):
            return make(layer)
        return Joined([make(part) if isinstance(part, ButterflyLinear) else part for part in layer.children()])

    return replace


def dense_linear(layer: Layer) -> nn.Linear:
    """The ``nn.Linear`` that a layer's factors multiply out to, a split one as one matrix; multiplied in float64, rounded once."""
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


def with_backend(layer: Layer, backend: str) -> Layer:
    """The layer itself, told to use one backend."""
    for part in layer.modules():
        if isinstance(part, ButterflyLinear):
            part.backend = backend
    return layer


def quantized(module: nn.Module) -> nn.Module:
    """Dense linears with int8 weights, and activations rounded to int8 at each call: what PyTorch itself offers on a CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is to move to another package
        return torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)


def by_definition(module: nn.Module) -> nn.Module:
    """A copy that multiplies by einsum: in float64, what all variants are held against."""
    return swapped(module, lambda layer: with_backend(layer, "einsum"))


VARIANTS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "dense": lambda module: swapped(module, dense_linear),
    "layer": copy.deepcopy,
    "two launches": lambda module: swapped(module, each_part(LaunchEachFactor)),
    "bmm": lambda module: swapped(module, each_part(lambda layer: BoundLinear(layer, "bmm"))),
    "einsum": lambda module: swapped(module, each_part(lambda layer: BoundLinear(layer, "einsum"))),
    "bsr": lambda module: swapped(module, each_part(lambda layer: BoundLinear(layer, "bsr"))),
    INT8: lambda module: quantized(swapped(module, dense_linear)),
}
"""What a converted module is compared with. ``layer`` is it as it stands, on CUDA with fused kernels where they fit."""


def obstacle(variant: str, module: nn.Module, x: Tensor, *, allow_tf32: bool) -> str | None:
    """Why a variant cannot run here; None when it can."""
    if variant == INT8 and (x.device.type != "cpu" or x.dtype != torch.float32):
        return "no: PyTorch quantizes at each call on the CPU, from float32"
    backend = {"two launches": "cuda"}.get(variant, variant)
    if backend not in BACKENDS or variant == "dense":
        return None
    for problem in problems(module, x, allow_tf32=allow_tf32):
        reason = BACKENDS[backend].can_run(problem)
        if reason is not None:
            return f"no: {reason}"
    return None


def problems(module: nn.Module, x: Tensor, *, allow_tf32: bool, rows: int | None = None) -> list[Problem]:
    """The multiplications of a module's converted layers, for a number of rows or for any."""
    layers = [each for each in module.modules() if isinstance(each, ButterflyLinear)]
    architectures = dict.fromkeys((layer.architecture, layer.bias is not None) for layer in layers)
    return [Problem(arch, rows, x.dtype, x.device.type, bias=bias, allow_tf32=allow_tf32) for arch, bias in architectures]


def chosen_backends(module: nn.Module, x: Tensor, *, allow_tf32: bool, rows: int) -> str | None:
    """The backends that a module's layers choose by themselves, joined by "+"; None for a module without converted layers."""
    found = {explain(problem).choice for problem in problems(module, x, allow_tf32=allow_tf32, rows=rows)}
    return "+".join(sorted(found)) or None
