"""A whole feed-forward block in one launch, ``x + scale * down(activation(up(norm(x))))``, and its packed weights."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.factors import ks_einsum
from flysurgery.gpu.device import multiprocessors_of, shared_limit_of
from flysurgery.gpu.ffn_tiling import (
    BOUND_EXPONENT,
    HIDDEN_UNIT,
    OUT_UNIT,
    ROWS_OF_WARPGROUP,
    FfnTiling,
    FloatFfnTiling,
    block_order,
    ffn_tiling,
    tiles_of,
)
from flysurgery.gpu.fused_linear import readable, strides_of
from flysurgery.gpu.kernel import current_stream, float_bits, kernel_of
from flysurgery.gpu.modes import WEIGHT_EXPONENT, dtype_of, in_halves, mode_for
from flysurgery.gpu.operands import FusedFactors, Norm, present, sent_through
from flysurgery.gpu.recording import fresh
from flysurgery.gpu.weight_cache import derived_for_launch
from flysurgery.gpu.weight_image import HEADER_BYTES, in_cores, input_order, output_order, places_of
from flysurgery.patterns import Architecture


def ffn_obstacle(up: Architecture, down: Architecture, mode: str, norm: bool, shared_limit: int) -> str | None:
    """Why the fused kernel cannot run a block; None when it can."""
    tile = ffn_tiling(up, down, mode, norm, True, shared_limit)
    return tile if isinstance(tile, str) else None


def run_ffn(
    x: Tensor,  # shape: (rows, in_features)
    norm: Norm | None,
    up: FusedFactors,
    down: FusedFactors,
    activation: str,
    scale: Tensor | None,
    residual: bool,
) -> Tensor:  # shape: (rows, out_features)
    """Find the kernel and the packed weights, and launch it on the current stream.

    Raises:
        BackendError: the kernel cannot run this; ``ffn_obstacle`` tells beforehand.
    """
    device_index, mode, normed = x.device.index, mode_for(x), norm is not None
    tile = ffn_tiling(up.architecture, down.architecture, mode, normed, scale is not None, shared_limit_of(device_index))
    if isinstance(tile, str):
        raise BackendError(tile)
    kernel = kernel_of(tile, device_index, activation, normed, residual)
    norm = norm or Norm(None, None, 0.0)
    parts = (up.bias, down.bias, norm.weight, norm.bias, scale)
    token = "ffn", kernel, x.dtype, *[part is not None for part in parts]
    sources = present(*up.factors, *down.factors, *parts)
    (image,), early = derived_for_launch(token, sources, lambda: (pack_ffn(tile, up, down, norm, scale),))
    x, rows, units = readable(x), x.shape[0], -(-x.shape[0] // ROWS_OF_WARPGROUP)
    written = units * ROWS_OF_WARPGROUP if tile.whole_units else rows
    y = fresh((written, tile.factors[3].out_features), x.dtype, x.device)[:rows]
    if rows:
        kernel.launch(
            (min(units, multiprocessors_of(device_index)), 1, 1),
            (tile.threads, 1, 1),
            tile.shared_bytes,
            current_stream(device_index),
            *(x, image, y, rows, *strides_of(x), float_bits(norm.eps)),
            early=early,
        )
    return y


def pack_ffn(
    tile: FfnTiling,
    up: FusedFactors,
    down: FusedFactors,
    norm: Norm,
    scale: Tensor | None,  # shape: (out_features,)
) -> Tensor:  # shape: (bytes,), uint8
    """Build the image of one block by torch operations only, on the factors' device; in training a graph replays them, so they are few.

    The norm's weight is multiplied into the first factor and its bias sent through the first two, in float32, for floats in float64.
    Scales of outputs stay apart, in float32. For halves, biases of the hidden units are divided by ``HIDDEN_UNIT``, biases of the outputs
    by ``OUT_UNIT``, and the scale is multiplied by it. For floats, a header has the powers of two between scaled factors and scaled values.
    """
    wide = torch.float64 if isinstance(tile, FloatFfnTiling) else torch.float32
    weights = [factor.detach().to(wide) for factor in (*up.factors[::-1], *down.factors[::-1])]  # in the order in which x meets them
    hidden_bias, out_bias = (
        weights[0].new_zeros(factor.out_features) if layer.bias is None else layer.bias.detach().to(wide)
        for factor, layer in zip(tile.factors[1::2], (up, down), strict=True)
    )
    weights[0], sent = norm.folded_into(*weights[:2])
    hidden_bias = hidden_bias if sent is None else hidden_bias + sent
    scales = [] if scale is None else [scale.detach().float()]
    places = _places(tile, weights[0].device)
    if not isinstance(tile, FloatFfnTiling):
        halves = torch.cat([factor.reshape(-1) for factor in weights]).to(dtype_of(tile.mode)).view(torch.int16)
        ends = [hidden_bias / HIDDEN_UNIT, out_bias / OUT_UNIT, *[part * OUT_UNIT for part in scales]]
        values = torch.cat([halves.new_zeros(1), halves, torch.cat(ends).view(torch.int16)])
        return values.index_select(0, places).view(torch.uint8)
    made = [WEIGHT_EXPONENT - _exponent(factor) for factor in weights]
    u, h, v = (BOUND_EXPONENT - _exponent(values) for values in _largest(weights, hidden_bias))
    fits = torch.stack([u - made[0] - tile.normalized_exponent, -u - made[1], h, v - h - made[2], -v - made[3]])
    header = torch.ldexp(torch.ones_like(fits, dtype=torch.float32), fits).view(torch.uint8)
    scaled = torch.cat([torch.ldexp(factor, exponent).float().reshape(-1) for factor, exponent in zip(weights, made, strict=True)])
    halves = torch.cat(in_halves(scaled, tile.images)).view(torch.int16)
    ends = torch.cat([hidden_bias.float(), out_bias.float(), *scales]).view(torch.int16)
    values = torch.cat([halves.new_zeros(1), halves, ends])
    return torch.cat([_padded(header, HEADER_BYTES), values.index_select(0, places).view(torch.uint8)])


def _largest(factors: list[Tensor], bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds of the magnitudes of the first factor's outputs, the hidden units and the third factor's outputs.

    The length of a normalized row is at most the root of its size. So a weighted sum of the row is at most that times the length of the
    weights. An activation does not increase magnitudes.
    """
    first, second, third, _ = factors
    a, _, c, d = first.shape
    rows = ks_einsum(torch.eye(a * c * d, device=first.device, dtype=first.dtype), first)
    length = (a * c * d) ** 0.5
    hidden = ks_einsum(rows, second).norm(dim=0) * length + bias.abs()
    return rows.norm(dim=0) * length, hidden, sent_through(hidden, third.abs())


def _exponent(values: Tensor) -> Tensor:
    """The least power of two above all magnitudes."""
    return torch.frexp(values.abs().amax()).exponent


@lru_cache(maxsize=64)
def _places(tile: FfnTiling, device: torch.device) -> Tensor:  # shape: (halves,), int32
    """Where each half of an image stands among the values that ``pack_ffn`` puts side by side.

    These are a zero, all weights, for pairs the low halves of all weights, then floats: both biases and the scales.
    """
    second, third, hidden_columns = _middle(tile)
    last, out_columns = _last(tile)
    starts = np.cumsum([1, *[factor.nnz for factor in tile.factors]]).tolist()
    total = starts[4] - 1
    weights = [
        torch.cat([_shifted(index, start + image * total) for image in range(tile.images)], dim=1)
        for index, start in zip((_first(tile), second, third, last), starts[:4], strict=True)
    ]
    floats = 1 + tile.images * total
    bias, outputs = floats + 2 * tile.factors[1].out_features, tile.factors[3].out_features
    weights[tile.biased] = _with_floats(weights[tile.biased], _of_floats(hidden_columns, floats))
    ends = [_of_floats(out_columns, start) for start in (bias, bias + 2 * outputs)[: 1 + tile.scaled]]
    weights[3] = _with_floats(weights[3], torch.cat(ends, dim=1))
    first, up, down, last = (_padded(panels, tile.stride // 2) for panels in weights)
    # the second factor's panels of the next piece of hidden units stand before the third factor's of the present one
    up, down = (panels.view(len(hidden_columns), -1) for panels in (up, down))
    turns = torch.cat([up[1:], down[:-1]], dim=1)
    return torch.cat([panels.flatten() for panels in (first, up[0], turns, down[-1], last)]).int().to(device)


def _first(tile: FfnTiling) -> np.ndarray:  # shape: (panels, elements); indices into the flattened factor, -1 for zeros
    factor = tile.factors[0]
    q = input_order(factor.c, tile.vector)
    panels = []
    for block in range(factor.a):
        p = np.array(block_order(factor, block, tile.factors[1].d))
        panels += np.split(places_of(factor, block, p[None, :], q[:, None], 0), tile.parts[0])
    return in_cores(panels)


def _middle(tile: FfnTiling) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Panels of the second and the third factor, and for each piece the hidden unit at each column."""
    second, third = tile.factors[1:3]
    inputs = _inputs(tile, 1)
    ups, downs, bias = [], [], []
    for block in range(third.a):
        outputs = np.array(block_order(third, block, tile.factors[3].d))
        for cls in range(second.d):
            for piece in range(tile.pieces):
                units = piece * tile.hidden + np.arange(tile.hidden)
                p = block * (third.c // second.d) + units
                ups += np.split(places_of(second, 0, p[None, :], inputs[cls][:, None], cls), tile.parts[1])
                downs += np.split(places_of(third, block, outputs[None, :], (units * second.d + cls)[:, None], 0), tile.parts[2])
                bias.append(p * second.d + cls)
    return in_cores(ups), in_cores(downs), np.stack(bias)


def _last(tile: FfnTiling) -> tuple[np.ndarray, np.ndarray]:
    """Panels of the last factor, and the output at each column of each product."""
    factor, inputs = tile.factors[3], _inputs(tile, 3)
    within = output_order(tile.columns, tile.run, tile.span)
    panels, bias = [], []
    for start in range(0, factor.b, tile.columns):
        for cls in range(factor.d):
            p = start + within
            panels += np.split(places_of(factor, 0, p[None, :], inputs[cls][:, None], cls), tile.parts[3])
            bias.append(p * factor.d + cls)
    return in_cores(panels), np.stack(bias)


def _inputs(tile: FfnTiling, place: int) -> list[np.ndarray]:
    """For each class of a factor, the input q at each place k of its steps, -1 where a tile holds another class or nothing."""
    before, factor = tile.factors[place - 1 : place + 1]
    order = np.concatenate([np.array(block_order(before, block, factor.d)) for block in range(before.a)])
    inner = np.where(order >= 0, np.arange(len(order)) // (tiles_of(before) * 8) * before.b + order, -1)
    found = []
    for cls, steps in enumerate(tile.steps(place)):
        own = np.where((order >= 0) & (inner % factor.d == cls), inner // factor.d, -1)
        tiles = np.concatenate([own, np.full(8, -1)]).reshape(-1, 8)  # tile -1 is empty
        found.append(tiles[np.array(steps).reshape(-1)].reshape(-1))
    return found


def _shifted(index: np.ndarray, start: int) -> Tensor:
    """Places ``index`` behind ``start``; 0 where the index is -1."""
    return torch.from_numpy(np.where(index < 0, 0, index + start)).long()


def _of_floats(index: np.ndarray, start: int) -> Tensor:  # shapes: (panels, columns) -> (panels, 2 * columns)
    """The places of both halves of floats, of which the first begins at ``start``."""
    return torch.from_numpy(start + np.stack([2 * index, 2 * index + 1], axis=-1).reshape(len(index), -1)).long()


def _with_floats(weights: Tensor, floats: Tensor) -> Tensor:  # shapes: (panels, elements), (products, floats) -> (panels, all of both)
    """Panels of products, each with the product's floats behind its weights."""
    return torch.cat([weights, floats.repeat_interleave(len(weights) // len(floats), dim=0)], dim=1)


def _padded(panels: Tensor, stride: int) -> Tensor:
    """Panels with zeros behind them up to a stride, on the last dimension."""
    return torch.nn.functional.pad(panels, (0, stride - panels.shape[-1]))
