"""The packed weights, read as the fused kernel reads them, give the product."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flysurgery.ops.cuda.fused_configs import every_config
from flysurgery.ops.cuda.image import pack, panel_indices
from flysurgery.ops.cuda.tiling import FusedConfig, Tiling, tiling
from flysurgery.patterns import Architecture, gonon, monarch
from tests.support.oracle import dense

CASES = [
    (gonon(192, 192), 3, "fp32", False),
    (gonon(192, 768), 1, "fp16", False),  # uneven shares, padded
    (monarch(128, 64), 1, "bf16", True),  # four columns of each class would fill tiles of eight
    (Architecture.of((1, 32, 36, 4), (2, 72, 16, 1)), 1, "fp16", False),
    (Architecture.of((1, 32, 32, 3), (6, 16, 24, 1)), 1, "fp32", False),
    (Architecture.of((1, 16, 36, 4), (12, 12, 16, 1)), 2, "tf32", True),  # three columns, classes ending inside tiles
]


def intermediate(x: np.ndarray, tile: Tiling, config: FusedConfig, weights: np.ndarray) -> np.ndarray:  # shape: (groups, columns)
    """Stage 1: groups side by side, steps of 16 elements of x as lanes hold them."""
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


def result(u: np.ndarray, tile: Tiling, config: FusedConfig, weights: np.ndarray) -> np.ndarray:  # shape: (seconds * out_features,)
    """Stage 2: each class reads its tiles of every group; a lane's columns lie where it stores them."""
    a, b, _, d = tile.second.factor_shape
    count = -(-b // config.panel_columns)
    if tile.gated:  # gate and value by turns
        panels = np.moveaxis(weights.reshape(a, count, 2, d, tile.second_steps, 2, config.panel_columns, 8), 2, 0)
    else:
        panels = weights.reshape(tile.linears, a, count, d, tile.second_steps, 2, config.panel_columns, 8)
    n = np.arange(count * config.panel_columns)
    within = n % (8 * config.run)
    lane, held, span = within % 8 // 2, within // 8 * 2 + within % 2, tile.span(config)
    p = n - within + (held // span * 4 + lane) * span + held % span
    y = np.zeros((tile.seconds, a, b, d))
    for linear in range(tile.seconds):
        for cls, (low, tiles) in enumerate(tile.class_tiles):
            start = 8 * (linear % tile.linears * tile.group_tiles + low)
            read = u[:, start : start + 8 * tiles].reshape(-1)
            read = np.pad(read, (0, 16 * tile.second_steps - len(read))).reshape(-1, 2, 8)
            values = np.einsum("shk,pshnk->pn", read, panels[linear, cls // d, :, cls % d]).reshape(-1)
            y[linear, cls // d, p[p < b], cls % d] = values[p < b]
    return y.reshape(-1)


@pytest.mark.parametrize(("architecture", "linears", "mode", "straddled"), CASES, ids=str)
def test_the_image_holds_the_product(architecture: Architecture, linears: int, mode: str, straddled: bool) -> None:
    tile = tiling(architecture, mode, linears)
    assert isinstance(tile, Tiling), tile
    assert tile.straddled == straddled
    generator = torch.Generator().manual_seed(0)
    # small integers: sums are exact in any order
    factors = [[torch.randint(-3, 4, p.factor_shape, generator=generator).double() for p in architecture] for _ in range(linears)]
    x = torch.randint(-3, 4, (architecture.in_features,), generator=generator).double()
    expected = torch.cat([dense(left) @ (dense(right) @ x) for left, right in factors]).numpy()
    every = [*every_config(tile, 227 * 1024, wgmma=True)]
    for config in every[:: max(1, len(every) // 7)]:
        block = tile.of(config)
        first, second = panel_indices(block, config)
        y = []
        for start in range(0, linears, block.linears):
            pairs = factors[start : start + block.linears]
            flat = [np.append(np.concatenate([pair[side].reshape(-1).numpy() for pair in pairs]), 0.0) for side in (1, 0)]
            u = intermediate(x.numpy(), block, config, flat[0][first])
            y.append(result(u, block, config, flat[1][second]))
        np.testing.assert_array_equal(np.concatenate(y), expected)


@pytest.mark.parametrize("linears", [1, 2])
@pytest.mark.parametrize(
    ("architecture", "mode"), [(gonon(768, 192), "fp16"), (monarch(256, 64), "tf32"), (monarch(256, 192), "bf16")], ids=str
)
def test_the_image_holds_a_gate_and_a_value(architecture: Architecture, mode: str, linears: int) -> None:
    """With one linear both have their right factor in common."""
    tile = tiling(architecture, mode, linears, gated=True)
    assert isinstance(tile, Tiling), tile
    generator = torch.Generator().manual_seed(0)
    left, right = architecture.patterns
    lefts = [torch.randint(-3, 4, left.factor_shape, generator=generator).double() for _ in range(2)]
    rights = [torch.randint(-3, 4, right.factor_shape, generator=generator).double() for _ in range(linears)]
    x = torch.randint(-3, 4, (architecture.in_features,), generator=generator).double()
    expected = torch.cat([dense(lefts[n]) @ (dense(rights[n % linears]) @ x) for n in range(2)]).numpy()
    every = [*every_config(tile, 227 * 1024, wgmma=True)]
    for config in every[:: max(1, len(every) // 7)]:
        first, second = panel_indices(tile, config)
        flat = [np.append(np.concatenate([factor.reshape(-1).numpy() for factor in each]), 0.0) for each in (rights, lefts)]
        u = intermediate(x.numpy(), tile, config, flat[0][first])
        np.testing.assert_array_equal(result(u, tile, config, flat[1][second]), expected)


@pytest.mark.parametrize("linears", [1, 2])
def test_each_half_has_the_exponents_of_both_its_factors(linears: int) -> None:
    tile = tiling(monarch(256, 64), "fp32", linears, gated=True)
    assert isinstance(tile, Tiling), tile
    config = next(every_config(tile, 227 * 1024, wgmma=False))
    indices = tuple(torch.from_numpy(each).long() for each in panel_indices(tile, config))
    shapes = [tile.second.factor_shape, tile.first.factor_shape]
    pairs = [tuple(torch.full(shape, 2.0 ** (3 * n + place)) for place, shape in enumerate(shapes)) for n in range(2)]
    pairs[1] = (pairs[1][0], pairs[0][1]) if linears == 1 else pairs[1]
    header = pack(tile, config, [(left, right) for left, right in pairs], (indices[0], indices[1]))[:8].view(torch.int32)
    scaled = [sum(11 - (torch.frexp(factor.max()).exponent) for factor in pair) for pair in pairs]
    assert header.tolist() == [int(each) for each in scaled]
