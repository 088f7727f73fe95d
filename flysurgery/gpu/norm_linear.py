"""Linears of one architecture behind a layer norm, all in one launch, with their registered operator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from flysurgery.factors import architecture_of, ks_einsum
from flysurgery.gpu.fused import FusedLinear, fused_reason
from flysurgery.gpu.modes import dtype_of
from flysurgery.gpu.obstacles import shared_limit_of
from flysurgery.gpu.registered import Operator, rows_like
from flysurgery.gpu.table import TunedCase, rows_bucket, tuned_config
from flysurgery.gpu.tuning_record import meet
from flysurgery.gpu.weight_cache import derived_for_launch
from flysurgery.patterns import Architecture

NORM_LINEAR = "norm_linear"


@lru_cache(maxsize=4096)
def norm_linear_obstacle(architecture: Architecture, mode: str, linears: int, device_index: int) -> str | None:
    """Why no single launch computes this many linears of an architecture and the norm before them; None where one does."""
    return fused_reason(architecture, mode, linears, shared_limit_of(device_index), norm=True)


class NormLinears:
    """The kernel of some linears and the norm before them, as autotuning sees it."""

    def __init__(self, architecture: Architecture, mode: str, linears: int, device_index: int, rows: int) -> None:
        self.architecture, self.mode, self.linears, self.device_index = architecture, mode, linears, device_index
        fields = tuned_config(NORM_LINEAR, architecture, mode, linears, device_index, rows)
        config = FusedLinear.tuned(architecture, mode, linears, fields, norm=True, device_index=device_index) if fields else None
        self.kernel = FusedLinear(architecture, mode, linears, norm=True, config=config, device_index=device_index)

    def cases(self, rows: int) -> list[TunedCase]:
        """The cases to autotune for calls with this many rows."""
        return [TunedCase(torch.cuda.get_device_name(self.device_index), NORM_LINEAR, self.architecture, self.mode, self.linears, rows)]


@lru_cache(maxsize=256)
def _norm_linears(shapes: tuple[torch.Size, ...], mode: str, linears: int, device_index: int, bucket: int) -> NormLinears:
    return NormLinears(Architecture.of(*shapes), mode, linears, device_index, bucket)


def forget_norm_linears() -> None:
    """Let the next call choose kernels again, after the table of configurations has changed."""
    _norm_linears.cache_clear()


def run_norm_linear(
    x: Tensor,  # shape: (*batch, in_features)
    weight: Tensor | None,  # shape: (in_features,)
    bias: Tensor | None,  # shape: (in_features,)
    eps: float,
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left and right; of several linears one after the other
    biases: Sequence[Tensor],  # shapes: (out_features,), one a linear, or none
    linears: int,
    activation: str,
    mode: str,
) -> Tensor:  # shape: (*batch, linears * out_features)
    """The linears' activated outputs for the normalized rows, side by side, in one launch on the current stream.

    The norm's weight is multiplied into the right factors. Its bias is multiplied by the factors and added to the biases. Both happen
    before rounding.

    Raises:
        BackendError: no kernel runs these factors; ``norm_linear_obstacle`` tells beforehand.
    """
    device_index = x.device.index
    shapes, rows = (factors[0].shape, factors[1].shape), x.numel() // x.shape[-1]
    found = _norm_linears(shapes, mode, linears, device_index, rows_bucket(rows))
    meet(found, x)
    sources = (*factors, *biases, *[part for part in (weight, bias) if part is not None])

    def make() -> tuple[Tensor, ...]:
        pairs, offset = fold([(factors[2 * n], factors[2 * n + 1]) for n in range(linears)], biases, weight, bias)
        return found.kernel.pack(pairs), with_sums(offset, pairs, dtype_of(mode))

    (image, offset), early = derived_for_launch((found, weight is None, bias is None, len(biases)), sources, make)
    return found.kernel.run(x, image, offset, activation=activation, eps=eps, early=early)


def fold(
    pairs: Sequence[tuple[Tensor, Tensor]],  # each: (left factor, right factor), shapes (a, b, c, d)
    biases: Sequence[Tensor],  # shapes: (out_features,), one a linear, or none
    weight: Tensor | None,  # shape: (in_features,)
    shift: Tensor | None,  # shape: (in_features,)
) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:  # shape of the latter: (linears * out_features,)
    """Factors and biases that give for a normalized row what the linears give for the row times ``weight`` plus ``shift``.

    The results are float64, to be rounded once. The biases are None where there is nothing to add.
    """
    pairs = [(left.detach().double(), right.detach().double()) for left, right in pairs]
    a, _, c, d = pairs[0][1].shape
    offsets = [bias.detach().double() for bias in biases]
    if shift is not None:
        sent = [ks_einsum(ks_einsum(shift.detach().double()[None], right), left)[0] for left, right in pairs]
        offsets = [offset + bias for offset, bias in zip(sent, offsets, strict=True)] if offsets else sent
    if weight is not None:
        pairs = [(left, right * weight.detach().double().view(a, 1, c, d)) for left, right in pairs]
    return pairs, torch.cat(offsets) if offsets else None


def with_sums(
    offset: Tensor | None,  # shape: (linears * out_features,)
    pairs: Sequence[tuple[Tensor, Tensor]],  # each: (left factor, right factor), shapes (a, b, c, d)
    dtype: torch.dtype,
) -> Tensor:  # shape: (2 * linears * out_features,)
    """What the kernel adds to its outputs behind a norm: the bias, and the sum of each output's weights, rounded as the kernel has them."""
    rounded = [(left.to(dtype).double(), right.to(dtype).double()) for left, right in pairs]
    ones = [right.new_ones(1, right.shape[0] * right.shape[2] * right.shape[3]) for _, right in rounded]
    sums = torch.cat([ks_einsum(ks_einsum(one, right), left)[0] for one, (left, right) in zip(ones, rounded, strict=True)])
    return torch.cat((torch.zeros_like(sums) if offset is None else offset, sums)).to(dtype)


norm_linear_operator = Operator(
    "norm_linear(Tensor x, Tensor? weight, Tensor? bias, float eps, Tensor[] factors, Tensor[] biases, int linears, str activation, "
    "str mode) -> Tensor",
    run_norm_linear,
    lambda x, given: rows_like(x, given.linears * architecture_of(given.factors[:2]).out_features),
)
