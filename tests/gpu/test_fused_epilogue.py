"""The fused kernel's activations and residual on the GPU, against float64."""

from __future__ import annotations

import pytest
import torch

from flysurgery.gpu.device import shared_limit_of
from flysurgery.gpu.fused import FusedLinear
from flysurgery.gpu.fused_configs import every_config
from flysurgery.gpu.tiling import FusedConfig, Tiling, tiling
from flysurgery.ops import ks_linear
from flysurgery.patterns import Architecture
from tests.support.oracle import ACTIVATIONS, product
from tests.support.problems import make_factors, make_input, make_vector
from tests.support.tolerance import ARITHMETICS, assert_epilogue_bounded, assert_epilogue_comparable

pytestmark = pytest.mark.gpu

LAYERS = (
    Architecture.of((1, 192, 48, 2), (2, 48, 192, 1)),
    Architecture.of((1, 48, 48, 3), (6, 24, 32, 1)),  # not chainable: classes of uneven size share tiles
    Architecture.of((1, 24, 24, 4), (4, 24, 96, 1)),
)
ROWS = 333


def configs_of(architecture: Architecture, mode: str) -> list[FusedConfig]:
    """The first candidate for each place of the intermediate."""
    tile = tiling(architecture, mode)
    assert isinstance(tile, Tiling), tile
    found: dict[int, FusedConfig] = {}
    every = every_config(tile, shared_limit_of(0))
    for config in sorted(every, key=lambda config: (config.panel_columns, config.slots, config.warps), reverse=True):
        found.setdefault(config.u_shared, config)
    return list(found.values())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogues(mode: str, activation: str) -> None:
    """Of each mode and activation a layer, and its configurations by turns with a residual; so all pairs of these occur."""
    arithmetic, compute, turn = ARITHMETICS[mode], ACTIVATIONS[activation], [*ARITHMETICS].index(mode) + [*ACTIVATIONS].index(activation)
    architecture = LAYERS[turn % len(LAYERS)]
    x = make_input(ROWS, architecture.in_features, arithmetic, device="cuda")
    factors = make_factors(architecture, arithmetic, device="cuda")
    bias = make_vector(architecture.out_features, arithmetic, device="cuda")
    added = make_input(ROWS, architecture.out_features, arithmetic, device="cuda")
    plain, exact = compute(ks_linear(x, factors, bias, backend="bmm")), compute(product(x, factors, bias))
    for place, config in enumerate(configs_of(architecture, mode)):
        residual = added if (place + turn) % 2 else None
        yardstick, truth = (plain, exact) if residual is None else (plain + residual, exact + residual.double())
        layer = FusedLinear(architecture, mode, config=config, device_index=0)
        out = layer.run(x, layer.pack([(factors[0], factors[1])]), bias, residual, activation)
        assert_epilogue_bounded(out, x, factors, bias, compute, residual, arithmetic)
        assert_epilogue_comparable(out, yardstick, truth, arithmetic)


def test_negative_inputs_vanish_without_a_trace(mode: str) -> None:
    """Far below zero each activation is -0 or tiny, never NaN, and far above it is the identity."""
    arithmetic, architecture = ARITHMETICS[mode], LAYERS[0]
    factors = [torch.zeros_like(factor) for factor in make_factors(architecture, arithmetic, device="cuda")]
    x = make_input(ROWS, architecture.in_features, arithmetic, device="cuda")
    config = configs_of(architecture, mode)[0]
    layer = FusedLinear(architecture, mode, config=config, device_index=0)
    image = layer.pack([(factors[0], factors[1])])
    for activation, compute in ACTIVATIONS.items():
        for value in (-1000.0, -30.0, 30.0, 1000.0):
            bias = torch.full((architecture.out_features,), value, device="cuda", dtype=arithmetic.dtype)
            assert_epilogue_bounded(layer.run(x, image, bias, None, activation), x, factors, bias, compute, None, arithmetic)
