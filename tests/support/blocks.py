"""Parts of transformer blocks, drawn at random, by default on the GPU, and what their results are compared with."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from flysurgery.ops import (
    Dense,
    FeedForward,
    FusedFactors,
    Gated,
    LayerNorm,
    Linear,
    LinearResidual,
    Norm,
    NormLinears,
    ks_linear,
    one_launch,
    run,
)
from flysurgery.patterns import Architecture, gonon, monarch

Part = TypeVar("Part")
DEVICE = "cuda"
NO_NORM = Norm(None, None, 1e-6)
Kind = Any
"""Of a linear: the architecture of its factors, or its inputs and outputs where it is dense."""
Make = Callable[[torch.dtype, int], Any]
"""An operation of a dtype, for a number of rows."""
K = 1.25 * 1.2
"""Level 2 of the tolerance policy, for a product of factors in half precision."""
K_FP32 = 2.0
"""The goal for float32 by pairs of fp16, beside float32 by PyTorch."""


def normal(*shape: int, dtype: torch.dtype, deviation: float = 1.0, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * deviation + mean).to(dtype)


def layer(architecture: Architecture, dtype: torch.dtype, bias: bool = True) -> FusedFactors:
    factors = tuple(normal(*pattern.factor_shape, dtype=dtype, deviation=pattern.c**-0.5) for pattern in architecture)
    return FusedFactors(factors, normal(architecture.out_features, dtype=dtype, deviation=0.3) if bias else None)


def dense(in_features: int, out_features: int, dtype: torch.dtype, bias: bool = True) -> Dense:
    weight = normal(out_features, in_features, dtype=dtype, deviation=in_features**-0.5)
    return Dense(weight, normal(out_features, dtype=dtype, deviation=0.3) if bias else None)


def affine(features: int, dtype: torch.dtype) -> Norm:
    return Norm(normal(features, dtype=dtype, mean=1.0, deviation=0.2), normal(features, dtype=dtype, deviation=0.2), 1e-6)


def linear(kind: Kind, dtype: torch.dtype, bias: bool = True) -> Linear:
    return layer(kind, dtype, bias) if isinstance(kind, Architecture) else dense(kind[0], kind[1], dtype, bias)


def behind_a_norm(*kinds: Kind, unbiased: Sequence[int] = (), plain: bool = False) -> Make:
    def make(dtype: torch.dtype, rows: int) -> NormLinears:
        group = [linear(kind, dtype, n not in unbiased) for n, kind in enumerate(kinds)]
        return NormLinears(NO_NORM if plain else affine(group[0].sizes[0], dtype), group)

    return make


def three(kind: Kind) -> Make:
    return behind_a_norm(kind, kind, kind)


def added(kind: Kind, scaled: bool = True) -> Make:
    def make(dtype: torch.dtype, rows: int) -> LinearResidual:
        product = linear(kind, dtype)
        outputs = product.sizes[1]
        return LinearResidual(product, normal(rows, outputs, dtype=dtype), normal(outputs, dtype=dtype) if scaled else None)

    return make


def block(up: Kind, down: Kind, activation: str = "gelu", *left_out: str, gate: int = 0, bare: bool = False, hidden: float = 1) -> Make:
    """A feed-forward block, gated where ``up`` is a list, without what is left out; its hidden units are ``hidden`` times as large.

    Only a gated one has an inner norm. Where it is ``bare``, norm and layers have no parameters but factors.
    """

    def make(dtype: torch.dtype, rows: int) -> FeedForward:
        first: Any = Gated(tuple(linear(kind, dtype) for kind in up), gate) if isinstance(up, list) else linear(up, dtype, not bare)
        last = linear(down, dtype, not bare)
        if hidden != 1:
            first.factors[0].mul_(hidden)
        norm, inner = NO_NORM if bare else affine(first.sizes[0], dtype), affine(first.sizes[1], dtype) if isinstance(up, list) else None
        made = FeedForward(norm, first, last, activation, normal(last.sizes[1], dtype=dtype), inner=inner)
        return made._replace(**{name: False if name == "residual" else None for name in left_out})

    return make


TRAINED: dict[str, Callable[[int], Make]] = {
    "dense q, k, v": lambda n: behind_a_norm((n, 3 * n)),
    "factors side by side": lambda n: three(gonon(n, n)),
    "factors beside dense": lambda n: behind_a_norm(monarch(n, n), (n, n), unbiased=[1]),
    "norm without weights": lambda n: behind_a_norm((n, n), plain=True),
    "norm alone": lambda n: lambda dtype, rows: LayerNorm(affine(n, dtype)),
    "norm alone, without a bias": lambda n: lambda dtype, rows: LayerNorm(affine(n, dtype)._replace(bias=None)),
    "residual": lambda n: added((n, n), scaled=False),
    "scaled residual": lambda n: added(monarch(n, n)),
    "dense feed-forward": lambda n: block((n, 4 * n), (4 * n, n)),
    "feed-forward of factors": lambda n: block(monarch(4 * n, n), monarch(n, 4 * n), "silu", "scale"),
    "scaled feed-forward of factors": lambda n: block(gonon(4 * n, n), gonon(n, 4 * n)),
    "feed-forward alone": lambda n: block(monarch(4 * n, n), (4 * n, n), "gelu_tanh", "norm", "scale", "residual"),
}
"""Operations with fused gradients, one of each form, of a width."""


def to_train(name: str, rows: int, width: int) -> tuple[Tensor, Any]:
    """x and one of these in float64, with tensors that require gradients."""
    torch.manual_seed(0)
    operation = TRAINED[name](width)(torch.float64, rows)
    for tensor in operation.tensors:
        tensor.requires_grad_()
    return normal(rows, width, dtype=torch.float64).requires_grad_(), operation


def inputs_of(operation: Any) -> int:
    if isinstance(operation, NormLinears):
        return operation.group[0].sizes[0]
    return (operation.linear if isinstance(operation, LinearResidual) else operation.up).sizes[0]


def wide(part: Part) -> Part:
    """The same in float64: a tensor, a part of a block, some of these or None."""
    if isinstance(part, Tensor):
        return part.double()  # pyright: ignore[reportReturnType]
    if isinstance(part, (tuple, list)):
        members = [wide(member) for member in part]
        return type(part)(*members) if hasattr(part, "_fields") else tuple(members)  # pyright: ignore[reportReturnType]
    return part


def comparable(out: Tensor, yardstick: Tensor, truth: Tensor, k: float | None = None, *, each_row: bool = False) -> None:
    """Level 2, by ``k`` where the policy's factor is another; and, less strictly, of each row, whose error no other row makes up for."""
    assert out.dtype == yardstick.dtype and out.shape == yardstick.shape
    assert bool(out.isfinite().all())
    k = (K_FP32 if out.dtype == torch.float32 else K) if k is None else k
    error, allowed = (float((value.double() - truth).square().mean().sqrt()) for value in (out, yardstick))
    assert error <= k * allowed, f"rms error {error:.3g}, PyTorch's is {allowed:.3g}"
    if each_row:
        worst = float((out.double() - truth).square().mean(-1).sqrt().max())
        assert worst <= 4 * k * allowed, f"one row errs by {worst:.3g}, PyTorch's rms error is {allowed:.3g}"


def check(x: Tensor, operation: Any, k: float | None = None, out: Tensor | None = None, *, each_row: bool = False) -> Tensor:
    """What the operation gives, or ``out`` in its place, beside PyTorch's own operators in the same dtype and the truth in float64."""
    with nullcontext() if out is None else patch.object(one_launch, "ks_linear", partial(ks_linear, backend="bmm")):
        yardstick = operation.plainly(x)
    out = run(x, operation) if out is None else out
    comparable(out, yardstick, wide(operation).plainly(x.double()), k, each_row=each_row)
    return out


def check_replay(call: Callable[[], Tensor]) -> None:
    """A graph of the call gives what the call gives."""
    expected = call().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(2):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
