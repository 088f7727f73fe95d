"""A butterfly layer beside other ways to make a linear layer cheaper, each on weights of its own."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from recipe import NEEDS_CUDA, Place, Run
from torch import Tensor, nn
from weight_ways import INT8, largest, prune, quantize, store_sparse, two_of_four

from flysurgery.bench import TIMED_MODES, Case
from flysurgery.bench.ceilings import Work
from flysurgery.bench.measuring import checked_rows
from flysurgery.bench.multiply import layer_sizes
from flysurgery.bench.variants import by_definition, dense_linear
from flysurgery.errors import OptionError, first_line
from flysurgery.layers import ButterflyLinear
from flysurgery.patterns import Architecture, low_rank, named

CSR, BY_ROWS = "magnitude pruning, CSR", "magnitude pruning, our Triton kernel"
LAST, TRANSPOSED = ", batch-size-last", ", transposes counted"
"""The product for x of shape (features, rows), and the same between two transpositions of what models have."""

DENSITIES = (0.5, 0.43, 0.25, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002)
"""Shares of weights that magnitude pruning keeps, beside the butterfly's own. A ViT-S/16 in Monarch of 4 blocks has 0.43 of its weights."""

UNEVEN, UNEVEN_SHARE = ", uneven rows", 0.1
"""One share is also pruned from rows of very different sizes, so that some keep many weights and most few."""

CSR_ERROR = 0.02
"""Of CSR products in 16 bits: PyTorch has cuSPARSE sum in float32, which rounds the partial sums that it stores to 16 bits."""

TORCHAO = {
    "int8 weights": ("Int8WeightOnlyConfig", 0.02),
    "int8 weights and activations": (INT8, 0.05),
    "fp8 weights and activations": ("Float8DynamicActivationFloat8WeightConfig", 0.1),
}
"""Quantizations of torchao, by their configuration there and the relative rms error that each may have."""

KINDS = ("dense", "low rank", "pruning", "2:4", "torchao", "lazylinop")
"""What ``--candidates`` chooses from; dense and the butterfly are always there."""

CHECKED_ROWS = 256


@dataclass(frozen=True)
class Rival:
    """One way. ``run`` is a text where it cannot run here: the reason.

    ``density`` is the share of the dense weights that it keeps, ``exact`` the same function in float64, ``allowed`` the relative rms error
    that its coarser numbers may have. With ``last`` it takes x of shape (in_features, rows); the result has the shape
    (rows, out_features) in both cases.
    """

    name: str
    density: float
    run: Run | str
    exact: Run | None = None
    allowed: float = 0.0
    note: str = ""
    last: bool = False


def rivals_case(place: Place, *, layer: str, arch: str, width: int, rows: int, mode: str, candidates: tuple[str, ...]) -> Case:
    """One layer with bias: dense, the butterfly of a family of architectures, and the rivals of both that ``candidates`` name."""
    out_features, in_features = layer_sizes(width)[layer]
    architecture = named(arch, out_features, in_features)
    found = {each.name: each for each in rivals(architecture, place.device, TIMED_MODES[mode], candidates)}
    x = torch.randn(rows, in_features, device=place.device, dtype=TIMED_MODES[mode])
    checked = checked_rows(rows, CHECKED_ROWS)
    wide, last = x[checked].double(), x.T.contiguous()
    notes = {"density": {name: each.density for name, each in found.items()}, "note": {name: each.note for name, each in found.items()}}
    return Case(
        {name: each.run for name, each in found.items()},
        {name: last if each.last else x for name, each in found.items()},
        {name: each.exact(wide) for name, each in found.items() if each.exact is not None},
        checked,
        {name: _work(each.density, out_features, x) for name, each in found.items()},
        allowed={name: each.allowed for name, each in found.items()},
        notes=notes,
    )


def _work(density: float, out_features: int, x: Tensor) -> Work:
    rows, in_features = x.shape
    weights = round(density * out_features * in_features)
    return Work(x.element_size() * (rows * (out_features + in_features) + weights + out_features), 2 * rows * weights)


def rivals(architecture: Architecture, device: torch.device, dtype: torch.dtype, kinds: tuple[str, ...] = KINDS) -> Iterator[Rival]:
    """Dense, the butterfly, and their rivals of some kinds for a layer with bias of the same size, with random weights."""
    layer = ButterflyLinear(architecture, device=device, dtype=dtype).requires_grad_(False)
    dense = dense_linear(layer)
    yield Rival("dense", 1.0, dense, by_definition(layer).double())
    yield Rival("butterfly", architecture.density, layer, by_definition(layer).double())
    if "low rank" in kinds:
        yield from _low_rank(architecture, device, dtype)
    if "pruning" in kinds:
        for share in dict.fromkeys((architecture.density, *DENSITIES)):
            yield from _pruned(dense, share)
        uneven = copy.deepcopy(dense)
        uneven.weight.mul_(torch.randn_like(dense.weight[:, :1]).exp())
        yield from _pruned(uneven, UNEVEN_SHARE, UNEVEN)
    if "2:4" in kinds:
        yield _semi_structured(dense)
    for name, (config, allowed) in TORCHAO.items() if "torchao" in kinds else ():
        yield from _torchao(name, config, dense, allowed)
    if "lazylinop" in kinds:
        yield from _lazylinop(layer)


def _low_rank(architecture: Architecture, device: torch.device, dtype: torch.dtype) -> Iterator[Rival]:
    rank = architecture.num_parameters // (architecture.out_features + architecture.in_features)
    if not 0 < rank <= min(architecture.shape):
        return
    other = low_rank(*architecture.shape, rank)
    layer = ButterflyLinear(other, device=device, dtype=dtype).requires_grad_(False)
    first, second = nn.Linear(other.in_features, rank, bias=False, device="meta"), nn.Linear(rank, other.out_features, device="meta")
    first.weight = nn.Parameter(layer.factors[1].detach().reshape(rank, other.in_features), requires_grad=False)
    second.weight = nn.Parameter(layer.factors[0].detach().reshape(other.out_features, rank), requires_grad=False)
    second.bias = _bias(layer)
    for name, run in (("low rank, two linears", nn.Sequential(first, second)), ("low rank, our layer", layer)):
        yield Rival(name, other.density, run, by_definition(layer).double(), note=f"rank {rank}")


def _bias(layer: ButterflyLinear) -> nn.Parameter:
    assert layer.bias is not None, "rivals have a bias"
    return layer.bias


def _pruned(dense: nn.Linear, share: float, end: str = "") -> Iterator[Rival]:
    """Multiply by the weights of largest magnitude, as PyTorch's CSR and as rows of our own kernel, in both layouts.

    ``note`` has the standard deviation of the rows' numbers of weights over their mean, which kernels for sparse rows balance.
    """
    model = nn.Sequential(copy.deepcopy(dense))
    prune(model, {"0": max(1, round(share * dense.weight.numel()))}, largest)
    weight, bias, exact = model.get_parameter("0.weight").detach(), dense.bias.detach(), copy.deepcopy(model).double()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support is in beta|invariant checks are)")
        stored = weight.to_sparse_csr()
    column, lengths = bias[:, None], (weight != 0).sum(1).float()
    own = f", {share:.4g} of the weights{end}"
    more: dict[str, Any] = {
        "exact": exact,
        "note": f"lengths of rows vary by {float(lengths.std(correction=0) / lengths.mean()):.2f} of their mean",
    }
    loose: dict[str, Any] = more | {"allowed": CSR_ERROR if weight.dtype.itemsize == 2 else 0.0}
    yield Rival(CSR + own, share, lambda x: nn.functional.linear(x, stored) + bias, **loose)
    products: dict[str, tuple[Run | None, dict[str, Any]]] = {CSR: (lambda x: stored @ x + column, loose), BY_ROWS: (None, more)}
    if weight.is_cuda:
        from sparse_rows import multiply_by_rows  # Triton is not everywhere

        products[BY_ROWS] = multiply_by_rows(weight, bias), more
    for name, (run, how) in products.items():
        yield Rival(name + LAST + own, share, NEEDS_CUDA if run is None else partial(_turned, run), last=True, **how)
        yield Rival(name + TRANSPOSED + own, share, NEEDS_CUDA if run is None else partial(_transposed, run), **how)


def _turned(run: Run, x: Tensor) -> Tensor:  # shapes: (in_features, rows) -> (rows, out_features), a view
    return run(x).T


def _transposed(run: Run, x: Tensor) -> Tensor:  # shapes: (rows, in_features) -> (rows, out_features)
    return run(x.T.contiguous()).T.contiguous()


def _semi_structured(dense: nn.Linear) -> Rival:
    name = "2:4 semi-structured"
    weight = dense.weight
    if not weight.is_cuda or weight.dtype == torch.float32:
        return Rival(name, 0.5, "no: sparse tensor cores take 16 bits on CUDA")
    model = nn.Sequential(copy.deepcopy(dense))
    prune(model, {"0": weight.numel() // 2}, two_of_four)
    exact = copy.deepcopy(model).double()
    try:
        store_sparse(model, ["0"])
        model(torch.zeros(64, weight.shape[1], device=weight.device, dtype=weight.dtype))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return Rival(name, 0.5, f"no: {first_line(error)}")
    return Rival(name, 0.5, model, exact)


def _torchao(name: str, config: str, dense: nn.Linear, allowed: float) -> Iterator[Rival]:
    """Make a quantization of torchao, an optional package, through the compiler as it tells its users, and operator by operator.

    The compiler puts a kernel for few rows in the place of a product with int8 weights in bfloat16.
    """
    names = (name, f"{name}, not compiled")
    model = nn.Sequential(copy.deepcopy(dense))
    try:
        if not dense.weight.is_cuda:
            raise OptionError("measured on CUDA only")
        quantize(model, ["0"], config)
        model(torch.zeros(64, dense.in_features, device=dense.weight.device, dtype=dense.weight.dtype))
    except Exception as error:  # an optional package of another version may raise anything
        yield from (Rival(each, 1.0, f"no: {first_line(error)}") for each in names)
        return
    exact = copy.deepcopy(dense).double()
    yield Rival(names[0], 1.0, torch.compile(model, dynamic=False), exact, allowed=allowed, note="torch.compile")
    yield Rival(names[1], 1.0, model, exact, allowed=allowed)


def _lazylinop(layer: ButterflyLinear) -> Iterator[Rival]:
    """Make ``ksm`` of lazylinop, an optional package, which stores factors as ours and takes x with the batch last.

    It is timed with a transposition before and after, and without.
    """
    names, density = ("lazylinop ksm, transposes counted", "lazylinop ksm, transposes not counted"), layer.architecture.density
    try:
        if importlib.util.find_spec("lazylinop") is None:
            raise ModuleNotFoundError("lazylinop is not installed")
        ksm = importlib.import_module("lazylinop.butterfly").ksm
        operators = [ksm(factor.detach()) for factor in layer.factors]
    except Exception as error:  # an optional package of another version may raise anything
        yield from (Rival(name, density, f"no: {first_line(error)}") for name in names)
        return
    bias = _bias(layer)

    def multiplied(x: Tensor) -> Tensor:  # shapes: (in_features, rows) -> (out_features, rows)
        for operator in reversed(operators):
            x = operator @ x
        return x

    exact = by_definition(layer).double()
    yield Rival(names[0], density, lambda x: _transposed(multiplied, x) + bias, exact)
    yield Rival(names[1], density, lambda x: multiplied(x.T).T + bias, exact)  # a view: as if x had the batch last
