"""A layer norm, linears behind it, and a linear with its residual: what is computed, and which launches compute it."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from flysurgery.gpu.dense import run_dense_moments, streamed_for
from flysurgery.gpu.factor_by_factor import run_wide_group, wide_group_obstacle
from flysurgery.gpu.modes import mode_for
from flysurgery.gpu.operands import Dense, FusedFactors, Linear, Norm, present, wrong_norm, wrong_size, wrong_vector
from flysurgery.ops.as_dense import side_by_side
from flysurgery.ops.choose_launches import Stage, Stages, reason
from flysurgery.ops.multiply import ks_linear_group
from flysurgery.ops.one_launch import (
    alike,
    epilogue_reason,
    few_rows_linear,
    fused,
    in_one_launch,
    like,
    linear_epilogue,
    multiplied,
    norm_reason,
    normed,
    rows_of,
    takes_few_rows,
)
from flysurgery.torch_state import tf32_allowed

MOMENTS = "moments"
"""The launch of a norm before factors that finds the mean and the deviation of each row."""

NARROWEST_GROUP = 768
"""From this many features on, a launch for each factor of linears that share x is faster, for few rows.

``recipes/kernel_tables.py wide`` of commit 880089d timed both ways, for few rows and many.
"""

WIDEST_TOGETHER, ROWS_TOGETHER = 768, 10
"""With at most this many features between their two factors, which lie in a warp's registers, and at least this many rows for each of these
features, linears that share x are faster in one launch.

On an H200 in fp16 q, k and v of 768 features take 11.6 us in one launch and 13.8 factor by factor (architecture of Gonon et al., 192
between, 2048 rows), 59 and 81 (25216 rows); Monarch's, 768 between, 21 and 20, 122 and 163; 1024 features (Monarch) 273 and 218.
"""


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
        obstacle = norm_reason(x, norm, group[0].sizes[0])
        if obstacle is not None:
            return obstacle
        before = Stage(("norm",), lambda y, x, given: normed(y, given.norm))
        if takes_few_rows(x, group):
            return before, Stage(("linear",), lambda y, x, given: few_rows_linear(y, None, given.group))
        factors = [member for member in group if isinstance(member, FusedFactors)]
        if len(group) > 1 and len(factors) < len(group):
            return before, Stage(("linear",), lambda y, x, given: _multiplied(y, [side_by_side(given.group, y.dtype)]))
        together = in_one_launch(x, factors)
        if alike(factors) and _takes_each_factor(x, factors, together):
            launches = MOMENTS, "norm and first factors", "second factors"
            return (Stage(launches, lambda y, x, given: like(x, run_wide_group(rows_of(x), given.norm, given.group))),)
        if together:
            return (Stage(("norm and linear",), lambda y, x, given: fused(y, given.norm, given.group)),)
        return before, Stage(("linear",), lambda y, x, given: _multiplied(y, given.group))

    def plainly(self, x: Tensor) -> Tensor:
        outputs = [multiplied(plain_norm(x, self.norm), member) for member in self.group]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def plain_norm(x: Tensor, norm: Norm | Callable[[Tensor], Tensor] | None) -> Tensor:
    """The norm of x by PyTorch or by its own module; x itself where there is none."""
    if isinstance(norm, Norm):
        return functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    return x if norm is None else norm(x)


def _takes_each_factor(x: Tensor, group: Sequence[FusedFactors], together: bool) -> bool:
    """Whether linears of one architecture are multiplied factor by factor, where a kernel takes them ``together`` or not."""
    architecture, features = group[0].architecture, x.shape[-1]
    between = max(architecture.inner_features, default=0)
    if together and between <= WIDEST_TOGETHER and x.numel() >= ROWS_TOGETHER * between * features:
        return False
    return features >= NARROWEST_GROUP and wide_group_obstacle(architecture, len(group), x.dtype, x.device.index) is None


def _multiplied(x: Tensor, group: Sequence[Linear]) -> Tensor:
    """One linear, or factors side by side."""
    if len(group) > 1:
        factors = [member for member in group if isinstance(member, FusedFactors)]
        return ks_linear_group(x, [member.factors for member in factors], [member.bias for member in factors])
    (linear,) = group
    by_pairs = isinstance(linear, Dense) and x.dtype == torch.float32 and not tf32_allowed()
    return linear_epilogue(x, linear) if by_pairs and epilogue_reason(x, linear) is None else multiplied(x, linear)


class LayerNorm(NamedTuple):
    """The norm of x: (batch..., features). Without gradients PyTorch computes it."""

    norm: Norm

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.norm.tensors

    @property
    def form(self) -> tuple[Hashable, ...]:
        return "norm", *self.norm.form

    def wrong(self, x: Tensor) -> str | None:
        return wrong_norm(self.norm, x.shape[-1])

    def stages(self, x: Tensor) -> Stages | str:
        return "a norm by itself is fused with its gradients alone"

    def plainly(self, x: Tensor) -> Tensor:
        return plain_norm(x, self.norm)


class LinearResidual(NamedTuple):
    """``residual + scale * linear(x)``, in one launch; x: (batch..., in_features)."""

    linear: Linear
    residual: Tensor  # shape: (*batch, out_features)
    scale: Tensor | None = None  # shape: (out_features,)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return present(*self.linear.tensors, self.residual, self.scale)

    @property
    def form(self) -> tuple[Hashable, ...]:
        return "linear_residual", self.linear.form, self.scale is None

    def wrong(self, x: Tensor) -> str | None:
        outputs, residual = self.linear.sizes[1], self.residual
        wrong = wrong_size(x, self.linear) or wrong_vector(self.scale, outputs, "scale")
        expected = (*x.shape[:-1], outputs)
        if wrong is None and (residual.shape != expected or residual.dtype != x.dtype):
            return f"expected a residual of shape {expected} and {x.dtype}, got {tuple(residual.shape)} and {residual.dtype}"
        return wrong

    def stages(self, x: Tensor) -> Stages | str:
        if takes_few_rows(x, (self.linear,)):
            return (Stage((), lambda y, x, given: few_rows_linear(y, None, (given.linear,), "none", given.residual, given.scale)),)
        obstacle = epilogue_reason(x, self.linear)
        return obstacle or (Stage((), lambda y, x, given: linear_epilogue(y, given.linear, "none", given.residual, given.scale)),)

    def plainly(self, x: Tensor) -> Tensor:
        y = multiplied(x, self.linear)
        return self.residual + (y if self.scale is None else y * self.scale)


def leaves_moments(x: Tensor, operation: LinearResidual) -> bool:
    """Whether the kernel of an operation can also write the moments of its result's rows, at almost no cost."""
    linear, residual, _ = operation
    if not isinstance(linear, Dense) or reason(x, operation) is not None:
        return False
    rows = residual.numel() // max(1, residual.shape[-1])
    return streamed_for(rows, *linear.sizes, mode_for(x), x.device.index) is not None


def run_with_moments(x: Tensor, operation: LinearResidual) -> tuple[Tensor, Tensor]:  # shapes: (*batch, out_features), (rows, parts, 2)
    """The result of an operation that ``leaves_moments``, and the moments of its rows, float32, for the next norm.

    A row is divided into parts of equal size. Each part's moments are its mean and the sum of the squared deviations from it.
    """
    linear, residual, scale = operation
    assert isinstance(linear, Dense), "other layers leave no moments"
    y, moments = run_dense_moments(rows_of(x), linear, rows_of(residual), scale, mode_for(x))
    return y.view(residual.shape), moments
