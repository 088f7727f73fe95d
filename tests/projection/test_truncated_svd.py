"""The leading singular triples, above all where a Gram matrix alone would lose them, and the threads that find them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flysurgery.projection.truncated_svd import truncated_svd
from flysurgery.projection.workers import workers
from tests.projection.oracle import EXACT

FRESH = """
import timm, torch, flysurgery
model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=4, num_heads=3).cuda()
torch.set_num_threads(4)
report = flysurgery.convert(model, "monarch", calibrate=torch.rand(40, 3, 32, 32))
print(len(report.replaced))
"""


def with_singular_values(values: list[float], b: int, c: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    U, V = (torch.linalg.qr(torch.randn(n, len(values), generator=generator, dtype=torch.float64))[0] for n in (b, c))
    return U @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ V.mT


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.integers(0, 2**31))
def test_it_is_the_best_approximation_of_every_block(count: int, b: int, c: int, rank: int, seed: int) -> None:
    blocks = torch.randn(count, b, c, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    U, S, Vh = truncated_svd(blocks, rank)
    assert (U.shape, S.shape, Vh.shape) == ((count, b, rank), (count, rank), (count, rank, c))
    left = np.linalg.norm(blocks.numpy() - (U * S[:, None]).numpy() @ Vh.numpy(), axis=(1, 2))
    tails = np.linalg.norm(np.linalg.svd(blocks.numpy(), compute_uv=False)[:, rank:], axis=1)
    assert left == pytest.approx(tails, rel=EXACT, abs=EXACT * float(blocks.norm()))


@pytest.mark.parametrize(("b", "c"), [(60, 20), (20, 60), (20, 20)])
@pytest.mark.parametrize("smallest", [1e-2, 1e-3, 1e-4, 1e-7, 1e-9, 1e-12])
def test_small_singular_values_are_kept(b: int, c: int, smallest: float) -> None:
    values = np.geomspace(1, smallest, 5).tolist()
    blocks = torch.stack([with_singular_values(values, b, c, seed) for seed in range(3)])
    U, S, Vh = truncated_svd(blocks, 5)
    assert float((U * S[:, None] @ Vh - blocks).norm()) <= 1e-12 * float(blocks.norm())
    assert S.numpy() == pytest.approx(np.tile(values, (3, 1)), rel=1e-3) and (S.diff(dim=1) <= 0).all()
    assert max(float((each @ each.mT - torch.eye(5)).norm()) for each in (U.mT, Vh)) <= 1e-8


@pytest.mark.parametrize("magnitude", [1e-200, 1e-160, 1e160, 1e200])
def test_squares_neither_overflow_nor_vanish(magnitude: float) -> None:
    block = with_singular_values([3.0, 1.0], 6, 4)[None]
    U, S, Vh = truncated_svd(block * magnitude, 2)
    assert torch.linalg.norm((U * (S / magnitude)[:, None]) @ Vh - block) <= EXACT


def test_threads_are_given_back_after_a_failure() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        truncated_svd(torch.stack([with_singular_values([1.0, 1e-9], 6, 4)]), 2)
        with pytest.raises(ZeroDivisionError), workers() as pool:
            assert pool.submit(torch.get_num_threads).result() == 1
            pool.submit(lambda: 1 // 0).result()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.gpu
def test_the_first_linear_algebra_of_a_process_may_be_that_of_threads() -> None:
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "12"
