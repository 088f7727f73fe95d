"""What the tables of kernels compare: operations, and one case of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from recipe import NEEDS_CUDA, Run
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from flysurgery import ops
from flysurgery.bench import TIMED_MODES, Case, in_mode
from flysurgery.bench.ceilings import Work
from flysurgery.factors import factors_to_dense, ks_einsum
from flysurgery.gpu.gradients import all_gradients
from flysurgery.gpu.layer_norm import run_layer_norm
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.ops import BACKENDS, Dense, FusedFactors, Gated, Linear, Norm, Problem, explain, ks_linear
from flysurgery.ops.launches import fused_norm_linear, linear_epilogue
from flysurgery.ops.wide import wide_ffn, wide_group
from flysurgery.patterns import Architecture, gonon, monarch

HEAD = 64
"""Features of a head."""

PATCHES, TOKENS = 196, 197
"""Rows of one image without and with its class token."""

SHARED_LIMIT = 227 * 1024
"""Shared memory of a block on compute capability 9.0."""

FAMILIES: Mapping[str, Callable[[int, int], Architecture]] = {"gonon": gonon, "monarch": monarch}


@dataclass(frozen=True)
class Place:
    """Where cases are made: a device, and how many images a case has where none of its columns says so."""

    device: torch.device
    images: int = 128

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def kernel(self, run: Run) -> Run | str:
        """A candidate that launches kernels, or why it cannot."""
        return run if self.on_cuda else NEEDS_CUDA

    def compiled(self, run: Run, mode: str = "default") -> Run | str:
        """A module or function through ``torch.compile``, or why not."""
        return torch.compile(run, mode=mode) if self.on_cuda else "left out on a CPU"


@dataclass(frozen=True)
class Drawn:
    """Random weights of the sizes of a trained block's, and inputs, in one dtype on one device.

    They are drawn on the CPU: a graph that could not be captured, of the case before, leaves CUDA's generator unusable.
    """

    device: torch.device
    dtype: torch.dtype

    def tensor(self, *shape: int, deviation: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape) * deviation + mean).to(self.device, self.dtype)

    def norm(self, features: int) -> Norm:
        return Norm(self.tensor(features, deviation=0.2, mean=1.0), self.tensor(features, deviation=0.2), 1e-6)

    def linear(self, architecture: Architecture) -> FusedFactors:
        factors = tuple(self.tensor(*pattern.factor_shape, deviation=pattern.c**-0.5) for pattern in architecture)
        return FusedFactors(factors, self.tensor(architecture.out_features, deviation=0.1))


Compute = Callable[[Tensor, ops.Operation], Tensor]


def plainly(x: Tensor, operation: ops.Operation) -> Tensor:
    return operation.plainly(x)


@dataclass(frozen=True)
class Operation:
    """What is computed: a function of x that gets ``ops.run`` or ``plainly``, and ``operands``, whose layers are of factors."""

    function: Callable[..., Tensor]
    operands: tuple[Any, ...] = ()

    def by(self, compute: Compute) -> Run:
        """The operation by kernels or by its definition."""
        return lambda x: self.function(compute, x, *self.operands)

    @cached_property
    def dense(self) -> Operation:
        return replace(self, operands=tuple(map(_dense, self.operands)))

    def weights(self) -> list[Tensor]:
        return [each for operand in self.operands for each in _weights(operand)]

    def case(
        self,
        x: Tensor,
        runs: Mapping[str, Run | str],
        *,
        checked: int | None = None,
        flops: int | None = None,
        copy: bool = False,
        **more: Any,
    ) -> Case:
        """A case of this operation, of which the first ``checked`` rows are held against float64.

        ``flops`` are given where it has no weights. With ``copy`` a copy that moves as many bytes of inputs and outputs is timed too.
        """
        exact = replace(self, operands=pytree.tree_map_only(Tensor, Tensor.double, self.operands))
        with torch.no_grad():
            truth = exact.by(plainly)(x[:checked].double())
        moved = x.nbytes + len(x) * truth[0].numel() * x.element_size()
        rows = range(len(truth))
        if flops is not None:
            return Case(runs, x, truth, rows, Work(moved, flops), **more)
        own, dense = (work_of(moved, operation.weights(), len(x)) for operation in (self, self.dense))
        works = {name: dense if name.startswith("dense") else own for name in runs}
        if not copy:
            return Case(runs, x, truth, rows, works, **more)
        block = torch.ones(moved // 2, dtype=torch.uint8, device=x.device)
        inputs, truths = dict.fromkeys(runs, x) | {"copy": block}, dict.fromkeys(runs, truth) | {"copy": block[: len(truth)].double()}
        return Case({**runs, "copy": torch.clone}, inputs, truths, rows, works | {"copy": Work(moved, 0)}, **more)


def work_of(moved: int, weights: Iterable[Tensor], rows: int) -> Work:
    """What products with these matrices or factors must spend: ``moved`` bytes of inputs and outputs, weights once."""
    weights = list(weights)
    return Work(moved + sum(each.nbytes for each in weights), 2 * rows * sum(each.numel() for each in weights))


def _dense(operand: Any) -> Any:
    if isinstance(operand, FusedFactors):
        weight = factors_to_dense([factor.double() for factor in operand.factors])
        return Dense(weight.to(operand.factors[0].dtype), operand.bias)
    if isinstance(operand, Gated):
        return Gated(tuple(map(_dense, operand.members)), operand.gate)
    if isinstance(operand, list):  # one matrix, as models have it for q, k and v
        weights, biases = zip(*map(_dense, operand), strict=True)
        return [Dense(torch.cat(weights), torch.cat(biases))]
    return operand


def _weights(operand: Any) -> list[Tensor]:
    if isinstance(operand, FusedFactors):
        return list(operand.factors)
    if isinstance(operand, Dense):
        return [operand.weight]
    members = operand.members if isinstance(operand, Gated) else operand if isinstance(operand, list) else ()
    return [each for member in members for each in _weights(member)]


def _ffn(compute: Compute, x: Tensor, *operands: Any) -> Tensor:
    return compute(x, ops.FeedForward(*operands))


def _norm_linear(compute: Compute, x: Tensor, norm: Norm, group: list[Linear]) -> Tensor:
    return compute(x, ops.NormLinears(norm, group))


def _residual(compute: Compute, x: Tensor, linear: Linear) -> Tensor:
    return compute(x, ops.LinearResidual(linear, x))


def linears_of_group(_: Compute, x: Tensor, group: list[Linear]) -> Tensor:
    run = [functional.linear(x, *each) if isinstance(each, Dense) else ks_linear(x, each.factors, each.bias) for each in group]
    return run[0] if len(run) == 1 else torch.cat(run, dim=-1)


def _attention(compute: Compute, x: Tensor) -> Tensor:  # shapes: (images, tokens, 3 * heads * HEAD), (images, heads, tokens, HEAD)
    q, k, v = x.unflatten(2, (3, -1, HEAD)).permute(2, 0, 3, 1, 4).unbind(0)
    return compute(q, ops.Attention(k, v))


def _attended(compute: Compute, x: Tensor) -> Tensor:  # shapes: (images, tokens, 3 * width), (images, tokens, width)
    return _attention(compute, x).transpose(1, 2).flatten(2)


def attention(place: Place, mode: str, *, images: int, tokens: int, heads: int) -> Case:
    """q, k and v as views of what one linear gives."""
    operation = Operation(_attention)

    def by(backend: SDPBackend) -> Run:
        def run(x: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return operation.by(plainly)(x)

        return run

    runs = {
        "pytorch": operation.by(plainly),
        "cudnn": by(SDPBackend.CUDNN_ATTENTION),
        "flash": by(SDPBackend.FLASH_ATTENTION),
        "flysurgery": place.kernel(operation.by(ops.run)),
    }
    x = Drawn(place.device, TIMED_MODES[mode]).tensor(images, tokens, 3 * heads * HEAD)
    return operation.case(x, runs, checked=8, flops=4 * images * heads * tokens * tokens * HEAD, baseline="pytorch")


def norm_linear(place: Place, mode: str, *, architecture: str, rows: int) -> Case:
    """The norm and q, k and v of a ViT-S/16."""
    drawn = Drawn(place.device, TIMED_MODES[mode])
    norm, group = drawn.norm(384), [drawn.linear(FAMILIES[architecture](384, 384)) for _ in range(3)]
    operation = Operation(_norm_linear, (norm, group))

    def two_launches(x: Tensor) -> Tensor:
        normed = run_layer_norm(x, norm.weight, norm.bias, norm.eps)
        return ops.ks_linear_group(normed, [member.factors for member in group], [member.bias for member in group])

    dense = operation.dense.by(plainly)
    runs = {
        "fused": place.kernel(operation.by(ops.run)),
        "two launches": place.kernel(two_launches),
        "dense": dense,
        "dense compiled": place.compiled(dense),
    }
    return operation.case(drawn.tensor(rows, 384), runs, copy=True)


def ffn(place: Place, mode: str, *, width: int, architecture: str, activation: str, rows: int) -> Case:
    """A feed-forward block with its norm and residual."""
    drawn, family = Drawn(place.device, TIMED_MODES[mode]), FAMILIES[architecture]
    layers = drawn.linear(family(4 * width, width)), drawn.linear(family(width, 4 * width))
    operation = Operation(_ffn, (drawn.norm(width), *layers, activation))
    dense = operation.dense.by(plainly)
    runs = {
        "fused": place.kernel(operation.by(ops.run)),
        "composed": operation.by(plainly),
        "dense": dense,
        "dense compiled": place.compiled(dense, "max-autotune-no-cudagraphs"),
    }
    x = drawn.tensor(rows, width)
    return operation.case(x, runs, base=x)


@dataclass(frozen=True)
class GatedBlock:
    """Sizes of a model's block. ``apart``: gate and value have layers of their own; ``inner``: a norm stands before the last layer."""

    width: int
    hidden: int
    apart: bool = False
    inner: bool = False
    scaled: bool = False


GATED_BLOCKS = {
    "eva02_tiny": GatedBlock(192, 512),
    "eva02_small": GatedBlock(384, 1024),
    "eva02_base": GatedBlock(768, 2048, apart=True, inner=True),
    "vit_giant_patch14_dinov2": GatedBlock(1536, 4096, scaled=True),
}


def gated_ffn(place: Place, mode: str, *, model: str, rows: int) -> Case:
    """A gated feed-forward block with norm, residual, and what else the model has there; Monarch with four blocks."""
    block, drawn = GATED_BLOCKS[model], Drawn(place.device, TIMED_MODES[mode])
    width, hidden = block.width, block.hidden
    sizes = [hidden, hidden] if block.apart else [2 * hidden]
    up, down = Gated(tuple(drawn.linear(monarch(size, width)) for size in sizes)), drawn.linear(monarch(width, hidden))
    scale, inner = drawn.tensor(width, deviation=0.1) if block.scaled else None, drawn.norm(hidden) if block.inner else None
    converted = Operation(_ffn, (drawn.norm(width), up, down, "silu", scale, True, inner))
    runs: dict[str, Run | str] = {}
    launches: dict[str, str | None] = {}
    x = drawn.tensor(rows, width)
    for name, operation in {"dense": converted.dense, "converted": converted}.items():
        runs |= {name: operation.by(plainly), f"{name} fused": place.kernel(operation.by(ops.run))}
        if place.on_cuda:
            with in_mode(mode):
                found = ops.way(x, ops.FeedForward(*operation.operands))
                launches[f"{name} fused"] = None if isinstance(found, str) else " | ".join(found.launches())
    checked = min(4096, rows)
    return converted.case(
        x, runs, checked=checked, base=x[:checked], columns={"width": width, "hidden": hidden}, notes={"launches": launches}
    )


def few_rows(place: Place, mode: str, *, width: int, rows: int, part: str) -> Case:
    """A part of a block in the architectures of Gonon et al., dense and converted, for a few images."""
    drawn = Drawn(place.device, TIMED_MODES[mode])
    if part == "attention":
        operation = Operation(_attended)
        plain, x = operation.by(plainly), drawn.tensor(rows // TOKENS, TOKENS, 3 * width)
        return operation.case(x, {"dense": plain, "dense fused": place.kernel(operation.by(ops.run))}, flops=4 * rows * TOKENS * width)
    norm, square = drawn.norm(width), gonon(width, width)
    if part == "norm and q, k, v":
        operation = Operation(_norm_linear, (norm, [drawn.linear(square) for _ in range(3)]))
    elif part == "output projection":
        operation = Operation(_residual, (drawn.linear(square),))
    else:
        operation = Operation(_ffn, (norm, drawn.linear(gonon(4 * width, width)), drawn.linear(gonon(width, 4 * width))))
    dense = operation.dense
    runs = {
        "dense": dense.by(plainly),
        "dense fused": place.kernel(dense.by(ops.run)),
        "converted fused": place.kernel(operation.by(ops.run)),
    }
    return operation.case(drawn.tensor(rows, width), runs)


LAYERS: dict[str, tuple[Architecture, int]] = {
    "square": (gonon(384, 384), 1),
    "qkv": (gonon(384, 384), 3),
    "up": (gonon(1536, 384), 1),
    "down": (gonon(384, 1536), 1),
    "monarch square": (monarch(384, 384), 1),
    "monarch up": (monarch(1536, 384), 1),
    "monarch down": (monarch(384, 1536), 1),
}
"""The layers of a ViT-S/16's block, and how many linears each is."""


def linear(place: Place, mode: str, *, layer: str, rows: int) -> Case:
    """A ButterflyLinear (for q, k and v a SplitLinear) as it stands in a model, beside the multiplications that others prepare."""
    (architecture, linears), dtype = LAYERS[layer], TIMED_MODES[mode]
    # Weights that do not train, made outside inference mode, are packed once; others at each call, so that changes are seen.
    parts = [ButterflyLinear(architecture, device=place.device, dtype=dtype).requires_grad_(False) for _ in range(linears)]
    operation = Operation(linears_of_group, ([FusedFactors(tuple(part.factors), part.bias) for part in parts],))
    runs: dict[str, Run | str] = {
        "dense": operation.dense.by(plainly),
        "layer": parts[0] if linears == 1 else SplitLinear(dict(zip("qkv", parts, strict=True))),
    }
    for name in ("bmm", "einsum"):
        bound = [BACKENDS[name].bind(tuple(part.factors), part.bias) for part in parts]
        runs[name] = lambda x, bound=bound: bound[0](x) if len(bound) == 1 else torch.cat([run(x) for run in bound], dim=-1)
    choice = explain(Problem(architecture, rows, dtype, place.device.type, bias=True, allow_tf32=mode == "tf32")).choice
    x = Drawn(place.device, dtype).tensor(rows, architecture.in_features)
    return operation.case(
        x, runs, columns={"architecture": architecture, "linears": linears}, notes={"backend": {"layer": choice}}, copy=True
    )


def wide(place: Place, mode: str, *, part: str, architecture: str, width: int, rows: int) -> Case:
    """The launches between which the operators choose; what decides stands in ``flysurgery/ops/wide.py``."""
    drawn, family = Drawn(place.device, TIMED_MODES[mode]), FAMILIES[architecture]
    norm, x = drawn.norm(width), drawn.tensor(rows, width)
    if part == "feed-forward":
        up, down = drawn.linear(family(4 * width, width)), drawn.linear(family(width, 4 * width))
        operation = Operation(_ffn, (norm, up, down, "gelu"))
        ways: dict[str, Run] = {
            "factor by factor": lambda x: wide_ffn(x, norm, up, down, "gelu", None, True),
            "a launch a layer": lambda x: linear_epilogue(fused_norm_linear(x, norm, [up], "gelu"), down, residual=x),
        }
    else:
        group = [drawn.linear(family(width, width)) for _ in range(3)]
        operation = Operation(_norm_linear, (norm, group))
        ways = {
            "factor by factor": lambda x: wide_group(x, norm, group),
            "one launch": lambda x: fused_norm_linear(x, norm, group, "none"),
        }
    runs = {name: place.kernel(run) for name, run in ways.items()} | {"dense": operation.dense.by(plainly)}
    return operation.case(x, runs, base=x if part == "feed-forward" else None)


def factor_gradients(place: Place, mode: str, *, layer: str) -> Case:
    """The gradients of a layer's factors. x holds the layer's inputs and its outputs' gradient."""
    (architecture, linears), rows = LAYERS[layer], place.images * PATCHES
    drawn = Drawn(place.device, TIMED_MODES[mode])
    factors = [factor for _ in range(linears) for factor in drawn.linear(architecture).factors]

    def parts(both: Tensor) -> tuple[Tensor, Tensor]:  # shapes: (rows, in_features), (rows, linears * out_features)
        x, dy = both.split((rows * architecture.in_features, rows * linears * architecture.out_features))
        return x.view(rows, -1), dy.view(rows, -1)

    def einsum(both: Tensor) -> Tensor:
        (x, dy), found = parts(both), list[Tensor]()
        for left, right, own in zip(factors[::2], factors[1::2], dy.chunk(linears, dim=1), strict=True):
            left, right = left.to(x.dtype), right.to(x.dtype)
            pairs = (left, own, ks_einsum(x, right)), (right, ks_einsum(own, left.transpose(1, 2)), x)
            for factor, ahead, behind in pairs:
                a, b, c, d = factor.shape
                found.append(torch.einsum("nipj,niqj->ipqj", ahead.unflatten(1, (a, b, d)), behind.unflatten(1, (a, c, d))))
        return torch.cat([gradient.flatten() for gradient in found])

    def kernel(both: Tensor) -> Tensor:
        x, dy = parts(both)
        return torch.cat([gradient.flatten() for gradient in all_gradients(dy, x, factors, linears, mode, False, False)])

    both = drawn.tensor(rows * (architecture.in_features + linears * architecture.out_features))
    truth = einsum(both.double())
    work = work_of(both.nbytes, [truth.to(both.dtype)], rows)
    return Case({"cuda": place.kernel(kernel), "einsum": einsum}, both, truth, range(len(truth)), work, "einsum")
