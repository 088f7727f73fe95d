"""The packed weights of every kernel, read as the kernel reads them, give the product by its definition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from flysurgery.factors import factors_to_dense, ks_einsum
from flysurgery.gpu.block_linear import pack_blocks
from flysurgery.gpu.dense import _in_turn, pack_dense
from flysurgery.gpu.dense_tiling import DenseTiling, dense_tiling
from flysurgery.gpu.few_rows import pack_vectors, pack_weights
from flysurgery.gpu.ffn_float_image import pack_float_ffn
from flysurgery.gpu.ffn_float_tiling import FloatFfnTiling, float_ffn_tiling
from flysurgery.gpu.ffn_image import pack_ffn
from flysurgery.gpu.ffn_middle import pack_middle
from flysurgery.gpu.ffn_tiling import FfnTiling, ffn_tiling
from flysurgery.gpu.fused_configs import every_config
from flysurgery.gpu.fused_linears import _fold
from flysurgery.gpu.gather import _can_gather, make_tables
from flysurgery.gpu.image import pack, panel_indices
from flysurgery.gpu.single import SingleFactor, candidates
from flysurgery.gpu.single_tiling import HEADER_BYTES
from flysurgery.gpu.some_rows import pack_floats
from flysurgery.gpu.tiling import Tiling, tiling
from flysurgery.gpu.wide_ffn import wide_middle, wide_tilings
from flysurgery.ops.parts import Norm
from flysurgery.patterns import Architecture, Pattern, gonon, monarch
from tests.gpu import packed_readers as read
from tests.support.problems import make_factors
from tests.support.tolerance import FP32, FP32_BY_FP16_PAIRS

SHARED = 227 * 1024
UNEVEN = Architecture.of((2, 96, 32, 2), (2, 32, 24, 2)), Architecture.of((1, 32, 32, 3), (3, 32, 128, 1))
THREE_CLASSES = Architecture.of((1, 256, 128, 3), (2, 192, 64, 1)), Architecture.of((1, 64, 128, 2), (2, 128, 384, 1))
BLOCKS = {"gonon": (gonon(768, 192), gonon(192, 768)), "monarch": (monarch(1536, 384), monarch(384, 1536))}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def integers(*shape: int) -> Tensor:
    """Small ones, whose sums are exact in any order."""
    return torch.randint(-3, 4, shape).double()


FUSED = [
    (gonon(192, 192), 3, "fp32", False),
    (gonon(192, 768), 1, "fp16", False),  # uneven shares, padded
    (monarch(128, 64), 1, "bf16", False),  # four columns of each class would fill tiles of eight
    (Architecture.of((1, 32, 32, 3), (6, 16, 24, 1)), 1, "fp32", False),
    (Architecture.of((1, 16, 36, 4), (12, 12, 16, 1)), 2, "tf32", False),  # three columns, classes ending inside tiles
    (monarch(512, 192), 1, "bf16", True),
]


@pytest.mark.parametrize(("architecture", "linears", "mode", "gated"), FUSED, ids=str)
def test_fused_linears(architecture: Architecture, linears: int, mode: str, gated: bool) -> None:
    """Of a gate and a value, a panel holds as many columns of the one as of the other."""
    tile = tiling(architecture, mode, linears, gated=gated)
    assert isinstance(tile, Tiling), tile
    factors = [[integers(*pattern.factor_shape) for pattern in architecture] for _ in range(linears)]
    x = integers(architecture.in_features)
    expected = torch.cat([factors_to_dense(pair) @ x for pair in factors]).numpy()
    every = [*every_config(tile, SHARED, wgmma=True)]
    for config in every[:: max(1, len(every) // 4)]:
        part = tile.of(config)
        starts = range(0, linears, part.linears)
        found = np.concatenate([read.fused(x.numpy(), part, config, factors[start : start + part.linears]) for start in starts])
        if gated:
            half = config.panel_columns // 2 * tile.second.d
            found = found.reshape(-1, 2, half).swapaxes(0, 1).reshape(-1)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("affine", ["none", "weight", "bias", "both"])
@pytest.mark.parametrize("architecture", [Architecture.of((1, 8, 24, 3), (6, 12, 5, 1)), gonon(64, 64)], ids=str)
def test_a_norm_folded_into_fused_linears(architecture: Architecture, affine: str, biased: bool) -> None:
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


@pytest.mark.parametrize("mode", ["fp16", "bf16", "tf32", "fp32"])
def test_dense_layers(mode: str) -> None:
    tile = dense_tiling(192, 384, mode, SHARED, wgmma=False)
    assert isinstance(tile, DenseTiling), tile
    weight, x, bias, scale = (integers(*shape).float() for shape in ((384, 192), (192,), (384,), (384,)))
    weight[1] = 0.0
    if mode in ("tf32", "fp32"):  # whose outputs have scales of their own
        weight[0] *= 2.0**100
    found = read.dense(x.double().numpy(), tile, *pack_dense(tile, weight, bias, scale))
    np.testing.assert_array_equal(found, (scale.double() * (weight.double() @ x.double() + bias.double())).numpy())


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("gate", [0, 1])
def test_a_dense_gate_and_value(parts: int, gate: int) -> None:
    tile = dense_tiling(64, 768, "fp32", SHARED, wgmma=False, gated=True)
    assert isinstance(tile, DenseTiling), tile
    weight, bias, x = (integers(*shape).float() for shape in ((768, 64), (768,), (64,)))
    in_turn = [_in_turn(tile, whole.chunk(parts), gate) for whole in (weight, bias)]
    image, columns = pack_dense(tile, in_turn[0], in_turn[1], None)
    found = read.dense(x.double().numpy(), tile, image, columns)
    halves = found.reshape(-1, 2, tile.columns // 2).swapaxes(0, 1).reshape(2, -1)
    np.testing.assert_array_equal(halves, (weight @ x + bias).numpy().reshape(2, -1)[[gate, 1 - gate]])


def test_dense_weights_of_all_sizes() -> None:
    """To the largest of float32, which pairs of halves hold to 22 bits beside others as large."""
    tile = dense_tiling(64, 32, "fp32", SHARED, wgmma=False)
    assert isinstance(tile, DenseTiling), tile
    weight = (1 + torch.rand(32, 64)) * torch.exp2(torch.linspace(-100, 126, 32))[:, None]
    image = pack_dense(tile, weight, None, None)
    for index in (0, 17, 63):
        found = read.dense(np.eye(64)[index], tile, *image)
        np.testing.assert_allclose(found, weight[:, index].double().numpy(), rtol=2.0**-21, atol=0)


@pytest.mark.parametrize("architectures", [BLOCKS["monarch"], UNEVEN], ids=["monarch", "uneven"])
def test_single_blocks(architectures: tuple[Architecture, Architecture]) -> None:
    """Of rows less 2, behind a norm that is folded into them."""
    tiles = wide_tilings(*architectures, SHARED)
    assert not isinstance(tiles, str), tiles
    for tile in tiles:
        inputs, outputs = tile.factor.in_features, tile.factor.out_features
        factor, x, bias, scale = (integers(*shape).float() for shape in (tile.factor.factor_shape, (inputs,), (outputs,), (outputs,)))
        weight, shift = integers(inputs).float().clamp(-1, 1), integers(inputs).float()
        packed = pack_blocks(tile, factor, bias, scale, Norm(weight, shift), torch.float16)
        expected = scale * (ks_einsum(((x - 2) * weight + shift)[None], factor)[0] + bias)
        found = read.block(x.double().numpy()[list(tile.inputs)], 2.0, tile, *packed)
        np.testing.assert_array_equal(found, expected.double().numpy()[list(tile.outputs)])


def test_two_factors_around_an_activation() -> None:
    tile = wide_middle(*THREE_CLASSES, SHARED)
    assert not isinstance(tile, str), tile
    second, third = (integers(*part.factor.factor_shape).clamp(-2, 2).float() for part in (tile.up, tile.down))
    u, bias = integers(tile.up.factor.in_features), integers(tile.up.factor.out_features)
    expected = ks_einsum((ks_einsum(u[None], second.double()) + bias) / 2, third.double())[0]
    found = read.middle(u.numpy()[list(tile.up.inputs)], tile, *pack_middle(tile, second, bias, third, torch.float16))
    np.testing.assert_array_equal(found, expected.numpy()[list(tile.down.outputs)])


def block_by_definition(x: Tensor, factors: list[Tensor], biases: tuple[Tensor, Tensor], scale: Tensor | None) -> Tensor:
    first, second, third, last = factors
    hidden = gelu(ks_einsum(ks_einsum(x, first), second) + biases[0])
    out = ks_einsum(ks_einsum(hidden, third), last) + biases[1]
    return out if scale is None else out * scale


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_whole_blocks_of_halves(name: str, scaled: bool) -> None:
    up, down = BLOCKS[name]
    tile = ffn_tiling(up, down, SHARED, scaled=scaled)
    assert isinstance(tile, FfnTiling), tile
    factors = [integers(*pattern.factor_shape) / 4 for pattern in tile.factors]
    biases, scale = (integers(up.out_features) / 4, integers(down.out_features) / 4), integers(down.out_features) / 4
    norm, x = (torch.full((up.in_features,), 0.5), integers(up.in_features) / 4), integers(5, up.in_features) / 4
    image = pack_ffn(tile, tuple(factors), biases, norm, scale if scaled else None, torch.float16)  # pyright: ignore[reportArgumentType]
    expected = block_by_definition(x * norm[0].double() + norm[1], factors, biases, scale if scaled else None)
    # All is exact in float64, but for the shift that passes through the up layer into a float32 bias.
    torch.testing.assert_close(read.ffn(tile, image, x), expected, rtol=2.0**-20, atol=2.0**-20 * float(expected.abs().max()))


@pytest.mark.parametrize(("mode", "scaled"), [("tf32", True), ("fp32", False)])
@pytest.mark.parametrize("name", BLOCKS)
def test_whole_blocks_of_floats(name: str, mode: str, scaled: bool) -> None:
    """Of factors of any size."""
    up, down = BLOCKS[name]
    tile = float_ffn_tiling(up, down, mode, SHARED, scaled=scaled)
    assert isinstance(tile, FloatFfnTiling), tile
    sizes = (1e-9, 1e3, 1, 1e20)
    factors = [torch.randn(pattern.factor_shape).double() * size for pattern, size in zip(tile.factors, sizes, strict=True)]
    biases, scale = (
        (torch.randn(up.out_features).double(), torch.randn(down.out_features).double()),
        torch.randn(down.out_features).double(),
    )
    norm = (torch.randn(up.in_features).double(), torch.randn(up.in_features).double())
    image = pack_float_ffn(tile, tuple(factors), biases, norm, scale if scaled else None)  # pyright: ignore[reportArgumentType]
    x = layer_norm(torch.randn(5, up.in_features).double(), (up.in_features,))
    expected = block_by_definition(x * norm[0] + norm[1], factors, biases, scale if scaled else None)
    out, _ = read.float_ffn(tile, image, x)
    assert float((out - expected).norm() / expected.norm()) < (2.0**-20 if mode == "fp32" else 2.0**-10)


@pytest.mark.parametrize("name", BLOCKS)
def test_no_row_of_a_whole_block_overflows_a_half(name: str) -> None:
    """The longest rows that there are: of one large element, and those along what makes one hidden unit."""
    up, down = BLOCKS[name]
    tile = float_ffn_tiling(up, down, "fp32", SHARED, scaled=False)
    assert isinstance(tile, FloatFfnTiling), tile
    first, second, third, last = (torch.randn(pattern.factor_shape).double() for pattern in tile.factors)
    identity, largest_half = torch.eye(up.in_features).double(), 65504.0
    rows = torch.cat([identity[:3], ks_einsum(ks_einsum(identity, first), second).T[:9]])
    rows = rows / rows.norm(dim=1, keepdim=True) * up.in_features**0.5
    _, operands = read.float_ffn(tile, pack_float_ffn(tile, (first, second, third, last), (None, None), (None, None), None), rows)
    assert all(float(value.abs().max()) <= largest_half for value in operands)
    assert all(float(value.abs().max()) >= 2.0**-8 * largest_half for value in operands[:2])


@pytest.mark.parametrize("mode", ["tf32", "fp32"])
def test_some_rows(mode: str) -> None:
    weight, x, columns = integers(96, 64), integers(64), integers(2, 96).float()
    weight[0] *= 2.0**100  # outputs have scales of their own
    weight[1] = 0.0
    (factor, shift), images = pack_floats(weight, columns, mode)
    k = torch.arange(64)
    taken = x[k // 16 * 16 + k % 8 // 2 * 4 + k // 8 % 2 * 2 + k % 2]  # as lanes hold the inputs
    y = (images.double().sum(dim=1) @ taken) * 2.0**-13 * factor.double() + shift.double()
    torch.testing.assert_close(y, weight @ x * columns[0].double() + columns[1].double(), rtol=0, atol=0)


def test_few_rows_of_linears_side_by_side() -> None:
    dense, factors = torch.randn(64, 96).double(), [torch.randn(pattern.factor_shape).double() for pattern in gonon(96, 96)]
    weight = pack_weights([dense, *factors], [0, 2])
    torch.testing.assert_close(weight, torch.cat([dense, factors_to_dense(factors)]), rtol=0, atol=0)
    bias, scale = torch.randn(96), torch.randn(160)
    norm, columns = pack_vectors(dense, (None, None), [None, bias], scale, 96, [64, 96])
    torch.testing.assert_close(norm, torch.stack((torch.ones(96), torch.zeros(96))), rtol=0, atol=0)
    torch.testing.assert_close(columns, torch.stack((scale, torch.cat((torch.zeros(64), bias)) * scale)), rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["fp16", "bf16", "tf32", "fp32"])
@pytest.mark.parametrize("shape", [(2, 3, 5, 3), (1, 48, 48, 1), (2, 16, 24, 4), (1, 10, 33, 17), (1, 16, 48, 32)], ids=str)
def test_single_factors(shape: tuple[int, int, int, int], mode: str) -> None:
    pattern = Pattern(*shape)
    factor, x = integers(*pattern.factor_shape), integers(3, pattern.in_features)
    for config in candidates(pattern, mode, SHARED)[:3]:
        single = SingleFactor(pattern, mode, config, shared_limit=SHARED)
        image = single.pack(factor.float() if mode in ("tf32", "fp32") else factor.half())
        np.testing.assert_array_equal(read.single(single, x.numpy(), image), ks_einsum(x, factor).numpy())


def test_an_exact_single_factor() -> None:
    pattern = Pattern(2, 10, 20, 3)
    factor = torch.randn(pattern.factor_shape)
    single = SingleFactor(pattern, "exact", shared_limit=SHARED)
    config, (ranges, outputs, chunks) = single.tile.config, single.tile.counts
    shape = (2, ranges, outputs, chunks, config.block_residues, config.chunk, config.block_outputs)
    kept = single.pack(factor)[HEADER_BYTES:].view(torch.float32).reshape(shape)
    joined = kept.permute(0, 2, 6, 3, 5, 1, 4).reshape(2, outputs * config.block_outputs, chunks * config.chunk, -1)
    assert torch.equal(joined[:, :10, :20, :3], factor)
    assert not joined[:, 10:].any() and not joined[:, :, 20:].any() and not joined[:, :, :, 3:].any()


def test_pairs_of_halves_hold_22_bits_of_a_weight() -> None:
    pattern = Pattern(1, 16, 16, 1)
    factor = torch.randn(pattern.factor_shape) * 1e-20
    factor[0, 0, 0, 0] = torch.inf
    single = SingleFactor(pattern, "fp32", shared_limit=SHARED)
    image = single.pack(factor)
    kept = np.sum([read.single_slots(single.tile, image, plane) for plane in (0, 1)], axis=0)
    finite = np.sort(kept[np.isfinite(kept) & (kept != 0)]) * 2.0 ** -int(image[:4].view(torch.int32))
    expected = np.sort(factor.double().flatten()[1:].numpy())
    assert np.count_nonzero(~np.isfinite(kept)) == 1
    assert np.max(np.abs(finite - expected) / np.abs(expected)) <= 2.0**-FP32_BY_FP16_PAIRS.exact_bits


@pytest.mark.parametrize("linears", [1, 3])
def test_tables_put_each_weight_where_packing_puts_it(linears: int) -> None:
    """What a training step packs by, in one launch."""
    architecture = gonon(192, 192)
    tile = tiling(architecture, "fp16", linears)
    assert isinstance(tile, Tiling), tile
    config = next(iter(every_config(tile, SHARED, wgmma=False)))
    first, second = (torch.from_numpy(index).long() for index in panel_indices(tile, config))
    factors = [factor * (index + 1) for index, factor in enumerate(make_factors(architecture, FP32) * linears)]

    def packed(values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (pack(tile, config, [(values[n], values[n + 1]) for n in range(0, len(values), 2)], (first, second)),)

    (table,), (image,) = make_tables(packed, factors, "fp16"), packed(tuple(factors))
    flat = torch.cat([factor.reshape(-1) for factor in factors])
    assert len(table) % 8 == 0
    assert torch.equal(torch.where(table >= 0, flat[table.clamp_min(0)], 0).half().view(torch.uint8), image)
    assert set(table[table >= 0].tolist()) == set(range(len(flat)))


def test_what_no_table_can_pack() -> None:
    factors = make_factors(gonon(192, 192), FP32)
    assert _can_gather(factors, "fp16") and _can_gather(factors, "bf16")
    assert not _can_gather(factors, "fp32")
    assert not _can_gather([factors[0].double(), factors[1].double()], "fp16")
    assert not _can_gather([factors[0], factors[1].half()], "fp16")
    assert not _can_gather([factors[0].mT, factors[1]], "fp16")
