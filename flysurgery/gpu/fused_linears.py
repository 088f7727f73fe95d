"""Linears of one architecture with what stands before and behind them, all in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flysurgery.factors import ks_einsum
from flysurgery.gpu.fused import fused_kernel
from flysurgery.gpu.modes import dtype_of
from flysurgery.gpu.parts import FusedFactors, Norm, present
from flysurgery.gpu.table import meet
from flysurgery.gpu.weight_cache import derived_for_launch


def run_fused_linears(
    x: Tensor,  # shape: (*batch, in_features)
    norm: Norm | None,
    group: Sequence[FusedFactors],  # of one architecture, with a bias each or none
    gate: int | None,
    activation: str,
    residual: Tensor | None,  # shape: (*batch, linears * out_features)
    scale: Tensor | None,  # shape: (linears * out_features,)
    mode: str,
) -> Tensor:  # shape: (*batch, linears * out_features), half of them where gated
    """``residual + activation(scale * group(norm(x)))``, the linears' outputs side by side, in one launch on the current stream.

    The norm's weight is multiplied into the right factors, its bias by the factors and added to the biases, both before rounding. Where
    ``gate`` is not None, the outputs of one linear are two halves, and the result is ``activation(gate) * value``; it is the index of the
    gate. A norm or a gate excludes ``scale``.

    Raises:
        BackendError: no kernel runs these factors; ``fused_reason`` tells beforehand.
    """
    weight, bias, eps = norm or (None, None, 0.0)
    rows, kinds = x.numel() // x.shape[-1], {"norm": norm is not None, "gated": gate is not None}
    kernel = fused_kernel(group[0].architecture, mode, len(group), rows, **kinds, device_index=x.device.index)
    meet(kernel, x)
    biases = present(*[member.bias for member in group])

    def make() -> tuple[Tensor, ...]:
        pairs, offset = [(left, right) for left, right in (member.factors for member in group)], torch.cat(biases) if biases else None
        if gate is not None:
            pairs = [(_gate_first(left, 1, gate), right) for left, right in pairs]
            offset = None if offset is None else _gate_first(offset, 0, gate)
        pairs, offset = _fold(pairs, offset, weight, bias)
        behind = _sums(pairs, dtype_of(mode)) if norm is not None else None if scale is None else scale.detach().double()
        if behind is not None:
            offset = torch.cat((torch.zeros_like(behind) if offset is None else offset, behind))
        return kernel.pack(pairs), *([] if offset is None else [offset.to(dtype_of(mode))])

    sources = present(*[part for member in group for part in member.tensors], weight, bias, scale)
    packed, early = derived_for_launch((kernel, gate, len(biases), weight is None, bias is None, scale is None), sources, make)
    image, *behind = packed
    return kernel.run(x, image, next(iter(behind), None), residual, activation, eps, scaled=scale is not None, early=early)


def _gate_first(rows: Tensor, dim: int, gate: int) -> Tensor:
    """The halves of a factor's outputs, or of a bias, the gate before the value."""
    halves = rows.detach().chunk(2, dim=dim)
    return torch.cat((halves[gate], halves[1 - gate]), dim=dim)


def _fold(
    pairs: Sequence[tuple[Tensor, Tensor]],  # each: (left factor, right factor), shapes (a, b, c, d)
    offset: Tensor | None,  # shape: (linears * out_features,)
    weight: Tensor | None,  # shape: (in_features,)
    shift: Tensor | None,  # shape: (in_features,)
) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:  # shape of the latter: (linears * out_features,)
    """Factors and offset that give for a normalized row what the linears give for the row times ``weight`` plus ``shift``.

    The results are float64, to be rounded once. The offset is None where there is nothing to add.
    """
    pairs = [(left.detach().double(), right.detach().double()) for left, right in pairs]
    a, _, c, d = pairs[0][1].shape
    offset = None if offset is None else offset.detach().double()
    if shift is not None:
        sent = torch.cat([ks_einsum(ks_einsum(shift.detach().double()[None], right), left)[0] for left, right in pairs])
        offset = sent if offset is None else sent + offset
    if weight is not None:
        pairs = [(left, right * weight.detach().double().view(a, 1, c, d)) for left, right in pairs]
    return pairs, offset


def _sums(
    pairs: Sequence[tuple[Tensor, Tensor]],  # each: (left factor, right factor), shapes (a, b, c, d)
    dtype: torch.dtype,
) -> Tensor:  # shape: (linears * out_features,)
    """The sum of each output's weights, rounded as the kernel has them: what a row's mean is multiplied with."""
    rounded = [(left.to(dtype).double(), right.to(dtype).double()) for left, right in pairs]
    ones = [right.new_ones(1, right.shape[0] * right.shape[2] * right.shape[3]) for _, right in rounded]
    return torch.cat([ks_einsum(ks_einsum(one, right), left)[0] for one, (left, right) in zip(ones, rounded, strict=True)])
