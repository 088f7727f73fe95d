"""The weights of a fused feed-forward block, of halves or of float32, as the kernels read them: panels in the order of use."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from flysurgery.factors import ks_einsum
from flysurgery.gpu.ffn_float_tiling import BOUND_EXPONENT, HEADER_BYTES, FloatFfnTiling
from flysurgery.gpu.ffn_tiling import HIDDEN_UNIT, OUT_UNIT, FfnTiling, block_order, tiles_of
from flysurgery.gpu.image import in_cores, places_of
from flysurgery.gpu.modes import in_halves
from flysurgery.patterns import Pattern


@lru_cache(maxsize=16)
def panel_indices(tile: FfnTiling) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, np.ndarray]]:
    """Where the elements of the panels come from.

    Returns for each of the four factors an int32 array of shape ``(panels, elements)`` that indexes the flattened factor,
    -1 for zeros. Then for the two biases, of the hidden units and of the outputs,
    arrays of shape ``(panels, columns)``.
    """
    second, third, hidden_bias = _middle(tile)
    last, out_bias = _last(tile)
    return (_first(tile), second, third, last), (hidden_bias, out_bias)


def input_order(block: int, vector: int) -> np.ndarray:
    """Which column of a block of x stands at each place k: a lane's neighbours, four a k16 step."""
    k = np.arange(block)
    step, place = k // 16, k % 16
    steps = vector // 4  # that one vector of a lane feeds
    return step // steps * 4 * vector + place % 8 // 2 * vector + step % steps * 4 + place // 8 * 2 + place % 2


def _first(tile: FfnTiling) -> np.ndarray:
    factor = tile.factors[0]
    q = input_order(factor.c, tile.vector)
    panels = []
    for block in range(factor.a):
        p = np.array(block_order(factor, block, tile.factors[1].d))
        panels += np.split(places_of(factor, block, p[None, :], q[:, None], 0), tile.parts[0])
    return in_cores(panels)


def _middle(tile: FfnTiling) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    second, third = tile.factors[1:3]
    inputs = [_inputs(tile.factors[0], second, steps, cls) for cls, steps in enumerate(tile.middle_steps)]
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
    factor = tile.factors[3]
    inputs = [_inputs(tile.factors[2], factor, steps, cls) for cls, steps in enumerate(tile.last_steps)]
    n = np.arange(tile.columns)
    run_tile, column = n // 8 % tile.run, n % 8  # a lane holds two columns of each tile of a run, side by side in memory
    held = run_tile * 2 + column % 2
    within = n // (8 * tile.run) * (8 * tile.run) + (held // tile.span * 4 + column // 2) * tile.span + held % tile.span
    panels, bias = [], []
    for start in range(0, factor.b, tile.columns):
        for cls in range(factor.d):
            p = start + within
            panels += np.split(places_of(factor, 0, p[None, :], inputs[cls][:, None], cls), tile.parts[3])
            bias.append(p * factor.d + cls)
    return in_cores(panels), np.stack(bias)


def _inputs(before: Pattern, factor: Pattern, steps: list[tuple[int, int]], cls: int) -> np.ndarray:
    """The input q of a class at each place k of its steps, -1 where a tile holds another class or nothing."""
    order = np.concatenate([np.array(block_order(before, block, factor.d)) for block in range(before.a)])
    width = tiles_of(before) * 8
    inner = np.where(order >= 0, np.arange(len(order)) // width * before.b + order, -1)
    inner = np.where(inner % factor.d == cls, np.where(order >= 0, inner // factor.d, -1), -1)
    padded = np.concatenate([inner, np.full(8, -1)]).reshape(-1, 8)  # tile -1 is empty
    return padded[np.array(steps).reshape(-1)].reshape(-1)


def pack_ffn(
    tile: FfnTiling,
    factors: tuple[Tensor, Tensor, Tensor, Tensor],  # in the order in which x meets them, shapes (a, b, c, d)
    biases: tuple[Tensor | None, Tensor | None],  # of the hidden units, of the outputs
    norm: tuple[Tensor | None, Tensor | None],  # weight and bias, shapes: (in_features,)
    scale: Tensor | None,  # shape: (out_features,)
    half: torch.dtype,
) -> Tensor:  # shape: (bytes,), uint8
    """Build the image of one block by torch operations only, on the factors' device.

    The norm's weight is multiplied into the first factor and its bias sent through the first two, in float32. Biases of the hidden
    units are divided by ``HIDDEN_UNIT``, biases of the outputs by ``OUT_UNIT``, and the scale is multiplied by it. The scale stays
    apart, in float32.
    """
    wide, hidden_bias, out_bias = _with_norm(tile, factors, biases, norm, torch.float32)
    ends = [hidden_bias / HIDDEN_UNIT, out_bias / OUT_UNIT, *([] if scale is None else [scale.detach().float() * OUT_UNIT])]
    halves = torch.cat([factor.reshape(-1) for factor in wide]).to(half).view(torch.int16)
    values = torch.cat([halves.new_zeros(1), halves, torch.cat(ends).view(torch.int16)])
    return values.index_select(0, _places(tile, scale is not None, halves.device)).view(torch.uint8)


def _with_norm(
    tile: FfnTiling,
    factors: tuple[Tensor, Tensor, Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    norm: tuple[Tensor | None, Tensor | None],
    dtype: torch.dtype,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Factors and biases, zeros for missing ones, into which the norm's weight and bias are multiplied."""
    first, second, *others = (factor.detach().to(dtype) for factor in factors)
    weight, shift = (None if part is None else part.detach().to(dtype) for part in norm)
    hidden_bias, out_bias = (
        first.new_zeros(factor.out_features) if bias is None else bias.detach().to(dtype)
        for factor, bias in zip(tile.factors[1::2], biases, strict=True)
    )
    if shift is not None:
        hidden_bias = hidden_bias + ks_einsum(ks_einsum(shift[None], first), second)[0]
    if weight is not None:
        first = first * weight.view(tile.factors[0].a, 1, tile.factors[0].c, 1)
    return [first, second, *others], hidden_bias, out_bias


@lru_cache(maxsize=64)
def _places(tile: FfnTiling, scaled: bool, device: torch.device) -> Tensor:  # shape: (halves,), int32
    """Where each half of an image stands among the values that ``pack_ffn`` puts side by side: a zero, weights, then floats."""
    indices, (hidden_columns, out_columns) = panel_indices(tile)
    starts = np.cumsum([1, *[factor.nnz for factor in tile.factors]]).tolist()
    first, second, third, last = (_shifted(index, start) for index, start in zip(indices, starts[:4], strict=True))
    outputs = tile.factors[3].out_features
    bias = starts[4] + 2 * tile.factors[1].out_features
    middle = _of_floats(hidden_columns, starts[4])
    ends = [_of_floats(out_columns, start) for start in (bias, bias + 2 * outputs)[: 1 + scaled]]
    weights = [first, with_floats(second, middle), third, last]
    return _in_order(weights, torch.cat(ends, dim=1), len(middle), tile.stride // 2).int().to(device)


def _in_order(weights: list[Tensor], ends: Tensor, pieces: int, stride: int) -> Tensor:
    """All panels in the order of use, in the units of the stride, to which each is padded; ``ends`` stand behind the last factor's.

    The second factor's panels of the next piece of hidden units stand before the third factor's of the present one.
    """
    first, up, down, last = (padded(panels, stride) for panels in (*weights[:3], with_floats(weights[3], ends)))
    up, down = up.view(pieces, -1, stride), down.view(pieces, -1, stride)
    turns = torch.cat([up[1:], down[:-1]], dim=1)
    return torch.cat([panels.flatten() for panels in (first, up[0], turns, down[-1], last)])


def _shifted(index: np.ndarray, start: int) -> Tensor:
    """Places ``index`` behind ``start``; 0 where the index is -1."""
    return torch.from_numpy(np.where(index < 0, 0, index + start)).long()


def _of_floats(index: np.ndarray, start: int) -> Tensor:  # shapes: (panels, columns) -> (panels, 2 * columns)
    """The places of both halves of floats, of which the first begins at ``start``; 0 where the index is -1."""
    pairs = np.stack([2 * index, 2 * index + 1], axis=-1).reshape(len(index), -1)
    return _shifted(np.where(pairs < 0, -1, pairs), start)


def take(values: Tensor, index: np.ndarray) -> Tensor:
    """Values at indices into all of them, in the shape of the indices; zero where an index is -1."""
    flat = torch.cat([values.reshape(-1), values.new_zeros(1)])
    return flat[torch.from_numpy(index).to(values.device, torch.int64)]  # -1 takes the zero at the end


def with_floats(weights: Tensor, floats: Tensor) -> Tensor:  # shapes: (panels, elements), (products, floats) -> (panels, all of both)
    """Panels of products, each with the product's floats behind its weights."""
    return torch.cat([weights, floats.repeat_interleave(len(weights) // len(floats), dim=0)], dim=1)


def padded(panels: Tensor, stride: int) -> Tensor:
    """Panels with zeros behind them up to a stride, on the last dimension."""
    return torch.nn.functional.pad(panels, (0, stride - panels.shape[-1]))


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
    wide, hidden_bias, out_bias = _with_norm(tile, factors, biases, norm, torch.float64)
    largest = _largest(wide, hidden_bias)
    made = [_WEIGHT_EXPONENT - _exponent(factor) for factor in wide]
    u, h, v = (BOUND_EXPONENT - _exponent(values) for values in largest)
    fits = torch.stack([u - made[0] - tile.normalized_exponent, -u - made[1], h, v - h - made[2], -v - made[3]])
    header = torch.ldexp(torch.ones_like(fits, dtype=torch.float32), fits)

    indices, (hidden_columns, out_columns) = panel_indices(tile)
    weights = [
        torch.cat(in_halves(take(torch.ldexp(factor, exponent).float(), index), tile.images), dim=1).view(torch.uint8)
        for factor, exponent, index in zip(wide, made, indices, strict=True)
    ]
    ends = [take(part.detach().float(), out_columns) for part in (out_bias, scale) if part is not None]
    middle, end = (part.view(torch.uint8) for part in (take(hidden_bias.float(), hidden_columns), torch.cat(ends, dim=1)))
    weights[2] = with_floats(weights[2], middle)
    return torch.cat([padded(header.view(torch.uint8), HEADER_BYTES), _in_order(weights, end, len(middle), tile.stride)])


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
    return rows.norm(dim=0) * length, hidden, ks_einsum(hidden[None], third.abs())[0]


def _exponent(values: Tensor) -> Tensor:
    """The least power of two above all magnitudes."""
    return torch.frexp(values.abs().amax()).exponent
