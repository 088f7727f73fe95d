"""Several linear layers that read the same x, such as q, k and v."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flysurgery.factors import architecture_of
from flysurgery.ops.backend import GroupRunner
from flysurgery.ops.dispatch import choose
from flysurgery.ops.multiply import ks_linear
from flysurgery.ops.problem import problem_of
from flysurgery.ops.ways import decided
from flysurgery.torch_state import autocast_dtype


def ks_linear_group(
    x: Tensor,  # shape: (*batch, in_features)
    linears: Sequence[Sequence[Tensor]],  # each: factors left to right, shapes (a, b, c, d)
    biases: Sequence[Tensor | None],  # shapes: (out_features,), one for each linear
    *,
    backend: str | None = None,
) -> Tensor:  # shape: (*batch, sum of all out_features)
    """Apply linear layers to the same x and join their outputs on the last dimension.

    Equal to ``torch.cat([ks_linear(x, factors, bias) ...], -1)``. Where all have the same architecture and the chosen
    backend multiplies them together, as the CUDA kernels do, one launch computes all of them and reads x once.

    Raises:
        PatternError, BackendError: as ``ks_linear``.
    """
    factors = [factor for linear in linears for factor in linear]
    present = [bias for bias in biases if bias is not None]
    asked = ("group", backend, *map(len, linears), *[bias is None for bias in biases])
    run = decided(lambda: _decide(x, linears, biases, backend), (x, *factors, *present), *asked)
    if run is None:
        return torch.cat([ks_linear(x, own, bias, backend=backend) for own, bias in zip(linears, biases, strict=True)], dim=-1)
    return run(x, factors, present)


def _decide(x: Tensor, linears: Sequence[Sequence[Tensor]], biases: Sequence[Tensor | None], backend: str | None) -> GroupRunner | None:
    """The function that runs them in one launch; None where no backend has one."""
    present = [bias for bias in biases if bias is not None]
    if len(linears) == 1 or len(present) not in (0, len(linears)) or x.device.type != "cuda":
        return None
    dtype = autocast_dtype("cuda") if x.dtype != torch.float64 else None
    architecture = architecture_of(linears[0])
    weights = [*(factor for linear in linears for factor in linear), *present]
    alike = all(tensor.device == x.device and (dtype is not None or tensor.dtype == x.dtype) for tensor in weights)
    same = all(architecture_of(linear) == architecture for linear in linears[1:])
    if not (alike and same and x.dim() and x.shape[-1] == architecture.in_features):
        return None
    if any(tuple(bias.shape) != (architecture.out_features,) for bias in present):
        return None
    problem = problem_of(x, linears[0], biases[0], dtype, beside=weights)
    chosen = choose(problem, backend)
    if chosen.group_obstacle(problem, len(linears)) is not None:
        return None
    return chosen.group_runner(problem, len(linears))
