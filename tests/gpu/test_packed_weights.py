"""Packed weights without a GPU: none is lost, norms are folded in, and linears lie side by side. Results are compared on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from flysurgery.factors import ks_einsum
from flysurgery.gpu.block_linear import pack_blocks
from flysurgery.gpu.dense import pack_dense
from flysurgery.gpu.dense_tiling import dense_tiling
from flysurgery.gpu.factor_by_factor import wide_middle, wide_tilings
from flysurgery.gpu.ffn_float_tiling import HEADER_BYTES as FLOAT_HEADER_BYTES
from flysurgery.gpu.ffn_float_tiling import float_ffn_tiling
from flysurgery.gpu.ffn_image import pack_ffn, pack_float_ffn
from flysurgery.gpu.ffn_middle import pack_middle
from flysurgery.gpu.ffn_tiling import ffn_tiling
from flysurgery.gpu.fused import _fold
from flysurgery.gpu.fused_configs import every_config
from flysurgery.gpu.image import HEADER_BYTES as FUSED_HEADER_BYTES
from flysurgery.gpu.image import pack, panel_indices
from flysurgery.gpu.parts import Norm
from flysurgery.gpu.single import SingleFactor
from flysurgery.gpu.single_tiling import HEADER_BYTES
from flysurgery.gpu.some_rows import pack_floats
from flysurgery.gpu.tiling import tiling
from flysurgery.patterns import Architecture, Pattern, gonon, monarch

SHARED = 227 * 1024
SMALL, MONARCH = (gonon(768, 192), gonon(192, 768)), (monarch(1536, 384), monarch(384, 1536))
UNEVEN = Architecture.of((2, 96, 32, 2), (2, 32, 24, 2)), Architecture.of((1, 32, 32, 3), (3, 32, 128, 1))
THREE_CLASSES = Architecture.of((1, 256, 128, 3), (2, 192, 64, 1)), Architecture.of((1, 64, 128, 2), (2, 128, 384, 1))
Packed = tuple[Tensor, Sequence[Tensor]]
"""An image of halves, and the weights that are in it."""


def weights_of(*patterns: Pattern) -> list[Tensor]:
    """Weights that take two halves each where they take pairs, whatever the power of two that scales them."""
    return [1 + torch.randint(1, 2**10, pattern.factor_shape) * 2.0**-11 + 2.0**-14 for pattern in patterns]


def fused(architecture: Architecture, mode: str, **options: bool) -> Packed:
    tile: Any = tiling(architecture, mode, **options)
    config = next(iter(every_config(tile, SHARED)))
    first, second = (torch.from_numpy(index).long() for index in panel_indices(tile, config))
    left, right = weights_of(*architecture)
    return pack(tile, config, [(left, right)], (first, second))[FUSED_HEADER_BYTES:], (left, right)


def dense(mode: str) -> Packed:
    tile: Any = dense_tiling(192, 384, mode, SHARED)
    (weight,) = weights_of(Pattern(1, 384, 192, 1))
    return pack_dense(tile, weight[0, :, :, 0], None, None)[0], [weight]


def one_block(architectures: tuple[Architecture, Architecture], place: int) -> Packed:
    tile: Any = wide_tilings(*architectures, SHARED)[place]
    (weight,) = weights_of(tile.factor)
    return pack_blocks(tile, weight, None, None, None, torch.float16)[0], [weight]


def middle() -> Packed:
    tile: Any = wide_middle(*THREE_CLASSES, SHARED)
    up, down = weights_of(tile.up.factor, tile.down.factor)
    return pack_middle(tile, up, None, down, torch.float16)[0], (up, down)


def whole(up: Architecture, down: Architecture, mode: str) -> Packed:
    nothing = (None, None)
    if mode == "fp16":
        tile: Any = ffn_tiling(up, down, SHARED, scaled=False)
        weights = weights_of(*tile.factors)
        return pack_ffn(tile, tuple(weights), nothing, nothing, None, torch.float16), weights  # pyright: ignore[reportArgumentType]
    tile = float_ffn_tiling(up, down, mode, SHARED, scaled=False)
    weights = weights_of(*tile.factors)
    return pack_float_ffn(tile, tuple(weights), nothing, nothing, None)[FLOAT_HEADER_BYTES:], weights  # pyright: ignore[reportArgumentType]


def some_rows(mode: str) -> Packed:
    (weight,) = weights_of(Pattern(1, 96, 64, 1))
    return pack_floats(weight[0, :, :, 0].double(), torch.ones(2, 96), mode)[1], [weight]


def single(pattern: Pattern, mode: str) -> Packed:
    (weight,) = weights_of(pattern)
    return SingleFactor(pattern, mode, shared_limit=SHARED).pack(weight)[HEADER_BYTES:], [weight]


ODD = Pattern(2, 3, 5, 3), Pattern(1, 10, 33, 17), Pattern(1, 16, 48, 32)
PACKERS: dict[str, tuple[Callable[[], Packed], int]] = {
    "fused linears, uneven shares": (lambda: fused(gonon(192, 768), "fp16"), 1),
    "fused linears, three classes": (lambda: fused(Architecture.of((1, 32, 32, 3), (6, 16, 24, 1)), "fp32"), 2),
    "fused linears, odd columns": (lambda: fused(Architecture.of((1, 16, 36, 4), (12, 12, 16, 1)), "tf32"), 1),
    "fused gate and value": (lambda: fused(monarch(512, 192), "bf16", gated=True), 1),
    **{f"a dense layer in {mode}": (lambda mode=mode: dense(mode), 1 + (mode == "fp32")) for mode in ("bf16", "tf32", "fp32")},
    **{f"factor {place} of a Monarch block": (lambda place=place: one_block(MONARCH, place), 1) for place in range(4)},
    **{f"factor {place} of uneven classes": (lambda place=place: one_block(UNEVEN, place), 1) for place in range(4)},
    "two factors around an activation": (middle, 1),
    **{f"a whole block in {mode}": (lambda mode=mode: whole(*MONARCH, mode), 1 + (mode == "fp32")) for mode in ("fp16", "tf32", "fp32")},
    "a whole block of three classes": (lambda: whole(*SMALL, "fp16"), 1),
    "a whole block of floats of three classes": (lambda: whole(*SMALL, "fp32"), 2),
    **{f"some rows in {mode}": (lambda mode=mode: some_rows(mode), 1 + (mode == "fp32")) for mode in ("tf32", "fp32")},
    **{
        f"a single {pattern} in {mode}": (lambda pattern=pattern, mode=mode: single(pattern, mode), 1 + (mode == "fp32"))
        for pattern, mode in zip(ODD, ("fp16", "tf32", "fp32"), strict=True)
    },
}


@pytest.mark.parametrize("packer", PACKERS)
def test_no_weight_is_lost_and_none_is_there_twice(packer: str) -> None:
    """What is not a weight is zero."""
    make, halves_a_weight = PACKERS[packer]
    image, weights = make()
    assert int(image.view(torch.float16).count_nonzero()) == halves_a_weight * sum(weight.numel() for weight in weights)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("affine", ["none", "weight", "bias", "both"])
def test_a_norm_folded_into_fused_linears(affine: str, biased: bool) -> None:
    architecture = Architecture.of((1, 8, 24, 3), (6, 12, 5, 1))
    x, inputs = torch.randn(5, architecture.in_features).double(), architecture.in_features
    biases = [torch.randn(architecture.out_features).double() for _ in range(2 if biased else 0)]
    pairs = [[torch.randn(pattern.factor_shape).double() for pattern in architecture] for _ in range(2)]
    weight = torch.randn(inputs).double() if affine in ("weight", "both") else None
    shift = torch.randn(inputs).double() if affine in ("bias", "both") else None
    folded, offset = _fold([(left, right) for left, right in pairs], torch.cat(biases) if biases else None, weight, shift)

    def products(rows: Tensor, linears: Sequence[Sequence[Tensor]]) -> Tensor:
        return torch.cat([ks_einsum(ks_einsum(rows, right.double()), left.double()) for left, right in linears], dim=1)

    found, expected = products(layer_norm(x, (inputs,)), folded), products(layer_norm(x, (inputs,), weight, shift), pairs)
    assert (offset is None) == (not biased and shift is None)
    torch.testing.assert_close(found if offset is None else found + offset, expected + torch.cat(biases) if biased else expected)


def test_a_norm_folded_into_a_single_block() -> None:
    tile: Any = wide_tilings(*UNEVEN, SHARED)[0]
    inputs, factor = tile.factor.in_features, torch.randint(-3, 4, tile.factor.factor_shape).half()
    shift = torch.randint(-3, 4, (inputs,)).half()
    folded = pack_blocks(tile, factor, None, None, Norm(torch.full((inputs,), 2.0), shift), torch.float16)
    plain = pack_blocks(tile, 2 * factor, ks_einsum(shift.double()[None], factor.double())[0], None, None, torch.float16)
    assert all(map(torch.equal, folded, plain))


@pytest.mark.parametrize("mode", ["fp16", "fp32"])
def test_a_norm_folded_into_a_whole_block(mode: str) -> None:
    """Of integers, whose sums are exact in any order."""
    up, down = MONARCH
    tile: Any = ffn_tiling(up, down, SHARED, scaled=True) if mode == "fp16" else float_ffn_tiling(up, down, mode, SHARED, scaled=True)
    first, second, *others = (torch.randint(-1, 2, pattern.factor_shape).float() for pattern in tile.factors)
    shift, scale = torch.randint(-1, 2, (up.in_features,)).float(), torch.randn(down.out_features)
    bias, out_bias = torch.randint(-1, 2, (up.out_features,)).float(), torch.randn(down.out_features)

    def packed(first: Tensor, bias: Tensor, norm: tuple[Tensor | None, Tensor | None]) -> Tensor:
        factors: Any = (first, second, *others)
        if mode == "fp16":
            return pack_ffn(tile, factors, (bias, out_bias), norm, scale, torch.float16)
        return pack_float_ffn(tile, factors, (bias, out_bias), norm, scale)

    folded = packed(first, bias, (torch.full((up.in_features,), 2.0), shift))
    assert torch.equal(folded, packed(2 * first, bias + ks_einsum(ks_einsum(shift[None], first), second)[0], (None, None)))
