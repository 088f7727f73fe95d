"""Packed weights, read as the kernels read them, in float64: what each kernel would compute from them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu

from flysurgery.gpu.block_linear import BlockTiling
from flysurgery.gpu.dense_tiling import DenseTiling
from flysurgery.gpu.ffn_float_tiling import HEADER_BYTES, FloatFfnTiling
from flysurgery.gpu.ffn_image import input_order
from flysurgery.gpu.ffn_middle import MiddleTiling
from flysurgery.gpu.ffn_tiling import HIDDEN_UNIT, OUT_UNIT, FfnTiling, tiles_of
from flysurgery.gpu.image import panel_indices
from flysurgery.gpu.single import SingleFactor
from flysurgery.gpu.single_tiling import HEADER_BYTES as SINGLE_HEADER_BYTES
from flysurgery.gpu.single_tiling import SingleTiling
from flysurgery.gpu.tiling import FusedConfig, Tiling


def fused(
    x: np.ndarray, tile: Tiling, config: FusedConfig, pairs: list[list[Tensor]]
) -> np.ndarray:  # shapes: (in_features,) -> (linears * out_features,)
    """``fused_linear.cu``: weights by their indices in the image."""
    flat = [np.append(np.concatenate([pair[side].reshape(-1).numpy() for pair in pairs]), 0.0) for side in (1, 0)]
    first, second = panel_indices(tile, config)
    return _fused_second(_fused_first(x, tile, config, flat[0][first]), tile, config, flat[1][second])


def _fused_first(x: np.ndarray, tile: Tiling, config: FusedConfig, weights: np.ndarray) -> np.ndarray:  # shape: (groups, columns)
    """Groups side by side, steps of 16 elements of x as lanes hold them."""
    a, _, c, d = tile.first.factor_shape
    panels = weights.reshape(a, d // config.residues, tile.first_steps, config.residues, 2, tile.first_columns, 8)
    k = np.arange(16)
    order = k if tile.natural else k % 8 // 2 * 4 + k // 8 * 2 + k % 2
    q = 16 * np.arange(tile.first_steps)[:, None] + order
    found = np.zeros((tile.groups, tile.first_columns))
    for i in range(a):
        for j in range(d):
            taken = np.where(q < c, x[(i * c + np.minimum(q, c - 1)) * d + j], 0.0).reshape(-1, 2, 8)
            found[i * d + j] = np.einsum("shk,shnk->n", taken, panels[i, j // config.residues, :, j % config.residues])
    return found


def _fused_second(u: np.ndarray, tile: Tiling, config: FusedConfig, weights: np.ndarray) -> np.ndarray:
    """Each class reads its tiles of every group; a lane's columns lie where it stores them."""
    a, b, _, d = tile.second.factor_shape
    count = -(-b // config.panel_columns)
    panels = weights.reshape(tile.linears, a, count, d, tile.second_steps, 2, config.panel_columns, 8)
    n = np.arange(count * config.panel_columns)
    within = n % (8 * config.run)
    lane, held, span = within % 8 // 2, within // 8 * 2 + within % 2, tile.span(config)
    p = n - within + (held // span * 4 + lane) * span + held % span
    y = np.zeros((tile.linears, a, b, d))
    for linear in range(tile.linears):
        for cls, (low, tiles) in enumerate(tile.class_tiles):
            start = 8 * (linear * tile.group_tiles + low)
            read = u[:, start : start + 8 * tiles].reshape(-1)
            read = np.pad(read, (0, 16 * tile.second_steps - len(read))).reshape(-1, 2, 8)
            values = np.einsum("shk,pshnk->pn", read, panels[linear, cls // d, :, cls % d]).reshape(-1)
            y[linear, cls // d, p[p < b], cls % d] = values[p < b]
    return y.reshape(-1)


def dense(x: np.ndarray, tile: DenseTiling, image: Tensor, columns: Tensor) -> np.ndarray:  # shape: (out_features,)
    """``dense_linear.cu``: batch by batch, inputs as lanes hold them; a lane's columns lie where it stores them."""
    read = image.view(torch.bfloat16 if tile.mode == "bf16" else torch.float16).double().numpy()
    k, n = np.arange(16), np.arange(tile.columns)
    order = k % 8 // 2 * 4 + k // 8 * 2 + k % 2 if tile.element_bytes == 4 else k
    taken = x.reshape(-1, tile.batch // 16, 16)[:, :, order].reshape(-1, tile.batch // 16, 2, 8)
    panels = read.reshape(tile.out_features // tile.columns, -1, tile.planes, tile.batch // 16, 2, tile.columns, 8)
    sums = np.einsum("bskh,cbpsknh->cn", taken, panels)
    group, within = n // (8 * tile.run), n % (8 * tile.run)
    y = np.zeros_like(sums)
    y[:, group * 8 * tile.run + within % 8 // 2 * 2 * tile.run + within // 8 * 2 + within % 2] = sums
    scale, shift = columns.double().numpy()
    return y.reshape(-1) * (2.0**-13 if tile.element_bytes == 4 else 1.0) * scale + shift


def block(x: np.ndarray, mean: float, tile: BlockTiling, image: Tensor, columns: Tensor) -> np.ndarray:
    """``block_linear.cu``: a row less its mean, gathered pieces of 8, a panel a stage."""
    eights = np.concatenate([x.reshape(-1, 8), np.zeros((1, 8))])  # piece -1 is empty
    panels = image.view(torch.float16).double().numpy().reshape(tile.weight_indices.shape)
    n, run = np.arange(tile.columns), tile.run
    stored = n // (8 * run) * 8 * run + n % 8 // 2 * 2 * run + n // 8 % run * 2 + n % 2
    y = np.empty((tile.tiles, tile.columns, tile.classes))
    for t in range(tile.tiles):
        for j in range(tile.classes):
            y[t, stored, j] = np.einsum("skh,sknh->n", eights[tile.pieces[t, j]].reshape(tile.steps, 8, 8), panels[t, j])
    shifts, scales, sums = columns.double().numpy()
    return (y.reshape(-1) - mean * sums + shifts) * scales


def middle(u: np.ndarray, tile: MiddleTiling, image: Tensor, biases: Tensor) -> np.ndarray:
    """``ffn_middle.cu`` without its activation. A lane's columns of h are at once those of its operand."""
    columns, pieces = 128, (tile.classes, tile.down.tiles, tile.pieces)
    panels = image.view(torch.float16).double().numpy().reshape(*pieces, -1, 8, columns, 8)
    shifts = biases.double().numpy().reshape(*pieces, columns)
    n = np.arange(columns)
    stored = n // 32 * 32 + n % 8 // 2 * 8 + n // 8 % 4 * 2 + n % 2
    v = np.zeros((tile.down.tiles, columns))
    for j in range(tile.classes):
        stretches = np.stack([u[first : first + 64] for first in tile.places[j]]).reshape(-1, 8, 8)
        for i in range(tile.down.tiles):
            for weights, shift in zip(panels[j, i], shifts[j, i], strict=True):
                h = shift[stored] + np.einsum("skh,sknh->n", stretches, weights[: tile.stages])
                v[i, stored] += np.einsum("skh,sknh->n", h.reshape(2, 8, 8), weights[tile.stages :])
    return v.reshape(-1)


class _Panels:
    """The image of a whole feed-forward block, panel by panel in the order of use."""

    def __init__(self, image: Tensor, stride: int, images: int = 1) -> None:
        self.panels, self.images = list(image.view(-1, stride)), images

    def next(self, k: int, columns: int, floats: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
        """Weights of shape (k, columns) in some parts, and the float32 values behind the first one's."""
        found = [self.panels.pop(0) for _ in range(parts)]
        size = 2 * k // parts * columns
        images = [torch.cat([panel[n * size : (n + 1) * size] for panel in found]) for n in range(self.images)]
        weights = torch.stack([image.view(torch.float16).double() for image in images]).sum(0)
        ordered = weights.view(k // 8, columns, 8).transpose(1, 2).reshape(k, columns)
        return ordered, found[0][size * self.images :][: 4 * floats].view(torch.float32).double()


def _pick(held: Tensor, steps: list[tuple[int, int]]) -> Tensor:
    padded = torch.cat([held, held.new_zeros(len(held), 8)], dim=1).view(len(held), -1, 8)
    return padded[:, [t for pair in steps for t in pair]].flatten(1)


def ffn(tile: FfnTiling, image: Tensor, x: Tensor) -> Tensor:
    """``fused_ffn.cu`` without the residual: from normalized rows to scaled outputs."""
    first, second, third, last = tile.factors
    panels = _Panels(image, tile.stride)
    order = torch.from_numpy(input_order(first.c, tile.vector))
    parts = [
        part[:, order] @ panels.next(first.c, 8 * tiles_of(first), parts=tile.parts[0])[0]
        for part in x.view(len(x), first.a, first.c).unbind(1)
    ]
    hidden: list[Tensor] = []
    u = torch.cat(parts, dim=1) / HIDDEN_UNIT
    v = x.new_zeros(third.a, len(x), 8 * tiles_of(third))
    blocks = [block for block in range(third.a) for _ in range(second.d * tile.pieces)]
    for piece, cls in enumerate([cls for _ in range(third.a) for cls in range(second.d) for _ in range(tile.pieces)]):
        weights, bias = panels.next(16 * len(tile.middle_steps[0]), tile.hidden, tile.hidden, tile.parts[1])
        hidden.append(gelu(HIDDEN_UNIT * (_pick(u, tile.middle_steps[cls]) @ weights + bias)) / OUT_UNIT)
        if piece:  # the product of a piece with the third factor comes after the next piece
            v[blocks[piece - 1]] += hidden[piece - 1] @ panels.next(tile.hidden, 8 * tiles_of(third), parts=tile.parts[2])[0]
    v[-1] += hidden[-1] @ panels.next(tile.hidden, 8 * tiles_of(third), parts=tile.parts[2])[0]
    v = torch.cat(v.unbind(), dim=1)
    y = x.new_full((len(x), last.b, last.d), torch.nan)
    lane, held = torch.arange(4)[:, None], torch.arange(2 * tile.run)[None, :]
    for start in range(0, last.b, tile.columns):
        for cls in range(last.d):
            floats = (2 if tile.scaled else 1) * tile.columns
            weights, values = panels.next(16 * len(tile.last_steps[0]), tile.columns, floats, tile.parts[3])
            out = _pick(v, tile.last_steps[cls]) @ weights + values[: tile.columns]
            out = out * (values[tile.columns :] if tile.scaled else OUT_UNIT)
            for run in range(0, tile.columns, 8 * tile.run):  # lane t stores what it holds of each tile of a run side by side
                column = run + held // 2 * 8 + 2 * lane + held % 2
                y[:, start + run : start + run + 8 * tile.run, cls] = out[:, column.flatten()]
    assert not panels.panels
    return y.flatten(1)


def float_ffn(tile: FloatFfnTiling, image: Tensor, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """``ffn_floats.cu`` without the residual, from normalized rows; and the operands of its products."""
    first, second, third, last = tile.factors
    panels = _Panels(image[HEADER_BYTES:], tile.stride, tile.images)
    u_fit, to_hidden, hidden_fit, v_fit, to_output = image[:20].view(torch.float32).double()

    def up(piece: int) -> Tensor:
        steps = tile.middle_steps[piece // tile.pieces % second.d]
        return _pick(u, steps) @ panels.next(16 * len(steps), tile.hidden, parts=tile.parts[1])[0]

    order = torch.from_numpy(input_order(first.c, tile.vector))
    x = x * 2.0**tile.normalized_exponent
    parts = [
        part[:, order] @ panels.next(first.c, 8 * tiles_of(first), parts=tile.parts[0])[0] for part in x.view(len(x), first.a, -1).unbind(1)
    ]
    u = torch.cat(parts, dim=1) * u_fit
    v, operands = x.new_zeros(third.a, len(x), 8 * tiles_of(third)), [x, u]
    count = second.d * tile.pieces
    sums = up(0)
    for piece in range(third.a * count):
        following = up(piece + 1) if piece + 1 < third.a * count else sums
        weights, bias = panels.next(tile.hidden, 8 * tiles_of(third), tile.hidden, tile.parts[2])
        operands.append(gelu(sums * to_hidden + bias) * hidden_fit)
        v[piece // count] += operands[-1] @ weights
        sums = following
    v, y = torch.cat(v.unbind(), dim=1) * v_fit, x.new_full((len(x), last.b, last.d), torch.nan)
    lane, held = torch.arange(4)[:, None], torch.arange(2 * tile.run)[None, :]
    for start in range(0, last.b, tile.columns):
        for cls, steps in enumerate(tile.last_steps):
            weights, floats = panels.next(16 * len(steps), tile.columns, (2 if tile.scaled else 1) * tile.columns, tile.parts[3])
            out = _pick(v, steps) @ weights * to_output + floats[: tile.columns]
            out = out * floats[tile.columns :] if tile.scaled else out
            for run in range(start, start + tile.columns, 8 * tile.run):  # a lane holds two outputs of each tile of a run
                column = run - start + held // 2 * 8 + 2 * lane + held % 2
                place = run + (held // tile.span * 4 + lane) * tile.span + held % tile.span
                y[:, place.flatten(), cls] = out[:, column.flatten()]
    assert not panels.panels
    return y.flatten(1), [*operands, v]


def single_slots(tile: SingleTiling, image: Tensor, plane: int) -> np.ndarray:
    """The image as ldmatrix reads it: (a, ranges, output tiles, chunks, residue, step, slot k, output)."""
    config = tile.config
    dtype = torch.bfloat16 if tile.mode == "bf16" else torch.float16
    halves = image[SINGLE_HEADER_BYTES:].view(dtype).double().numpy()
    shape = (tile.pattern.a, *tile.counts, config.block_residues, tile.planes, config.chunk // 16, 2, config.block_outputs, 8)
    panels = halves.reshape(shape)[:, :, :, :, :, plane]
    return np.moveaxis(panels, 6, 7).reshape(*shape[:5], config.chunk // 16, config.block_outputs, 16).swapaxes(-1, -2)


def single(factor: SingleFactor, x: np.ndarray, image: Tensor) -> np.ndarray:  # shape: (rows, out_features)
    """``single_factor.cu``: products of staged chunks with the image, less its power of two."""
    tile = factor.tile
    config, (a, b, c, d) = tile.config, tile.pattern.factor_shape
    ranges, outputs, chunks = tile.counts
    weights = np.sum([single_slots(tile, image, plane) for plane in range(tile.planes)], axis=0)
    y = np.full((x.shape[0], tile.pattern.out_features), np.nan)
    residues, wide = config.block_residues, config.block_outputs
    for i in range(a):
        for group in range(ranges):
            staged = np.zeros((x.shape[0], chunks * config.chunk, residues))
            for j in range(min(residues, d - group * residues)):
                staged[:, :c, j] = x[:, (i * c + np.arange(c)) * d + group * residues + j]
            pieces = _single_fragments(tile, staged)
            for output in range(outputs):
                piece = weights[i, group, output].swapaxes(0, 1).reshape(residues, -1, 16, wide)
                product = np.einsum("nsjk,jskp->npj", pieces, piece)
                for p in range(min(wide, b - output * wide)):
                    for j in range(min(residues, d - group * residues)):
                        y[:, (i * b + output * wide + p) * d + group * residues + j] = product[:, p, j]
    return y * 2.0 ** -int(image[:4].view(torch.int32))


def _single_fragments(tile: SingleTiling, chunk: np.ndarray) -> np.ndarray:
    """What each lane's registers hold: staged (rows, inputs, residues) to (rows, step, residue, slot k of 16)."""
    config, (rows, inputs, _) = tile.config, chunk.shape
    residues, block = config.residues, config.block_residues
    found = np.empty((rows, inputs // 16, block, 16), chunk.dtype)
    flat = chunk.reshape(rows, inputs // 16, 16 * block)
    together = config.residue_warps == 1 and not config.interleaved
    for warp, t, m, r in np.ndindex(config.residue_warps, 4, 4, residues):
        q = t + 4 * m if config.interleaved else 4 * t + m
        element = t * 4 * block + m * residues + r if together else q * block + warp * residues + r
        found[:, :, warp * residues + r, 8 * (m // 2) + 2 * t + m % 2] = flat[:, :, element]  # a0, a1 hold k = 2t, 2t+1; a2, a3 eight more
    return found
