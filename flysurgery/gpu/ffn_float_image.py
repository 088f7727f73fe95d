"""The weights of a feed-forward block of float32 as the kernel reads them: powers of two, then panels in the order of use."""

from __future__ import annotations

import torch
from torch import Tensor

from flysurgery.factors import ks_einsum
from flysurgery.gpu.ffn_float_tiling import BOUND_EXPONENT, HEADER_BYTES, FloatFfnTiling
from flysurgery.gpu.ffn_image import in_turns, padded, panel_indices, take, with_floats

_WEIGHT_EXPONENT = 11
"""Scaled weights have their largest entry in [2^10, 2^11), so that the low parts are precise."""


def pack_float_ffn(
    tile: FloatFfnTiling,
    factors: tuple[Tensor, Tensor, Tensor, Tensor],  # in the order in which x meets them, shapes (a, b, c, d)
    biases: tuple[Tensor | None, Tensor | None],  # of the hidden units, of the outputs
    norm: tuple[Tensor | None, Tensor | None],  # weight and bias, shapes: (in_features,)
    scale: Tensor | None,  # shape: (out_features,)
) -> Tensor:  # shape: (bytes,), uint8
    """Build the image of one block by torch operations only, on the factors' device.

    The norm's weight is multiplied into the first factor and its bias is multiplied by the first two, in float64.
    """
    first, second, third, last = (factor.detach().double() for factor in factors)
    weight, shift = (None if part is None else part.detach().double() for part in norm)
    hidden_bias, out_bias = (
        first.new_zeros(factor.out_features) if bias is None else bias.detach().double()
        for factor, bias in zip(tile.factors[1::2], biases, strict=True)
    )
    if shift is not None:
        hidden_bias = hidden_bias + ks_einsum(ks_einsum(shift[None], first), second)[0]
    if weight is not None:
        first = first * weight.view(tile.factors[0].a, 1, tile.factors[0].c, 1)

    largest = _largest(first, second, third, hidden_bias)
    made = [_WEIGHT_EXPONENT - _exponent(factor) for factor in (first, second, third, last)]
    u, h, v = (BOUND_EXPONENT - _exponent(values) for values in largest)
    fits = torch.stack([u - made[0] - tile.normalized_exponent, -u - made[1], h, v - h - made[2], -v - made[3]])
    header = torch.ldexp(torch.ones_like(fits, dtype=torch.float32), fits)

    indices, (hidden_columns, out_columns) = panel_indices(tile)
    weights = [
        _images(take(torch.ldexp(factor, exponent).float(), index), tile.images)
        for factor, exponent, index in zip((first, second, third, last), made, indices, strict=True)
    ]
    ends = [take(part.detach().float(), out_columns) for part in (out_bias, scale) if part is not None]
    down = with_floats(tile, weights[2], take(hidden_bias.float(), hidden_columns))
    panels = [
        padded(weights[0], tile.stride),
        in_turns(padded(weights[1], tile.stride).view(len(down), -1, tile.stride), down),
        with_floats(tile, weights[3], torch.cat(ends, dim=1)),
    ]
    return torch.cat([padded(header.view(torch.uint8), HEADER_BYTES), *(value.flatten() for value in panels)])


def _largest(first: Tensor, second: Tensor, third: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds of the magnitudes of the first factor's outputs, the hidden units and the third factor's outputs.

    The length of a normalized row is at most the root of its size. So a weighted sum of the row is at most that times the length of the
    weights. An activation does not increase magnitudes.
    """
    a, _, c, d = first.shape
    rows = ks_einsum(torch.eye(a * c * d, device=first.device, dtype=first.dtype), first)
    length = (a * c * d) ** 0.5
    hidden = ks_einsum(rows, second).norm(dim=0) * length + bias.abs()
    return rows.norm(dim=0) * length, hidden, ks_einsum(hidden[None], third.abs())[0]


def _exponent(values: Tensor) -> Tensor:
    """The least power of two above all magnitudes."""
    return torch.frexp(values.abs().amax()).exponent


def _images(values: Tensor, images: int) -> Tensor:  # shapes: (panels, elements) -> (panels, bytes)
    """The high halves; for pairs, followed by the low halves."""
    high = values.half()
    return torch.cat([high, (values - high.float()).half()][:images], dim=1).view(torch.uint8)
