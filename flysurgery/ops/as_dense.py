"""Linears that share x as one dense matrix and one bias, with a layer scale behind them; and the way back for their gradients."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flysurgery.gpu.operands import Dense, FusedFactors, Linear, present
from flysurgery.gpu.weight_cache import derived
from flysurgery.gpu.weight_space import factor_gradients, multiplied_out
from flysurgery.ops.one_launch import alike

Group = Sequence[Linear]


class AsDense(NamedTuple):
    """``weight`` and ``bias``, scaled and in the dtype of x. ``matrix`` is the weight before: float32, or as the linears have it."""

    weight: Tensor  # shape: (sum of all out_features, in_features)
    bias: Tensor | None  # shape: (sum of all out_features,)
    matrix: Tensor | None  # shape: (sum of all out_features, in_features); None where there is no scale

    def __call__(self, x: Tensor) -> Tensor:  # shapes: (rows, in_features) -> (rows, sum of all out_features)
        """The linears' outputs, side by side."""
        weight, bias, _ = self
        return x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())


def as_dense(group: Group, scale: Tensor | None, dtype: torch.dtype) -> AsDense:
    """Multiply factors out and put the linears side by side. No gradients."""
    bias = _bias_of(group)
    if scale is None:
        return AsDense(_matrix_of(group, dtype).to(dtype), None if bias is None else bias.to(dtype), None)
    matrix = _matrix_of(group, torch.promote_types(dtype, torch.float32))
    return AsDense((matrix * scale[:, None]).to(dtype), None if bias is None else (bias * scale).to(dtype), matrix)


def side_by_side(group: Group, dtype: torch.dtype) -> Dense:
    """The linears as one dense layer in ``dtype``, kept until a weight changes; for operators without gradients."""

    def make() -> tuple[Tensor, ...]:
        weight, bias, _ = as_dense(group, None, dtype)
        return present(weight, bias)

    tensors = tuple(tensor for member in group for tensor in member.tensors)
    weight, *bias = derived(("side by side", dtype, *[member.form for member in group]), tensors, make, inference=True)
    return Dense(weight, *bias)


def of_linears(
    of_weight: Tensor,  # shape: (sum of all out_features, in_features), float32 or wider
    of_bias: Tensor,  # shape: (sum of all out_features,), likewise
    group: Group,
    scale: Tensor | None,
    matrix: Tensor | None,  # of ``AsDense``
) -> tuple[tuple[Linear, ...], Tensor | None]:
    """The gradients of the linears and of the scale, in their dtypes, from those of the scaled weight and bias."""
    of_scale = None
    if scale is not None:
        assert matrix is not None, "a dense layer with a scale keeps it"
        bias, of_scale = _bias_of(group), (matrix * of_weight).sum(1)
        of_scale = (of_scale if bias is None else of_scale + bias * of_bias).to(scale.dtype)
        of_weight, of_bias = of_weight * scale[:, None], of_bias * scale
    sizes = [member.sizes[1] for member in group]
    biases = [
        member.bias if member.bias is None else part.to(member.bias.dtype) for member, part in zip(group, of_bias.split(sizes), strict=True)
    ]
    factors = _alike_factors(group)
    if factors is None:
        return tuple(map(_of_linear, of_weight.split(sizes), biases, group)), of_scale
    found, length = _of_factors(of_weight, factors, len(group)), len(factors) // len(group)
    return tuple(FusedFactors(found[length * n : length * (n + 1)], bias) for n, bias in enumerate(biases)), of_scale


def _matrix_of(group: Group, dtype: torch.dtype) -> Tensor:  # shape: (sum of all out_features, in_features)
    """The weights, those of factors in ``dtype``."""
    factors = _alike_factors(group)
    if factors is not None:
        return multiplied_out(factors, len(group), dtype)
    parts = [member.weight.flatten(1) if isinstance(member, Dense) else multiplied_out(member.factors, 1, dtype) for member in group]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _bias_of(group: Group) -> Tensor | None:  # shape: (sum of all out_features,)
    if all(member.bias is None for member in group):
        return None
    first = next(tensor for member in group for tensor in member.tensors)
    parts = [first.new_zeros(member.sizes[1]) if member.bias is None else member.bias for member in group]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _alike_factors(group: Group) -> list[Tensor] | None:
    """All factors, one linear's after the other's, where all linears are of one architecture; else None."""
    factors = [member for member in group if isinstance(member, FusedFactors)]
    return [factor for member in factors for factor in member.factors] if len(factors) == len(group) and alike(factors) else None


def _of_linear(of_weight: Tensor, of_bias: Tensor | None, linear: Linear) -> Linear:
    if isinstance(linear, Dense):
        return Dense(of_weight.view(linear.weight.shape).to(linear.weight.dtype), of_bias)
    return FusedFactors(_of_factors(of_weight, linear.factors, 1), of_bias)


def _of_factors(of_weight: Tensor, factors: Sequence[Tensor], linears: int) -> tuple[Tensor, ...]:
    gradients = zip(factor_gradients(of_weight, factors, linears), factors, strict=True)
    return tuple([gradient.to(factor.dtype) for gradient, factor in gradients])
