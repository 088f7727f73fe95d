"""Matrices transposed within rows: the kernel's index maps emulated, its variants compiled, and run on the GPU."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest
import torch

from flysurgery.ops.cuda.compile import compile_cubin
from flysurgery.ops.cuda.transposition import Transposition
from tests.support.tolerance import assert_equal

SIZES = [(1, 64, 4), (3, 48, 3), (2, 4, 96), (2, 100, 66), (5, 6, 2), (1, 1, 7), (1, 48, 2050), (1, 12, 640), (2, 136, 72)]
"""Matrices a row, and the sides of one: small ones together, tiles cut on either side, odd ones."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def emulate(defines: dict[str, int], x: np.ndarray, rows: int) -> np.ndarray:
    """What ``transpose.cu`` stores, vector by vector, from its own index maps; elements that nobody stores stay -1."""
    kind, matrices, slow, fast, tile_slow, tile_fast, together, in_vector, out_vector = defines.values()
    each = 2 if kind and in_vector % 2 == 0 else 1
    line, lines = tile_fast // each, tile_slow // out_vector
    spread = next(n for n, least in ((1, 32), (2, 16), (4, 8), (8, 4), (16, 0)) if lines >= least)
    pitch = line + (3 * spread - line % (2 * spread)) % (2 * spread)
    area = lines * pitch + (5 - lines * pitch % 4) % 4
    tiles_fast, tiles = ceil(fast / tile_fast), ceil(slow / tile_slow) * ceil(fast / tile_fast)
    y = np.full(x.size, -1)
    for block in range(tiles * ceil(rows * matrices / together)):
        slow0, fast0 = block % tiles // tiles_fast * tile_slow, block % tiles_fast * tile_fast
        first = block // tiles * together
        shared = np.full((together * out_vector * area, each), -1)
        n = np.arange(together * tile_slow * tile_fast // in_vector)
        m, own, v = n // (tile_slow * tile_fast // in_vector), n // (tile_fast // in_vector) % tile_slow, n % (tile_fast // in_vector)
        s, f = slow0 + own, fast0 + v * in_vector
        valid = (first + m < rows * matrices) & (s < slow) & (f < fast)
        at = (m * out_vector + own % out_vector) * area + own // out_vector * pitch + v * (in_vector // each)
        source = (first + m) * slow * fast + s * fast + f
        for element in range(in_vector):
            shared[at[valid] + element // each, element % each] = x[source[valid] + element]

        n = np.arange(together * lines * line)
        own, word, m = n % lines, n // lines % line, n // (lines * line)
        s, f = slow0 + own * out_vector, fast0 + word * each
        valid = (first + m < rows * matrices) & (s < slow) & (f < fast)
        target = (first + m) * slow * fast + f * slow + s
        for k in range(out_vector):
            at = (m * out_vector + k) * area + own * pitch + word
            for column in range(each):
                y[target[valid] + column * slow + k] = shared[at[valid], column]
    return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_element_finds_its_place(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, (matrices, slow, fast) = 37, size
    part = Transposition(*size)
    for aligned in (False, True):
        x = np.arange(rows * matrices * slow * fast)
        expected = x.reshape(-1, slow, fast).transpose(0, 2, 1).reshape(-1)
        np.testing.assert_array_equal(emulate(part.defines(dtype, aligned), x, rows), expected)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(6, 384, 64), (6, 64, 384), (2, 19, 3), (1, 4, 1024)], ids=str)
def test_compiles_without_spills(size: tuple[int, int, int], dtype: torch.dtype, arch: str) -> None:
    for aligned in (False, True):
        compiled = compile_cubin("transpose.cu", Transposition(*size).defines(dtype, aligned), arch=arch, name="transpose")
        assert compiled.spill_bytes == 0 and compiled.shared_bytes <= 48 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_transpositions_on_the_gpu(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    matrices, slow, fast = size
    features = matrices * slow * fast
    for rows, shift in ((1, 0), (37, 0), (37, 1), (1000, 0)):
        x = torch.randn((rows, features + 2 * shift), device="cuda").to(dtype)[:, shift : shift + features]
        out = torch.empty((rows, features + 3 * shift), device="cuda", dtype=dtype)[:, shift : shift + features]
        bias = torch.randn(features, device="cuda").to(dtype)
        turned = x.reshape(rows, matrices, slow, fast).mT.reshape(rows, features)
        Transposition(*size).run(x, out)
        assert_equal(out, turned)
        Transposition(*size).run(x, out, bias)
        assert_equal(out, (turned.float() + bias.float()).to(dtype))
