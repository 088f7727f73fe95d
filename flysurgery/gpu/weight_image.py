"""The order of packed weights: what the images of all kernels share, and the image of a fused layer."""

from collections.abc import Sequence
from math import ceil

import numpy as np
import torch
from torch import Tensor

from flysurgery.gpu.modes import WEIGHT_EXPONENT, in_halves
from flysurgery.gpu.tiling import FusedConfig, Tiling, members, span_of
from flysurgery.patterns import Pattern

HEADER_BYTES = 128


def input_order(count: int, vector: int = 4) -> np.ndarray:  # shape: (count,)
    """The input at each place k, where operand registers of lane t hold k = 2t, 2t+1, 2t+8, 2t+9 of a step of 16.

    These are four neighbours of x, of the ``vector`` that the lane reads at once.
    """
    k = np.arange(count)
    step, place = np.divmod(k, 16)
    steps = vector // 4  # that one vector of a lane feeds
    return step // steps * 4 * vector + place % 8 // 2 * vector + step % steps * 4 + place // 8 * 2 + place % 2


def output_order(count: int, run: int, span: int) -> np.ndarray:  # shape: (count,)
    """The output at each column. A lane holds two columns of each of ``run`` tiles of 8, and stores vectors of ``span`` neighbours."""
    n = np.arange(count)
    within = n % (8 * run)
    lane, held = within % 8 // 2, within // 8 * 2 + within % 2
    return n - within + (held // span * 4 + lane) * span + held % span


def places_of(factor: Pattern, i: int, p: np.ndarray, q: np.ndarray, j: int) -> np.ndarray:
    """Places of factor[i, p, q, j] in the flattened factor, -1 where p or q is."""
    flat = ((i * factor.b + p) * factor.c + q) * factor.d + j
    return np.where((p >= 0) & (q >= 0), flat, -1)


def entries_of(factor: Pattern, outputs: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    """Places of the matrix's entries at outputs and inputs, which are broadcast, in the flattened factor; -1 for zeros."""
    _, b, c, d = factor.factor_shape
    i, j = outputs // (b * d), outputs % d
    inside = (inputs >= 0) & (inputs // (c * d) == i) & (inputs % d == j)
    return np.where(inside, ((i * b + outputs // d % b) * c + inputs // d % c) * d + j, -1)


def in_cores(panels: list[np.ndarray]) -> np.ndarray:
    """Panels of shape (k, columns) in the order [k8][column][8], each flat."""
    grid = np.stack(panels)
    grid = grid.reshape(len(panels), -1, 8, grid.shape[2]).swapaxes(2, 3)
    return np.ascontiguousarray(grid.reshape(len(panels), -1).astype(np.int32))


def panel_indices(tile: Tiling, config: FusedConfig) -> tuple[np.ndarray, np.ndarray]:
    """Where each element of the two kinds of panels comes from.

    Returns int32 arrays of shapes ``(panels, elements)`` that index the flattened first factors of all linears one
    after the other, and the flattened second factors likewise; -1 stands for padding.
    """
    return _first_indices(tile, config), _second_indices(tile, config)


def _column_members(tile: Tiling, group: int) -> np.ndarray:
    """Inner index of each of a group's columns, of one linear, sorted by class; -1 for padding."""
    columns = np.full(8 * tile.group_tiles, -1, dtype=np.int64)
    for cls, start in enumerate(tile.class_starts(group)[:-1]):
        inside = members(tile.first, tile.second)[group, cls]
        columns[start : start + len(inside)] = inside
    return columns


def _class_members(tile: Tiling, cls: int) -> np.ndarray:
    """Inner index of each column that a class reads, group by group; -1 for padding and what another class owns."""
    first, count = tile.class_tiles[cls]
    read = np.concatenate([_column_members(tile, group)[8 * first : 8 * (first + count)] for group in range(tile.groups)])
    c, d = tile.second.c, tile.second.d
    read = np.where((read >= 0) & (read // (c * d) * d + read % d == cls), read, -1)
    return np.concatenate([read, np.full(tile.second_steps * 16 - len(read), -1)])


def _first_indices(tile: Tiling, config: FusedConfig) -> np.ndarray:
    a, b, c, d = tile.first.factor_shape
    k = tile.first_steps * 16
    q = np.arange(k) if tile.natural else input_order(k)
    q = np.where(q < c, q, -1)
    panels = []
    for i in range(a):
        for start in range(0, d, config.residues):
            residues = []
            for j in range(start, start + config.residues):
                m = _column_members(tile, i * d + j)
                p = np.where(m >= 0, (m - j) // d - i * b, -1)
                of_linears = _of_linears(tile, tile.first, places_of(tile.first, i, p[None, :], q[:, None], j))
                residues.append(np.concatenate(of_linears, axis=1).reshape(tile.first_steps, 16, -1))
            steps = np.stack(residues, axis=1)  # shape: (steps, residues, 16, columns)
            panels += np.split(steps.reshape(-1, steps.shape[3]), tile.first_steps // config.panel_steps)
    return in_cores(panels)


def _second_indices(tile: Tiling, config: FusedConfig) -> np.ndarray:
    a, b, c, d = tile.second.factor_shape
    width = ceil(b / config.panel_columns) * config.panel_columns
    p = output_order(width, config.run, span_of(config.run, d, tile.element_bytes))
    if tile.gated:  # a panel's first half is of the gate, which is the first half of the outputs, the other of the value
        columns = config.panel_columns // 2
        p = p % (2 * columns) // columns * (b // 2) + p // (2 * columns) * columns + p % columns
    p = np.where(p < b, p, -1)
    panels = []
    for i in range(a):
        read = [_class_members(tile, i * d + j) for j in range(d)]
        inputs = [np.where(m >= 0, (m - j) // d - i * c, -1) for j, m in enumerate(read)]
        classes = np.stack([places_of(tile.second, i, p[None, :], q[:, None], j) for j, q in enumerate(inputs)])  # shape: (d, k, columns)
        for columns in np.split(classes, width // config.panel_columns, axis=2):
            panels += [part.reshape(-1, config.panel_columns) for part in np.split(columns, d // config.panel_classes)]
    return np.concatenate(_of_linears(tile, tile.second, in_cores(panels)))


def _of_linears(tile: Tiling, factor: Pattern, places: np.ndarray) -> list[np.ndarray]:
    """The places in the factor of each linear, which follow each other."""
    return [np.where(places >= 0, places + n * factor.nnz, -1).astype(places.dtype) for n in range(tile.linears)]


def pack(
    tile: Tiling,
    linears: Sequence[tuple[Tensor, Tensor]],  # each: (left factor, right factor), shapes (a, b, c, d)
    indices: tuple[Tensor, Tensor],  # panel_indices as int64 tensors on the factors' device
) -> Tensor:  # shape: (bytes,), uint8
    """Build the image of one layer, or of several linears that share their input, by torch operations only."""
    seconds, firsts = zip(*linears, strict=True)
    header = torch.zeros(HEADER_BYTES // 4, dtype=torch.int32, device=firsts[0].device)
    parts = [header.view(torch.uint8)]
    half = torch.bfloat16 if tile.mode == "bf16" else torch.float16
    for factors, index in zip((firsts, seconds), indices, strict=True):
        values = [factor.detach().float().reshape(-1) for factor in factors]
        if tile.element_bytes == 4:
            for n, value in enumerate(values):
                exponent = WEIGHT_EXPONENT - torch.frexp(value.abs().amax()).exponent
                values[n] = _times_power(value, exponent)
                header[n] += exponent
        flat = torch.cat([*values, values[0].new_zeros(1)])
        gathered = flat[index]  # -1 takes the zero at the end
        parts.append(torch.stack(in_halves(gathered, tile.images, half), dim=1).reshape(-1).view(torch.uint8))
    return torch.cat(parts)


def _times_power(value: Tensor, exponent: Tensor) -> Tensor:
    """``value * 2**exponent`` in two steps, because the power alone may exceed the range of float32."""
    half = torch.div(exponent, 2, rounding_mode="floor")
    return torch.ldexp(torch.ldexp(value, half), exponent - half)
