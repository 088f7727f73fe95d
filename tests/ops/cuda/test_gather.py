"""Packing by a table gives, bit by bit, what packing gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flysurgery.ops.cuda.chain import Chain
from flysurgery.ops.cuda.compile import compile_cubin
from flysurgery.ops.cuda.fused import FusedLinear
from flysurgery.ops.cuda.fused_configs import configs
from flysurgery.ops.cuda.gather import can_gather, make_tables
from flysurgery.ops.cuda.image import pack, panel_indices
from flysurgery.ops.cuda.product import _split, product_of
from flysurgery.ops.cuda.single import SingleFactor
from flysurgery.ops.cuda.tiling import Tiling, tiling
from flysurgery.ops.cuda.trained import Trained
from flysurgery.patterns import Architecture, gonon
from tests.support.problems import make_factors, make_vector
from tests.support.tolerance import BF16, FP16, FP32

SQUARE, DOWN = gonon(384, 384), gonon(384, 1536)
DEEP = Architecture.of((3, 2, 4, 2), (2, 3, 5, 4), (2, 5, 6, 4))
MODES = {"fp16": FP16, "bf16": BF16}


def packer(architecture: Architecture, mode: str, linears: int):
    """What a product packs with, on the CPU."""
    tile = tiling(architecture, mode, linears)
    if isinstance(tile, Tiling):
        config = configs(tile, 227 * 1024, wgmma=False)[0]
        first, second = (torch.from_numpy(index).long() for index in panel_indices(tile, config))
        return lambda parts: (pack(tile, config, parts, (first, second)),)
    singles = [SingleFactor(pattern, mode, shared_limit=227 * 1024) for pattern in reversed(architecture.patterns)]
    return lambda parts: tuple(single.pack(factor) for single, factor in zip(singles, reversed(parts[0]), strict=True))


def by_table(factors: list[Tensor], table: Tensor, mode: str) -> Tensor:
    """What the kernel does."""
    flat = torch.cat([factor.reshape(-1) for factor in factors])
    return torch.where(table >= 0, flat[table.clamp_min(0)], 0).to(MODES[mode].dtype).view(torch.uint8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("architecture", "linears"), [(SQUARE, 1), (SQUARE, 3), (DOWN, 1), (DEEP, 1)], ids=str)
def test_tables_put_each_weight_where_packing_puts_it(architecture: Architecture, linears: int, transposed: bool, mode: str) -> None:
    own = make_factors(architecture, FP32) * linears
    factors = [factor * (index + 1) for index, factor in enumerate(own)]
    slow = packer(architecture.transpose if transposed else architecture, mode, linears)

    def split_and_pack(values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return slow(_split(values, linears, transposed))

    tables = make_tables(split_and_pack, factors, mode)
    images = split_and_pack(tuple(factors))
    assert len(tables) == len(images)
    placed = torch.zeros(sum(factor.numel() for factor in factors), dtype=torch.bool)
    for table, image in zip(tables, images, strict=True):
        assert len(table) % 8 == 0
        assert torch.equal(by_table(factors, table, mode), image)
        placed[table[table >= 0]] = True
    assert placed.all()


def test_what_cannot_be_gathered_is_packed_otherwise() -> None:
    factors = make_factors(SQUARE, FP32)
    assert can_gather(factors, "fp16") and can_gather(factors, "bf16")
    assert not can_gather(factors, "fp32")
    assert not can_gather([factors[0].double(), factors[1].double()], "fp16")
    assert not can_gather([factors[0], factors[1].half()], "fp16")
    assert not can_gather([factors[0].mT, factors[1]], "fp16")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("target", [1, 2])
@pytest.mark.parametrize("source", [0, 1, 2])
def test_compiles_without_spills(source: int, target: int, arch: str) -> None:
    for slots in (1, 9):
        defines = {"SLOTS": slots, "SOURCE": source, "TARGET": target}
        compiled = compile_cubin("gather.cu", defines, arch=arch, name="gather")
        assert compiled.spill_bytes == 0 and compiled.stack_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("architecture", "linears"), [(SQUARE, 1), (SQUARE, 3), (DEEP, 1)], ids=str)
def test_the_kernel_gathers(architecture: Architecture, linears: int, dtype: torch.dtype, mode: str) -> None:
    product = product_of(architecture, mode, linears, 0, 1000)
    assert isinstance(product.kernels, FusedLinear) == (len(architecture) == 2)
    factors = tuple(
        factor.to(dtype) * (index + 1) for index, factor in enumerate(make_factors(architecture, FP32, device="cuda") * linears)
    )
    biases = tuple(make_vector(architecture.out_features, FP32, device="cuda").to(dtype) * (n + 1) for n in range(linears))
    chain = Chain(architecture, mode, linears, 0, 1000)
    trained_packer = Trained(product, chain, len(factors), with_bias=True).packer
    for packer, sources in ((trained_packer, factors + biases), (chain.pack, factors)):
        slow = packer.plainly(sources)
        for fast, image in zip(packer(sources), slow, strict=True):
            assert fast.data_ptr() % 256 == 0
            assert torch.equal(fast.view(torch.uint8)[: image.nbytes], image.view(torch.uint8))
