"""Linears behind a layer norm: by which launches, and why no kernel takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.device import device_obstacle
from flysurgery.ops.cuda.modes import present_mode, tf32_allowed
from flysurgery.ops.cuda.norm_linear import norm_linear_obstacle, norm_linear_operator
from flysurgery.ops.decided import decided
from flysurgery.ops.epilogue import common_obstacle, epilogue_reason, linear_epilogue, wrong_size
from flysurgery.ops.few_rows import few_rows_linear, takes_few_rows
from flysurgery.ops.group import ks_linear_group
from flysurgery.ops.multiply import ks_linear
from flysurgery.ops.normed import norm_reason, normed, wrong_norm
from flysurgery.ops.parts import Dense, FusedFactors, Linear, Norm
from flysurgery.ops.stage import Stage, Way
from flysurgery.ops.wide import takes_group, wide_group, wide_group_launches
from flysurgery.patterns import Architecture


class _Operands(NamedTuple):
    norm: Norm
    group: Sequence[Linear]


def norm_linear(
    x: Tensor,  # shape: (*batch, in_features)
    norm: Norm,
    group: Sequence[Linear],
) -> Tensor:  # shape: (*batch, sum of all out_features)
    """The linears' outputs for ``norm(x)``, side by side.

    One launch for few rows and where the fused kernel takes the linears with their norm; else one for the norm, and one for linears of
    one architecture; or, of wide layers where that is faster, one for each factor and one for the norm's moments. A dense one is
    multiplied by PyTorch, but in float32 on tensor cores, by pairs of fp16.

    Raises:
        BackendError: no kernel takes this; the message is what ``norm_linear_reason`` answers.
    """
    way = norm_linear_way(x, norm, group)
    if isinstance(way, str):
        raise BackendError(way)
    return way.run()


def norm_linear_way(x: Tensor, norm: Norm, group: Sequence[Linear]) -> Way | str:
    """How ``norm_linear`` computes this, or why no kernel takes the norm.

    Factors are multiplied by the backend that ``ks_linear`` chooses.
    """
    tensors = (x, *norm.tensors, *[part for member in group for part in member.tensors])
    asked = "norm_linear", norm.form, *[member.form for member in group]
    stages = decided(lambda: _stages(x, norm, group), tensors, *asked)
    return stages if isinstance(stages, str) else Way(stages, x, _Operands(norm, group))


def norm_linear_reason(x: Tensor, norm: Norm, group: Sequence[Linear]) -> str | None:
    """Why no kernel takes this norm; None where one does."""
    way = norm_linear_way(x, norm, group)
    return way if isinstance(way, str) else None


def _stages(x: Tensor, norm: Norm, group: Sequence[Linear]) -> tuple[Stage, ...] | str:
    """Which way the linears go behind their norm, the fastest first, or why no kernel takes it."""
    features = group[0].sizes[0]
    wrong = common_obstacle(x, (*norm.tensors, *(part for member in group for part in member.tensors)))
    wrong = wrong or next(filter(None, (wrong_size(x, member) for member in group)), None) or wrong_norm(norm, features)
    if wrong is not None:
        return wrong
    if takes_few_rows(x, group, norm):
        return (Stage(("norm and linear",), lambda y, x, given: few_rows_linear(y, given.norm, given.group)),)
    few = takes_few_rows(x, group)
    factors = [member for member in group if isinstance(member, FusedFactors)]
    if not few and len(group) > 1 and len(factors) < len(group):
        return "several linears that share x are multiplied together where all of them are factors"
    obstacle = norm_reason(norm, features, x.dtype)
    if obstacle is not None:
        return obstacle
    before = Stage(("norm",), lambda y, x, given: normed(y, given.norm))
    if few:
        return before, Stage(("linear",), lambda y, x, given: few_rows_linear(y, None, given.group))
    together = in_one_launch(x, factors)
    if _alike(factors) and takes_group(x, factors, together):
        return (Stage(wide_group_launches(), lambda y, x, given: wide_group(y, given.norm, given.group)),)
    if together:
        return (Stage(("norm and linear",), lambda y, x, given: fused_norm_linear(y, given.norm, given.group, "none")),)
    return before, Stage(("linear",), lambda y, x, given: _multiplied(y, given.group))


def _multiplied(x: Tensor, group: Sequence[Linear]) -> Tensor:
    """One linear, or factors side by side."""
    if len(group) == 1 and isinstance(group[0], Dense):
        dense = group[0]
        return linear_epilogue(x, dense) if _by_pairs(x, dense) else torch_linear(x, dense.weight, dense.bias)
    factors = [member for member in group if isinstance(member, FusedFactors)]
    if len(factors) == 1:
        return ks_linear(x, factors[0].factors, factors[0].bias)
    return ks_linear_group(x, [member.factors for member in factors], [member.bias for member in factors])


def in_one_launch(x: Tensor, group: Sequence[FusedFactors]) -> bool:
    """Whether the fused kernel takes the linears with their norm."""
    mode = present_mode(x.dtype)
    return _alike(group) and mode is not None and _norm_linear_obstacle(group[0].shapes, mode, len(group), x.device.index) is None


def _alike(group: Sequence[FusedFactors]) -> bool:
    """Whether linears are of one architecture, with a bias each or none."""
    if not group:
        return False
    shapes, biased = group[0].shapes, group[0].bias is not None
    return all(member.shapes == shapes and (member.bias is not None) == biased for member in group)


def fused_norm_linear(x: Tensor, norm: Norm, group: Sequence[FusedFactors], activation: str) -> Tensor:
    factors, biases = [factor for member in group for factor in member.factors], [m.bias for m in group if m.bias is not None]
    mode = present_mode(x.dtype)
    return norm_linear_operator(x, norm.weight, norm.bias, norm.eps, factors, biases, len(group), activation, mode)


def _by_pairs(x: Tensor, dense: Dense) -> bool:
    """Whether a dense product without an epilogue is float32, and a kernel makes it on tensor cores."""
    return x.dtype == torch.float32 and not tf32_allowed() and epilogue_reason(dense, x.dtype, x.device) is None


@torch.compiler.assume_constant_result
def _norm_linear_obstacle(shapes: tuple[tuple[int, ...], ...], mode: str, linears: int, device_index: int) -> str | None:
    return device_obstacle(device_index) or norm_linear_obstacle(Architecture.of(*shapes), mode, linears, device_index)
