"""The packed weights, read as the fused kernel reads them, give the product."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flysurgery.ops.cuda.fused_configs import every_config
from flysurgery.ops.cuda.image import panel_indices
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


def result(u: np.ndarray, tile: Tiling, config: FusedConfig, weights: np.ndarray) -> np.ndarray:  # shape: (linears * out_features,)
    """Stage 2: each class reads its tiles of every group; a lane's columns lie where it stores them."""
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


@pytest.mark.parametrize(
    ("architecture", "mode"), [(gonon(768, 192), "fp16"), (monarch(512, 64), "tf32"), (monarch(512, 192), "bf16")], ids=str
)
def test_a_panel_holds_as_many_columns_of_the_gate_as_of_the_value(architecture: Architecture, mode: str) -> None:
    tile = tiling(architecture, mode, gated=True)
    assert isinstance(tile, Tiling), tile
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-3, 4, pattern.factor_shape, generator=generator).double() for pattern in architecture)
    x = torch.randint(-3, 4, (architecture.in_features,), generator=generator).double()
    expected = (dense(left) @ (dense(right) @ x)).reshape(2, -1)  # of the gate and of the value
    every = [*every_config(tile, 227 * 1024, wgmma=True)]
    for config in every[:: max(1, len(every) // 7)]:
        first, second = panel_indices(tile, config)
        flat = [np.append(factor.reshape(-1).numpy(), 0.0) for factor in (right, left)]
        u = intermediate(x.numpy(), tile, config, flat[0][first])
        half = config.panel_columns // 2 * tile.second.d
        found = result(u, tile, config, flat[1][second]).reshape(-1, 2, half).swapaxes(0, 1).reshape(2, -1)
        np.testing.assert_array_equal(found, expected.numpy())
