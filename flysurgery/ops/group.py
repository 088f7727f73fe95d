"""Several linear layers that read the same x, such as q, k and v."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flysurgery.factors import architecture_of
from flysurgery.ops.autocast import without_autocast
from flysurgery.ops.dispatch import choose
from flysurgery.ops.multiply import ks_linear
from flysurgery.ops.problem import problem_of


def ks_linear_group(
    x: Tensor,  # shape: (*batch, in_features)
    linears: Sequence[Sequence[Tensor]],  # each: factors left to right, shapes (a, b, c, d)
    biases: Sequence[Tensor | None],  # shapes: (out_features,), one a linear
    *,
    backend: str | None = None,
) -> Tensor:  # shape: (*batch, sum of all out_features)
    """Apply linear layers to the same x and join their outputs on the last dimension.

    Equal to ``torch.cat([ks_linear(x, factors, bias) ...], -1)``. Where all have the same architecture and the chosen
    backend multiplies them together, as the CUDA kernels do, it is one launch that reads x once.

    Raises:
        PatternError, BackendError: as ``ks_linear``.
    """
    if len(linears) > 1:
        joined = _in_one_launch(x, linears, biases, backend)
        if joined is not None:
            return joined
    return torch.cat([ks_linear(x, factors, bias, backend=backend) for factors, bias in zip(linears, biases, strict=True)], dim=-1)


def _in_one_launch(x: Tensor, linears: Sequence[Sequence[Tensor]], biases: Sequence[Tensor | None], backend: str | None) -> Tensor | None:
    present = [bias for bias in biases if bias is not None]
    factors = [factor for linear in linears for factor in linear]
    if len(present) not in (0, len(linears)) or x.device.type != "cuda":
        return None
    autocast = torch.is_autocast_enabled("cuda") and x.dtype != torch.float64
    architecture = architecture_of(linears[0])
    alike = all(tensor.device == x.device and (autocast or tensor.dtype == x.dtype) for tensor in (*factors, *present))
    same = all(architecture_of(linear) == architecture for linear in linears[1:])
    if not (alike and same and x.dim() and x.shape[-1] == architecture.in_features):
        return None
    if any(tuple(bias.shape) != (architecture.out_features,) for bias in present):
        return None
    x = x.to(torch.get_autocast_dtype("cuda")) if autocast else x
    problem = problem_of(x, factors[: len(architecture)], present[0] if present else None)
    chosen = choose(problem, backend)
    if chosen.group_obstacle(problem, len(linears)) is not None:
        return None
    with without_autocast("cuda"):
        product = chosen.linear_group(x.reshape(-1, architecture.in_features), factors, present, len(linears))
    return product.reshape(*x.shape[:-1], len(linears) * architecture.out_features)
