"""Linears behind a layer norm: what is computed, and which launches compute it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from flysurgery.gpu.factor_by_factor import run_wide_group
from flysurgery.gpu.parts import Dense, FusedFactors, Linear, Norm, wrong_norm, wrong_size
from flysurgery.ops.as_dense import side_by_side
from flysurgery.ops.multiply import ks_linear_group
from flysurgery.ops.one_launch import (
    alike,
    epilogue_reason,
    few_rows_linear,
    fused_norm_linear,
    in_one_launch,
    like,
    linear_epilogue,
    multiplied,
    norm_reason,
    normed,
    rows_of,
    takes_few_rows,
)
from flysurgery.ops.ways import Stage, Stages
from flysurgery.ops.wide import GROUP_LAUNCHES, takes_group
from flysurgery.torch_state import tf32_allowed


class NormLinears(NamedTuple):
    """The outputs of linears for ``norm(x)``, side by side; x: (batch..., in_features).

    Few rows, and linears that the fused kernel takes with their norm, need one launch. Wide layers, where that is faster, need one for
    each factor and one for the norm's moments. Otherwise the norm has a launch, and linears of one architecture have one together, by the
    backend that ``ks_linear`` chooses. Linears that differ, some of them dense, are multiplied out once and have one dense product
    together. PyTorch makes dense products, except in float32, where a kernel does so on tensor cores, by pairs of fp16.
    """

    norm: Norm
    group: Sequence[Linear]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.norm.tensors, *[part for member in self.group for part in member.tensors])

    @property
    def form(self) -> tuple[Hashable, ...]:
        return "norm_linear", self.norm.form, *[member.form for member in self.group]

    def wrong(self, x: Tensor) -> str | None:
        reasons = (wrong_size(x, member) for member in self.group)
        return next(filter(None, reasons), None) or wrong_norm(self.norm, self.group[0].sizes[0])

    def stages(self, x: Tensor) -> Stages | str:
        norm, group = self
        if takes_few_rows(x, group, norm):
            return (Stage(("norm and linear",), lambda y, x, given: few_rows_linear(y, given.norm, given.group)),)
        few = takes_few_rows(x, group)
        factors = [member for member in group if isinstance(member, FusedFactors)]
        obstacle = norm_reason(x, norm, group[0].sizes[0])
        if obstacle is not None:
            return obstacle
        before = Stage(("norm",), lambda y, x, given: normed(y, given.norm))
        if few:
            return before, Stage(("linear",), lambda y, x, given: few_rows_linear(y, None, given.group))
        if len(group) > 1 and len(factors) < len(group):
            return before, Stage(("linear",), lambda y, x, given: _multiplied(y, [side_by_side(given.group, y.dtype)]))
        together = in_one_launch(x, factors)
        if alike(factors) and takes_group(x, factors, together):
            return (Stage(GROUP_LAUNCHES, lambda y, x, given: like(x, run_wide_group(rows_of(x), given.norm, given.group))),)
        if together:
            return (Stage(("norm and linear",), lambda y, x, given: fused_norm_linear(y, given.norm, given.group, "none")),)
        return before, Stage(("linear",), lambda y, x, given: _multiplied(y, given.group))

    def plainly(self, x: Tensor) -> Tensor:
        outputs = [multiplied(plain_norm(x, self.norm), member) for member in self.group]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def plain_norm(x: Tensor, norm: Norm | Callable[[Tensor], Tensor] | None) -> Tensor:
    """The norm of x by PyTorch or by its own module; x itself where there is none."""
    if isinstance(norm, Norm):
        return functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    return x if norm is None else norm(x)


def _multiplied(x: Tensor, group: Sequence[Linear]) -> Tensor:
    """One linear, or factors side by side."""
    if len(group) > 1:
        factors = [member for member in group if isinstance(member, FusedFactors)]
        return ks_linear_group(x, [member.factors for member in factors], [member.bias for member in factors])
    (linear,) = group
    by_pairs = isinstance(linear, Dense) and x.dtype == torch.float32 and not tf32_allowed()
    return linear_epilogue(x, linear) if by_pairs and epilogue_reason(x, linear) is None else multiplied(x, linear)
