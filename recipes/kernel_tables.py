"""Time kernels, and the parts of a block that they compute, beside PyTorch's own.

    python recipes/kernel_tables.py attention --out build/kernels.csv

The tables:

    attention            attention of halves in short sequences, for the sizes of timm's models, beside PyTorch's backends
    attention_gradients  the same in bf16, with the gradient of q, k and v side by side; "cuda" is this project's
    hidden_gradients     hidden units of a ViT's feed-forward block and their gradients, as a backward pass needs them
    norm_linear          a norm with q, k and v of a ViT-S/16 in one launch, beside dense and compiled
    factor_gradients     the gradients of a layer's factors, for the layers of a ViT-S/16 block, beside einsum
    fused_ffn            feed-forward blocks with norm and residual, beside separate operators, dense and compiled
    few_rows             the parts of a block for 1 to 8 images, dense and converted

``vits.py table6`` has linear layers, and ``vits.py table3`` blocks and gated feed-forward blocks. ``fused`` is what ``flysurgery.ops``
chooses, ``composed`` the same by separate operators, ``dense`` PyTorch's operators with the matrices that the factors multiply to,
``compiled`` these through ``torch.compile``. A launch is in the times. ``ratio_to_dense`` is the ratio to the candidate that is timed
twice: dense, or einsum for gradients. ``bound_ms`` counts x, y and the candidate's weights.

Needs a CUDA device, and half a minute to ten minutes a table; kernels that are not compiled yet take most of it.
Rows: recipes/results/kernels_h200.csv
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from recipe import Place, Run, Table, run
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from flysurgery import ops
from flysurgery.bench import TIMED_MODES, Case
from flysurgery.bench.ceilings import Work
from flysurgery.factors import factors_to_dense, ks_einsum
from flysurgery.gpu.gradients import all_gradients
from flysurgery.gpu.hidden_gradient import hidden_image, run_hidden_gradient
from flysurgery.gpu.row_sums import activation_gradient
from flysurgery.ops import Dense, FusedFactors, Norm
from flysurgery.patterns import Architecture, named

HEAD, PATCHES, TOKENS = 64, 196, 197  # features of a head of attention, and rows of one image without and with its class token
FAMILIES = ("gonon", "monarch")
GROUP, FFN = "norm and q, k, v", "feed-forward"


@dataclass(frozen=True)
class Drawn:
    """Random weights of the sizes of a trained block's, and inputs, in one mode on one device.

    They are drawn on the CPU: a graph that could not be captured, of the case before, leaves CUDA's generator unusable.
    """

    place: Place
    mode: str

    def tensor(self, *shape: int, deviation: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape) * deviation + mean).to(self.place.device, TIMED_MODES[self.mode])

    def norm(self, features: int) -> Norm:
        return Norm(self.tensor(features, deviation=0.2, mean=1.0), self.tensor(features, deviation=0.2), 1e-6)

    def linear(self, architecture: Architecture) -> FusedFactors:
        factors = tuple(self.tensor(*pattern.factor_shape, deviation=pattern.c**-0.5) for pattern in architecture)
        return FusedFactors(factors, self.tensor(architecture.out_features, deviation=0.1))


Compute = Callable[[Tensor, Any], Tensor]


def plainly(x: Tensor, operation: Any) -> Tensor:
    return operation.plainly(x)


@dataclass(frozen=True)
class Operation:
    """What is computed: a function of x that gets ``ops.run`` or ``plainly``, and ``operands``, whose layers are of factors."""

    function: Callable[..., Tensor]
    operands: tuple[Any, ...] = ()

    def by(self, compute: Compute) -> Run:
        """The operation by kernels or by its definition."""
        return lambda x: self.function(compute, x, *self.operands)

    def work(self, moved: int, rows: int) -> Work:
        """What it must spend: ``moved`` bytes of inputs and outputs, weights once, and the products with these."""
        weights = [each for each in pytree.tree_leaves(self.operands) if isinstance(each, Tensor) and each.ndim > 1]
        return Work(moved + sum(each.nbytes for each in weights), 2 * rows * sum(each.numel() for each in weights))

    def case(self, place: Place, x: Tensor, candidates: tuple[str, ...], checked: int | None, flops: int | None, **more: Any) -> Case:
        """Its candidates of these names, and the first ``checked`` rows held against float64; ``flops`` are given for what has no factors.

        That is also by two of PyTorch's backends.
        """
        dense = replace(self, operands=tuple(map(_dense, self.operands)))
        plain = dense.by(plainly)
        runs: dict[str, Run | str] = {"dense": plain, "dense fused": place.kernel(dense.by(ops.run))}
        if flops is None:
            compiled = torch.compile(plain, mode="max-autotune-no-cudagraphs") if place.on_cuda else "left out on a CPU"
            runs |= {"fused": place.kernel(self.by(ops.run)), "composed": self.by(plainly), "dense compiled": compiled}
        else:
            runs |= by_backends(self.by(plainly))
        runs = {name: runs[name] for name in candidates if name in runs}
        exact = replace(self, operands=pytree.tree_map_only(Tensor, Tensor.double, self.operands))
        with torch.no_grad():
            truth = exact.by(plainly)(x[:checked].double())
        moved = x.nbytes + len(x) * truth[0].numel() * x.element_size()
        own, other = (Work(moved, flops) if flops else each.work(moved, len(x)) for each in (self, dense))
        works = {name: other if name.startswith("dense") else own for name in runs}
        return Case(runs, x, truth, range(len(truth)), works, **more)


def _dense(operand: Any) -> Any:
    if isinstance(operand, FusedFactors):
        weight = factors_to_dense([factor.double() for factor in operand.factors])
        return Dense(weight.to(operand.factors[0].dtype), operand.bias)
    if isinstance(operand, list):  # one matrix, as models have it for q, k and v
        weights, biases = zip(*map(_dense, operand), strict=True)
        return [Dense(torch.cat(weights), torch.cat(biases))]
    return operand


def _attention(compute: Compute, x: Tensor) -> Tensor:  # shapes: (images, tokens, 3 * width), (images, tokens, width)
    q, k, v = x.unflatten(2, (3, -1, HEAD)).permute(2, 0, 3, 1, 4).unbind(0)
    return compute(q, ops.Attention(k, v)).transpose(1, 2).flatten(2)


def by_backends(run: Run) -> dict[str, Run | str]:
    """What attends by PyTorch's operator, by each of two of its backends."""

    def by(backend: SDPBackend, x: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return run(x)

    return {"cudnn": partial(by, SDPBackend.CUDNN_ATTENTION), "flash": partial(by, SDPBackend.FLASH_ATTENTION)}


def block_part(
    place: Place,
    *,
    part: str,
    width: int,
    rows: int,
    mode: str,
    candidates: tuple[str, ...],
    architecture: str = "gonon",
    activation: str = "gelu",
    tokens: int = TOKENS,
) -> Case:
    """A part of a block, converted, and those of its candidates that are named."""
    drawn = Drawn(place, mode)
    norm, x, square = drawn.norm(width), drawn.tensor(rows, width), named(architecture, width, width)
    how: dict[str, Any] = {"checked": None, "flops": None, "worst": 2}
    if part == FFN:
        up, down = (drawn.linear(named(architecture, *shape)) for shape in ((4 * width, width), (width, 4 * width)))
        operation = Operation(lambda compute, x, *own: compute(x, ops.FeedForward(*own)), (norm, up, down, activation))
        how |= {"worst": 3, "base": x}
    elif part == GROUP:
        group = [drawn.linear(square) for _ in range(3)]
        operation = Operation(lambda compute, x, *own: compute(x, ops.NormLinears(*own)), (norm, group))
    elif part == "output projection":
        operation = Operation(lambda compute, x, linear: compute(x, ops.LinearResidual(linear, x)), (drawn.linear(square),))
    else:  # q, k and v as views of what one linear gives
        operation, x = Operation(_attention), drawn.tensor(rows // tokens, tokens, 3 * width)
        how |= {"checked": 8, "flops": 4 * rows * tokens * width}
    return operation.case(place, x, candidates, **how)


def attention_gradients(place: Place, *, rows: int, tokens: int, width: int, mode: str) -> Case:
    """Attention and the gradient of q, k and v, which lie side by side. x holds them and the gradient of the result."""
    both = Drawn(place, mode).tensor(4 * rows * width)

    def gradient(compute: Compute, both: Tensor) -> Tensor:  # shape: (4 * rows * width,) -> (images, tokens, 3 * width)
        x, dy = both.split((3 * rows * width, rows * width))
        with torch.enable_grad():
            x = x.view(-1, tokens, 3 * width).detach().requires_grad_()
            return torch.autograd.grad(_attention(compute, x), x, dy.view(-1, tokens, width))[0]

    dense = partial(gradient, plainly)
    runs = {"dense": dense, **by_backends(dense), "cuda": partial(gradient, ops.attended)}
    work = Work(8 * rows * width * both.element_size(), 14 * rows * tokens * width)
    return Case(runs, both, dense(both.double()), None, work)


def hidden_gradients(place: Place, *, rows: int, width: int, mode: str) -> Case:
    """Hidden units and their gradients, of which the latter are checked. x holds the inputs and the gradients of the outputs."""
    drawn, hidden = Drawn(place, mode), 4 * width
    first, last = (drawn.tensor(*shape, deviation=width**-0.5) for shape in ((hidden, width), (width, hidden)))
    bias = drawn.tensor(hidden)

    def products(both: Tensor) -> tuple[Tensor, Tensor]:  # shapes: (rows, hidden) twice
        x, dy = both.view(2, rows, width)
        return torch.addmm(bias.to(x), x, first.to(x).t()), dy @ last.to(x)

    def dense(both: Tensor) -> Tensor:
        u, gradient = products(both)
        functional.gelu(u)  # hidden units, which the weight's gradient needs
        return torch.ops.aten.gelu_backward(gradient, u)

    def composed(both: Tensor) -> Tensor:
        u, gradient = products(both)
        activation_gradient(u, gradient, "gelu")
        return gradient

    def kernel(both: Tensor) -> Tensor:
        x, dy = both.view(2, rows, width)
        return run_hidden_gradient(x, dy, image, bias, "gelu")[1]

    both, image = drawn.tensor(2 * rows * width), hidden_image(first, last)
    work = Work(5 * both.nbytes, 4 * rows * width * hidden)
    return Case({"dense": dense, "composed": composed, "cuda": place.kernel(kernel)}, both, dense(both.double()), None, work)


LAYERS: Mapping[str, tuple[str, int, int, int]] = {
    "square": ("gonon", 384, 384, 1),
    "qkv": ("gonon", 384, 384, 3),
    "up": ("gonon", 1536, 384, 1),
    "down": ("gonon", 384, 1536, 1),
    "monarch square": ("monarch", 384, 384, 1),
    "monarch up": ("monarch", 1536, 384, 1),
    "monarch down": ("monarch", 384, 1536, 1),
}
"""The layers of a ViT-S/16's block: their architectures, and how many linears each is."""


def factor_gradients(place: Place, *, layer: str, rows: int, mode: str) -> Case:
    """The gradients of a layer's factors. x holds the layer's inputs and its outputs' gradient."""
    family, out_features, in_features, linears = LAYERS[layer]
    architecture, drawn = named(family, out_features, in_features), Drawn(place, mode)
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
    work = Work(both.nbytes + truth.numel() * both.element_size(), 2 * rows * truth.numel())
    return Case({"cuda": place.kernel(kernel), "einsum": einsum}, both, truth, range(len(truth)), work, "einsum")


SIZES = [
    {"rows": images * tokens, "tokens": tokens, "width": HEAD * heads}
    for images, tokens, heads in (
        *((images, 197, 6) for images in (8, 16, 32, 64, 128, 256)),
        *((128, 197, 3), (128, 197, 12), (128, 50, 12), (64, 257, 16)),
    )
]
"""Images of timm's models."""

ONE_CASE: Mapping[str, Any] = {"needs_cuda": True, "few": 1, "seconds": 0.1}
ON_TOKENS: Mapping[str, Any] = {"measure": block_part, "needs_cuda": True, "few": 1, "quick": {"rows": (TOKENS,)}}

TABLES = {
    "attention": Table(
        {"part": ("attention",), "mode": ("fp16", "bf16")},
        block_part,
        cases=SIZES,
        candidates=("dense", "cudnn", "flash", "dense fused"),
        **ONE_CASE,
    ),
    "attention_gradients": Table({"mode": ("bf16",)}, attention_gradients, cases=SIZES[4:], **ONE_CASE),
    "hidden_gradients": Table(
        {"mode": ("bf16", "fp16")},
        hidden_gradients,
        cases=[{"rows": images * tokens, "width": width} for images, tokens, width in ((128, 197, 384), (64, 197, 768), (64, 257, 1024))],
        **ONE_CASE,
    ),
    "norm_linear": Table(
        {"part": (GROUP,), "width": (384,), "architecture": FAMILIES, "mode": ("all",), "rows": (128 * TOKENS,)},
        candidates=("fused", "dense", "dense compiled"),
        **ON_TOKENS,
    ),
    "factor_gradients": Table(
        {"layer": tuple(LAYERS), "mode": ("bf16", "fp32"), "rows": (128 * PATCHES,)},
        factor_gradients,
        quick={"rows": (PATCHES,)},
        **ONE_CASE,
    ),
    "fused_ffn": Table(
        {
            "part": (FFN,),
            "width": (384, 192, 768),
            "architecture": FAMILIES,
            "activation": ("gelu", "gelu_tanh"),
            "mode": ("all",),
            "rows": (128 * TOKENS,),
        },
        candidates=("fused", "composed", "dense", "dense compiled"),
        **ON_TOKENS,
    ),
    "few_rows": Table(
        {
            "architecture": ("gonon",),
            "width": (384, 768),
            "mode": ("fp16", "fp32"),
            "rows": (TOKENS, 2 * TOKENS, 4 * TOKENS, 8 * TOKENS),
            "part": (GROUP, "attention", "output projection", FFN),
        },
        candidates=("dense", "dense fused", "fused"),
        **{**ON_TOKENS, "few": 4},
    ),
}

if __name__ == "__main__":
    run(__doc__, TABLES)
