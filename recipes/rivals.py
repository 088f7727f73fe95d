"""A butterfly layer beside other ways to make a linear layer cheaper, each on weights of its own."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from recipe import Run
from torch import Tensor, nn
from weight_ways import INT8, prune, quantize, store_sparse

from flysurgery.bench import TIMED_MODES, Case, Protocol, Record, rows_of_case
from flysurgery.bench.ceilings import Work
from flysurgery.bench.measuring import AGAIN, MEASURED, checked_rows, one_line
from flysurgery.bench.variants import by_definition, dense_linear
from flysurgery.errors import OptionError
from flysurgery.layers import ButterflyLinear
from flysurgery.patterns import Architecture, low_rank, named

CSR = "magnitude pruning, CSR"
CSR_LAST = f"{CSR}, batch-size-last"
"""The same product for x of shape (features, rows), with no transposition counted."""

DENSITIES = (0.5, 0.25, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002)
"""Shares of weights that magnitude pruning keeps, beside the butterfly's own."""

TORCHAO = {
    "int8 weights": ("Int8WeightOnlyConfig", 0.02),
    "int8 weights and activations": (INT8, 0.05),
    "fp8 weights and activations": ("Float8DynamicActivationFloat8WeightConfig", 0.1),
}
"""Quantizations of torchao, by their configuration there and the relative rms error that each may have."""

CHECKED_ROWS = 256

RIVAL_COLUMNS = (
    *("layer", "arch", "out_features", "in_features", "rows", "mode", "device_type", "candidate", "density", "note"),
    *MEASURED,
)
"""``density`` is the share of the dense weights that a candidate keeps."""


@dataclass(frozen=True)
class Rival:
    """One way. ``run`` is a text where it cannot run here: the reason.

    ``exact`` is the same function in float64, ``allowed`` the relative rms error that its coarser numbers may have. With ``last`` it takes
    x of shape (in_features, rows); the result has the shape (rows, out_features) in both cases.
    """

    name: str
    density: float
    run: Run | str
    exact: Run | None = None
    allowed: float = 0.0
    note: str = ""
    last: bool = False


def rival_rows(head: Record, device: torch.device, protocol: Protocol, densities: Sequence[float]) -> list[Record]:
    """Measure one layer with bias: dense, the butterfly of a family of architectures, and the rivals of both."""
    found: dict[str, Rival] = {}

    def make() -> Case:
        out_features, in_features, dtype = head["out_features"], head["in_features"], TIMED_MODES[head["mode"]]
        architecture = named(head["arch"], out_features, in_features)
        found.update({_key(each): each for each in rivals(architecture, device, dtype, densities)})
        x = torch.randn(head["rows"], in_features, device=device, dtype=dtype)
        checked = checked_rows(len(x), CHECKED_ROWS)
        wide, last = x[checked].double(), x.T.contiguous()
        return Case(
            {name: each.run for name, each in found.items()},
            {name: last if each.last else x for name, each in found.items()},
            {name: each.exact(wide) for name, each in found.items() if each.exact is not None},
            checked,
            {name: _work(each.density, out_features, x) for name, each in found.items()},
            allowed={name: each.allowed for name, each in found.items()},
        )

    rows = []
    for row in rows_of_case(head, make, head["mode"], protocol):
        plain = row["candidate"].removesuffix(AGAIN)
        rival = found[plain]
        rows.append(row | {"candidate": row["candidate"].replace(plain, rival.name), "density": rival.density, "note": rival.note})
    return rows


def _key(rival: Rival) -> str:
    return "dense" if rival.name == "dense" else f"{rival.name} {rival.density:.4f}"


def _work(density: float, out_features: int, x: Tensor) -> Work:
    rows, in_features = x.shape
    weights = round(density * out_features * in_features)
    return Work(x.element_size() * (rows * (out_features + in_features) + weights + out_features), 2 * rows * weights)


def rivals(architecture: Architecture, device: torch.device, dtype: torch.dtype, densities: Sequence[float] = DENSITIES) -> Iterator[Rival]:
    """Dense, the butterfly, and their rivals for a layer with bias of the same size, with random weights."""
    layer = ButterflyLinear(architecture, device=device, dtype=dtype).requires_grad_(False)
    dense = dense_linear(layer)
    yield Rival("dense", 1.0, dense, by_definition(layer).double())
    yield Rival("butterfly", architecture.density, layer, by_definition(layer).double())
    yield from _low_rank(architecture, device, dtype)
    for share in dict.fromkeys((architecture.density, *densities)):
        yield from _pruned_csr(dense, share)
    yield _semi_structured(dense)
    for name, (config, allowed) in TORCHAO.items():
        yield from _torchao(name, config, dense, allowed)
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


def _pruned_csr(dense: nn.Linear, share: float) -> Iterator[Rival]:
    weight, bias = dense.weight.detach(), dense.bias.detach()
    if weight.dtype not in (torch.float32, torch.float64):
        reason = f"no: PyTorch's CSR products sum in the weights' own dtype, {weight.dtype}, or do not exist"
        yield from (Rival(name, share, reason) for name in (CSR, CSR_LAST))
        return
    keep = max(1, round(share * weight.numel()))
    limit = weight.abs().flatten().kthvalue(weight.numel() - keep + 1).values
    pruned = torch.where(weight.abs() >= limit, weight, 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support is in beta|invariant checks are)")
        stored = pruned.to_sparse_csr()
    exact, column = _exact(pruned, bias), bias[:, None]
    yield Rival(CSR, share, lambda x: nn.functional.linear(x, stored) + bias, exact)
    yield Rival(CSR_LAST, share, lambda x: (stored @ x + column).T, exact, last=True)


def _semi_structured(dense: nn.Linear) -> Rival:
    name = "2:4 semi-structured"
    weight = dense.weight
    if not weight.is_cuda or weight.dtype == torch.float32:
        return Rival(name, 0.5, "no: sparse tensor cores take 16 bits on CUDA")
    model = nn.Sequential(copy.deepcopy(dense))
    prune(model, ["0"])
    exact = copy.deepcopy(model).double()
    try:
        store_sparse(model, ["0"])
        model(torch.zeros(64, weight.shape[1], device=weight.device, dtype=weight.dtype))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return Rival(name, 0.5, f"no: {one_line(error)}")
    return Rival(name, 0.5, model, exact)


def _exact(weight: Tensor, bias: Tensor) -> Run:
    wide, wide_bias = weight.double(), bias.double()
    return lambda x: nn.functional.linear(x, wide, wide_bias)


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
        yield from (Rival(each, 1.0, f"no: {one_line(error)}") for each in names)
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
        yield from (Rival(name, density, f"no: {one_line(error)}") for name in names)
        return
    bias = _bias(layer)

    def multiplied(x: Tensor) -> Tensor:  # shapes: (in_features, rows) -> (out_features, rows)
        for operator in reversed(operators):
            x = operator @ x
        return x

    exact = by_definition(layer).double()
    yield Rival(names[0], density, lambda x: multiplied(x.T.contiguous()).T.contiguous() + bias, exact)
    yield Rival(names[1], density, lambda x: multiplied(x.T).T + bias, exact)  # a view: as if x had the batch last
