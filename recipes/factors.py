"""Measure one factor by every implementation, in time and in energy, and a layer of two factors beside its rivals.

    python recipes/factors.py patterns --minutes 9 --out build/patterns.csv
    python recipes/factors.py large --cases 0::2 --minutes 9 --out build/large_0.csv
    python recipes/factors.py energy --window 0.3 --cases 40:80 --minutes 9 --out build/energy_40.csv

The tables:

    patterns  Tables 2, 4 and 7 and Figures 5, 6 and 9 to 17 of Gonon et al. 2024: one factor by every implementation, on their 627
              patterns, in both memory layouts for the implementations that have them. The claims and the figures' quartiles are printed
    large     dense and CSR where the table before leaves them out, as a call takes seconds: two calls, or one of more than a second, after
              the one that is checked. Dense is measured once for each size. ``publish.py --fill`` puts the rows in their places
    energy    their Figure 7: joules of a call, read from NVML's counter of the whole device, in windows of at least a second of
              replayed graphs. bmm is measured twice. ``vits.py optimized --joules`` has whole models
    rivals    the linears of a ViT-S/16 beside low rank, magnitude pruning, 2:4 sparsity, int8, fp8 and lazylinop, each held against
              float64 with its own weights: what pruning and rounding do to a model's accuracy is no part of this table. Low rank has
              as many weights as the butterfly. Pruned weights have its density and others, and once rows of uneven lengths. They are
              multiplied by PyTorch's CSR (cuSPARSE) and by a Triton kernel of this project, in both layouts. torchao and lazylinop
              are optional; ``--candidates dense,pruning`` takes one kind alone

25088 rows. Patterns come in one shuffled order, so that a run that ends after ``--minutes`` has measured a random subset, and the next run
with the same ``--out`` goes on. Pieces by ``--cases`` need not share a machine or a file; a pattern is two cases in each mode, one for each
layout. On a CPU energy has times without joules.

Needs ``pip install 'flysurgery[bench]'``, any device, and for energy an NVIDIA GPU.
Rows: recipes/results/patterns_h200.csv, recipes/results/energy_h200.csv, recipes/results/rivals_h200.csv
"""

import copy
import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import paper_patterns as paper
import torch
from paper_patterns import FIRST, LAST, ROWS
from recipe import NEEDS_CUDA, Place, Run, Table, run
from torch import nn
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

DENSITIES = (0.5, 0.43, 0.25, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002)
"""Shares of weights that magnitude pruning keeps, beside the butterfly's own. A ViT-S/16 in Monarch of 4 blocks has 0.43 of its weights."""

UNEVEN_SHARE = 0.1  # this share is also pruned from rows of very different sizes, so that some keep many weights and most few
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


@dataclass(frozen=True)
class Way:
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
    checked = checked_rows(rows, 256)
    wide, last = x[checked].double(), x.T.contiguous()

    def work(density: float) -> Work:
        weights = round(density * out_features * in_features)
        return Work(x.element_size() * (rows * (out_features + in_features) + weights + out_features), 2 * rows * weights)

    return Case(
        {name: each.run for name, each in found.items()},
        {name: last if each.last else x for name, each in found.items()},
        {name: each.exact(wide) for name, each in found.items() if each.exact is not None},
        checked,
        {name: work(each.density) for name, each in found.items()},
        allowed={name: each.allowed for name, each in found.items()},
        notes={"density": {name: each.density for name, each in found.items()}, "note": {name: each.note for name, each in found.items()}},
    )


def rivals(architecture: Architecture, device: torch.device, dtype: torch.dtype, kinds: tuple[str, ...]) -> Iterator[Way]:
    """Dense, the butterfly, and their rivals of some kinds for a layer with bias of the same size, with random weights."""
    layer = ButterflyLinear(architecture, device=device, dtype=dtype).requires_grad_(False)
    dense = dense_linear(layer)
    yield Way("dense", 1.0, dense, by_definition(layer).double())
    yield Way("butterfly", architecture.density, layer, by_definition(layer).double())
    rank = architecture.num_parameters // sum(architecture.shape)
    if "low rank" in kinds and 0 < rank <= min(architecture.shape):
        yield from _low_rank(ButterflyLinear(low_rank(*architecture.shape, rank), device=device, dtype=dtype).requires_grad_(False), rank)
    if "pruning" in kinds:
        for share in dict.fromkeys((architecture.density, *DENSITIES)):
            yield from _pruned(dense, share)
        uneven = copy.deepcopy(dense)
        uneven.weight.mul_(torch.randn_like(dense.weight[:, :1]).exp())
        yield from _pruned(uneven, UNEVEN_SHARE, ", uneven rows")
    if "2:4" in kinds:
        yield from _where_possible(0.5, _semi_structured(dense), "2:4 semi-structured")
    for name, (config, allowed) in TORCHAO.items() if "torchao" in kinds else ():
        yield from _where_possible(1.0, _torchao(name, config, allowed, dense), name, f"{name}, not compiled")
    if "lazylinop" in kinds:
        names = (f"lazylinop ksm, transposes {how}" for how in ("counted", "not counted"))
        yield from _where_possible(architecture.density, _lazylinop(layer), *names)


def _low_rank(layer: ButterflyLinear, rank: int) -> Iterator[Way]:
    """Multiply as two linears and as our layer."""
    linears = [nn.Linear(rank, 1, device="meta"), nn.Linear(1, rank, bias=False, device="meta")]
    for linear, factor in zip(linears, layer.factors, strict=True):
        linear.weight = nn.Parameter(factor.flatten(0, 1).flatten(1), requires_grad=False)  # shape: (out_features, in_features)
    linears[0].bias = layer.bias  # pyright: ignore[reportAttributeAccessIssue]
    for name, module in (("low rank, two linears", nn.Sequential(*reversed(linears))), ("low rank, our layer", layer)):
        yield Way(name, layer.architecture.density, module, by_definition(layer).double(), note=f"rank {rank}")


def _pruned(dense: nn.Linear, share: float, end: str = "") -> Iterator[Way]:
    """Multiply by the weights of largest magnitude, as PyTorch's CSR and as rows of our own kernel, in both layouts.

    Batch-size-last is the product for x of shape (features, rows); with transposes counted it stands between two of what models have.
    ``note`` has the standard deviation of the rows' numbers of weights over their mean, which kernels for sparse rows balance.
    """
    model = nn.Sequential(copy.deepcopy(dense))
    prune(model, {"0": max(1, round(share * dense.weight.numel()))}, largest)
    weight, bias, exact = model.get_parameter("0.weight").detach(), dense.bias.detach(), copy.deepcopy(model).double()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support is in beta|invariant checks are)")
        stored = weight.to_sparse_csr()
    column, lengths = bias[:, None], (weight != 0).sum(1).float()
    note = f"lengths of rows vary by {float(lengths.std(correction=0) / lengths.mean()):.2f} of their mean"
    loose = CSR_ERROR if weight.dtype.itemsize == 2 else 0.0
    of = f", {share:.4g} of the weights{end}"
    yield Way(CSR + of, share, lambda x: nn.functional.linear(x, stored) + bias, exact, loose, note)
    products: dict[str, Any] = {CSR: lambda x: stored @ x + column, BY_ROWS: None}
    if weight.is_cuda:
        from sparse_rows import multiply_by_rows  # Triton is not everywhere

        products[BY_ROWS] = multiply_by_rows(weight, bias)
    for name, product in products.items():
        last: Any = product and (lambda x, product=product: product(x).T)  # a view
        between: Any = product and (lambda x, product=product: product(x.T.contiguous()).T.contiguous())
        allowed = loose if name == CSR else 0.0
        yield Way(f"{name}, batch-size-last{of}", share, last or NEEDS_CUDA, exact, allowed, note, last=True)
        yield Way(f"{name}, transposes counted{of}", share, between or NEEDS_CUDA, exact, allowed, note)


def _semi_structured(dense: nn.Linear) -> Iterator[Way]:
    if not dense.weight.is_cuda or dense.weight.dtype == torch.float32:
        raise OptionError("sparse tensor cores take 16 bits on CUDA")
    model = nn.Sequential(copy.deepcopy(dense))
    prune(model, {"0": dense.weight.numel() // 2}, two_of_four)
    exact = copy.deepcopy(model).double()
    store_sparse(model, ["0"])
    model(dense.weight.new_zeros(64, dense.in_features))
    yield Way("2:4 semi-structured", 0.5, model, exact)


def _torchao(name: str, config: str, allowed: float, dense: nn.Linear) -> Iterator[Way]:
    """Make a quantization of torchao, an optional package, through the compiler as it tells its users, and operator by operator.

    The compiler puts a kernel for few rows in the place of a product with int8 weights in bfloat16.
    """
    if not dense.weight.is_cuda:
        raise OptionError("measured on CUDA only")
    model, exact = nn.Sequential(copy.deepcopy(dense)), copy.deepcopy(dense).double()
    quantize(model, ["0"], config)
    model(dense.weight.new_zeros(64, dense.in_features))
    yield Way(name, 1.0, torch.compile(model, dynamic=False), exact, allowed, "torch.compile")
    yield Way(f"{name}, not compiled", 1.0, model, exact, allowed)


def _lazylinop(layer: ButterflyLinear) -> Iterator[Way]:
    """Make ``ksm`` of lazylinop, an optional package, which stores factors as ours and takes x with the batch last.

    It is timed with a transposition before and after, and without.
    """
    if importlib.util.find_spec("lazylinop") is None:
        raise OptionError("lazylinop is not installed")
    ksm = importlib.import_module("lazylinop.butterfly").ksm
    first, second = (ksm(factor.detach()) for factor in layer.factors)
    name, density, exact = "lazylinop ksm, transposes", layer.architecture.density, by_definition(layer).double()
    yield Way(f"{name} counted", density, lambda x: (first @ (second @ x.T.contiguous())).T.contiguous() + layer.bias, exact)
    # a view: as if x had the batch last
    yield Way(f"{name} not counted", density, lambda x: (first @ (second @ x.T)).T + layer.bias, exact)


def _where_possible(density: float, made: Iterator[Way], *names: str) -> Iterator[Way]:
    """Rivals that another package or the device may not have; these names then say why."""
    try:
        yield from list(made)
    except Exception as error:  # an optional package of another version may raise anything
        yield from (Way(name, density, f"no: {first_line(error)}") for name in names)


SMALL: dict[str, Any] = {"quick": {"rows": (24,)}, "few": 2}
ONE_FACTOR: dict[str, Any] = {"measure": paper.factor_case, "seconds": 0.05, **SMALL}

TABLES = {
    "patterns": Table(
        {"rows": (ROWS,), "mode": ("fp32", "fp16"), "layout": (FIRST, LAST)},
        cases=paper.time_patterns,
        candidates=paper.CANDIDATES,
        summary=paper.print_claims,
        **ONE_FACTOR,
    ),
    "large": Table(
        {"rows": (ROWS,)},
        paper.large_rows,
        timed=False,
        cases=paper.large_cases,
        columns=("mode", "layout", "launch", "status", "error", "noise", "median_ms"),
        **SMALL,
    ),
    "energy": Table(
        {"rows": (ROWS,), "mode": ("fp32",), "layout": (FIRST, LAST)},
        cases=paper.energy_patterns,
        candidates=("bmm", "cuda", "einsum", "bsr"),
        needs_cuda=True,
        joules=True,
        summary=paper.print_energy,
        **ONE_FACTOR,
    ),
    "rivals": Table(
        {"mode": ("all",), "layer": ("square", "up", "down"), "arch": ("gonon",), "width": (384,), "rows": (ROWS,)},
        rivals_case,
        quick={"rows": (196,)},
        columns=("density", "note"),
        candidates=KINDS,
        free=("arch",),
        rounds=30,
    ),
}

if __name__ == "__main__":
    run(__doc__, TABLES)
