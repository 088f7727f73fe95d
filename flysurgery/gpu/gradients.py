"""Gradients of linears that share x: the functions of the registered operators, and the split of their results by parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flysurgery.gpu.doubt import doubt_trained
from flysurgery.gpu.exact_gradient import exact_gradients
from flysurgery.gpu.kernel import current_device
from flysurgery.gpu.run_product import run_product
from flysurgery.gpu.table import rows_bucket
from flysurgery.gpu.train_backward import Chain
from flysurgery.gpu.tuning_record import meet
from flysurgery.patterns import Architecture, Pattern

Gradients = tuple[Tensor | None, Sequence[Tensor | None], Sequence[Tensor | None]]
_chains: dict[tuple[object, ...], Chain] = {}


def input_gradient(
    dy: Tensor,  # shape: (*batch, linears * out_features)
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left to right; of several linears one after the other
    linears: int,
    mode: str,
) -> Tensor:  # shape: (*batch, in_features)
    """``dx = dy @ W``, summed over the linears: one launch for each, where the fused kernel has a tiling of the transposed architecture."""
    length = len(factors) // linears
    parts = dy.chunk(linears, dim=-1)
    own = [factors[start : start + length] for start in range(0, len(factors), length)]
    total = run_product(parts[0], own[0], (), 1, mode, transposed=True)
    for part, theirs in zip(parts[1:], own[1:], strict=True):
        total.add_(run_product(part, theirs, (), 1, mode, transposed=True))
    return total


def all_gradients(
    dy: Tensor,  # shape: (*batch, linears * out_features)
    x: Tensor,  # shape: (*batch, in_features)
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left to right; of several linears one after the other
    kept: Sequence[Tensor],  # what ``Trained.apart`` gives behind the product, or nothing
    linears: int,
    mode: str,
    with_input: bool,
    with_bias: bool,
) -> list[Tensor]:
    """Gradients of all factors and biases, and that of x if asked for, as ``Chain.run`` gives them and ``hand_out`` takes them."""
    device_index = x.device.index
    if device_index != current_device():
        with torch.cuda.device(device_index):
            return all_gradients(dy, x, factors, kept, linears, mode, with_input, with_bias)
    doubt_trained(factors)
    if mode == "exact":
        return exact_gradients(dy, x, factors, linears, with_input, with_bias)
    factors = tuple(factors)
    kernels = chain_for(factors, linears, mode, device_index, x.numel() // x.shape[-1])
    meet(kernels, x)
    return kernels.run(dy, x, factors, kept, with_input, with_bias)


def hand_out(
    found: Sequence[Tensor],
    factors: Sequence[Tensor],
    bias_dtypes: Sequence[torch.dtype | None],
    linears: int,
    with_input: bool,
) -> Gradients:
    """Split the result of ``all_gradients`` into the gradient of x and that of each factor and bias, each in its own dtype."""
    length = len(factors) // linears
    parts = [[own] if linears == 1 else own.chunk(linears) for own in found[: len(found) - with_input]]
    of_factors = [parts[index % length][index // length] for index in range(len(factors))]
    of_factors = [part if part.dtype == factor.dtype else part.to(factor.dtype) for part, factor in zip(of_factors, factors, strict=True)]
    of_biases: list[Tensor | None] = [None] * len(bias_dtypes)
    if len(parts) > length:
        of_biases = [None if dtype is None else part.to(dtype) for part, dtype in zip(parts[length], bias_dtypes, strict=True)]
    return found[-1] if with_input else None, of_factors, of_biases


def layer_gradients(
    dy: Tensor,  # shape: (*batch, linears * out_features)
    x: Tensor | None,  # shape: (*batch, in_features), None where no factor needs a gradient
    factors: Sequence[Tensor],
    bias_dtypes: Sequence[torch.dtype | None],
    linears: int,
    mode: str,
    needs_x: bool,
    of_all: Callable[..., list[Tensor]],
    of_input: Callable[..., Tensor],
    kept: Sequence[Tensor] = (),
) -> Gradients:
    """Gradients of x, of the factors and of the biases, those that are needed, by the two functions or operators given.

    Args:
        bias_dtypes: one a bias, None for a bias that needs no gradient.
        kept: see ``all_gradients``.
    """
    if x is not None:
        found = of_all(dy, x, factors, kept, linears, mode, needs_x, any(bias_dtypes))
        return hand_out(found, factors, bias_dtypes, linears, needs_x)
    dx = of_input(dy, factors, linears, mode) if needs_x else None
    parts = dy.reshape(-1, dy.shape[-1]).chunk(linears, dim=1)
    sums = [None if dtype is None else part.sum(0, dtype=dtype) for part, dtype in zip(parts, bias_dtypes, strict=False)]
    return dx, [None] * len(factors), sums


def chain_for(factors: tuple[Tensor, ...], linears: int, mode: str, device_index: int, rows: int) -> Chain:
    """The kernels for factors of these shapes; the same object as long as the autotuned choices stay the same."""
    shapes = tuple(factor.shape for factor in factors[: len(factors) // linears])
    key = (shapes, mode, linears, device_index, rows_bucket(rows))
    found = _chains.get(key)
    if found is None:
        architecture = Architecture(tuple(Pattern(*shape) for shape in shapes))
        found = _chains[key] = Chain(architecture, mode, linears, device_index, rows)
    return found


def forget_chains() -> None:
    """Choose kernels anew at the next call, after the table of configurations has changed."""
    _chains.clear()
