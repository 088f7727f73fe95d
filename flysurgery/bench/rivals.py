"""Other ways to make a linear layer cheaper, each on weights of its own: what a butterfly layer has to beat."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flysurgery.bench.compiled import forget_compiled
from flysurgery.bench.measuring import one_line
from flysurgery.bench.variants import by_definition, dense_linear
from flysurgery.layers import ButterflyLinear
from flysurgery.patterns import Architecture, Pattern, low_rank

Run = Callable[[Tensor], Tensor]

CSR = "magnitude pruning, CSR"

DENSITIES = (0.5, 0.25, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002)
"""Shares of weights that magnitude pruning keeps, beside the butterfly's own."""


@dataclass(frozen=True)
class Rival:
    """One way. ``run`` is None where it cannot run here, for the ``reason``.

    ``exact`` is the same function in float64, ``allowed`` the relative rms error that its coarser numbers may have.
    """

    name: str
    density: float
    run: Run | None
    exact: Run | None
    reason: str = ""
    allowed: float = 0.0
    note: str = ""


def rivals(
    architecture: Architecture, device: torch.device, dtype: torch.dtype, *, densities: tuple[float, ...] = DENSITIES
) -> Iterator[Rival]:
    """Dense, the butterfly, and its rivals for a layer with bias of the same size, random weights."""
    forget_compiled()  # after eight linears of torchao it would leave the next ones as they are
    layer = ButterflyLinear(architecture, device=device, dtype=dtype).requires_grad_(False)
    dense = dense_linear(layer)
    yield Rival("dense", 1.0, dense, _exact(layer))
    yield Rival("butterfly", architecture.density, layer, _exact(layer))
    yield from _low_rank(architecture, device, dtype)
    for share in dict.fromkeys((architecture.density, *densities)):
        yield _pruned_csr(dense, share)
    yield _semi_structured(dense)
    yield from _torchao("int8 weights", "Int8WeightOnlyConfig", dense, 0.02)
    yield from _torchao("int8 weights and activations", "Int8DynamicActivationInt8WeightConfig", dense, 0.05)
    yield from _torchao("fp8 weights and activations", "Float8DynamicActivationFloat8WeightConfig", dense, 0.1)
    yield from _lazylinop(layer)


def _exact(module: nn.Module) -> Run:
    return by_definition(module).double()


def _low_rank(architecture: Architecture, device: torch.device, dtype: torch.dtype) -> Iterator[Rival]:
    rank = architecture.num_parameters // (architecture.out_features + architecture.in_features)
    if not 0 < rank <= min(architecture.shape):
        return
    other = low_rank(*architecture.shape, rank)
    layer = ButterflyLinear(other, device=device, dtype=dtype).requires_grad_(False)
    first, second = nn.Linear(other.in_features, rank, bias=False, device="meta"), nn.Linear(rank, other.out_features, device="meta")
    first.weight = nn.Parameter(layer.factors[1].detach().reshape(rank, other.in_features), requires_grad=False)
    second.weight = nn.Parameter(layer.factors[0].detach().reshape(other.out_features, rank), requires_grad=False)
    assert layer.bias is not None, "rivals have a bias"
    second.bias = layer.bias
    yield Rival("low rank, two linears", other.density, nn.Sequential(first, second), _exact(layer), note=f"rank {rank}")
    yield Rival("low rank, our layer", other.density, layer, _exact(layer), note=f"rank {rank}")


def _pruned_csr(dense: nn.Linear, share: float) -> Rival:
    weight = dense.weight.detach()
    if weight.dtype not in (torch.float32, torch.float64):
        return Rival(CSR, share, None, None, f"no: PyTorch's CSR products sum in the weights' own dtype, {weight.dtype}, or do not exist")
    keep = max(1, round(share * weight.numel()))
    limit = weight.abs().flatten().kthvalue(weight.numel() - keep + 1).values
    pruned = torch.where(weight.abs() >= limit, weight, 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support is in beta|invariant checks are)")
        stored = pruned.to_sparse_csr()
    bias = dense.bias.detach()
    wide, wide_bias = pruned.double(), bias.double()
    run = lambda x: nn.functional.linear(x, stored) + bias  # noqa: E731
    return Rival(CSR, share, run, lambda x: x @ wide.T + wide_bias)


def _semi_structured(dense: nn.Linear) -> Rival:
    name = "2:4 semi-structured"
    weight, bias = dense.weight.detach(), dense.bias.detach()
    if not weight.is_cuda or weight.dtype == torch.float32:
        return Rival(name, 0.5, None, None, "no: sparse tensor cores take 16 bits on CUDA")
    groups = weight.unflatten(1, (-1, 4))
    kept = torch.zeros_like(groups).scatter_(2, groups.abs().topk(2, dim=2).indices, 1)
    pruned = (groups * kept).flatten(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stored = torch.sparse.to_sparse_semi_structured(pruned)
            nn.functional.linear(torch.zeros(64, weight.shape[1], device=weight.device, dtype=weight.dtype), stored, bias)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return Rival(name, 0.5, None, None, f"no: {one_line(error)}")
    wide, wide_bias = pruned.double(), bias.double()
    return Rival(name, 0.5, lambda x: nn.functional.linear(x, stored, bias), lambda x: x @ wide.T + wide_bias)


def _torchao(name: str, config: str, dense: nn.Linear, allowed: float) -> Iterator[Rival]:
    """A quantization of torchao, an optional package, through the compiler as it tells its users, and operator by operator.

    The compiler puts a kernel for few rows in the place of a product with int8 weights in bfloat16.
    """
    names = (name, f"{name}, not compiled")
    model = _quantized(config, dense)
    if isinstance(model, str):
        yield from (Rival(each, 1.0, None, None, model) for each in names)
        return
    exact = copy.deepcopy(dense).double()
    yield Rival(names[0], 1.0, torch.compile(model, dynamic=False), exact, allowed=allowed, note="torch.compile")
    yield Rival(names[1], 1.0, model, exact, allowed=allowed)


def _quantized(config: str, dense: nn.Linear) -> nn.Module | str:
    """The layer quantized by torchao, or why it is not."""
    if importlib.util.find_spec("torchao") is None:
        return "no: torchao is not installed"
    if not dense.weight.is_cuda:
        return "no: measured on CUDA only"
    try:
        quantization = importlib.import_module("torchao.quantization")
        model = nn.Sequential(copy.deepcopy(dense))
        # Its settings of the compiler would let float32 products of the whole process use TF32.
        quantization.quantize_(model, getattr(quantization, config)(set_inductor_config=False))
        model(torch.zeros(64, dense.in_features, device=dense.weight.device, dtype=dense.weight.dtype))
    except Exception as error:  # whatever an optional package of another version raises
        return f"no: {one_line(error)}"
    return model


def _lazylinop(layer: ButterflyLinear) -> Iterator[Rival]:
    """``ksm`` of lazylinop, an optional package: batch-size-last, so with a transposition before and after, and without."""
    names = ("lazylinop ksm, transposes counted", "lazylinop ksm, transposes not counted")
    density = layer.architecture.density
    if importlib.util.find_spec("lazylinop") is None:
        for name in names:
            yield Rival(name, density, None, None, "no: lazylinop is not installed")
        return
    try:
        ksm = importlib.import_module("lazylinop.butterfly").ksm
        operators = [ksm(_lazylinop_factor(factor, pattern)) for factor, pattern in zip(layer.factors, layer.architecture, strict=True)]
    except Exception as error:  # whatever an optional package of another version raises
        for name in names:
            yield Rival(name, density, None, None, f"no: {one_line(error)}")
        return
    bias = layer.bias
    assert bias is not None, "rivals have a bias"

    def turned(x: Tensor) -> Tensor:
        y = x.T.contiguous()
        for operator in reversed(operators):
            y = operator @ y
        return y.T.contiguous() + bias

    def in_place(x: Tensor) -> Tensor:
        y = x.T  # a view: as if x lay there with the batch last
        for operator in reversed(operators):
            y = operator @ y
        return y.T + bias

    yield Rival(names[0], density, turned, _exact(layer))
    yield Rival(names[1], density, in_place, _exact(layer))


def _lazylinop_factor(factor: Tensor, pattern: Pattern) -> Tensor:
    """lazylinop stores a factor as (a, b, c, d) as we do."""
    assert tuple(factor.shape) == pattern.factor_shape
    return factor.detach()
