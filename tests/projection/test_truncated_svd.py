"""The leading singular triples, above all where a Gram matrix alone would lose them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flysurgery.projection.truncated_svd import truncated_svd
from tests.projection.oracle import EXACT


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
    assert S.numpy() == pytest.approx(np.tile(values, (3, 1)), rel=1e-3)


def test_vectors_are_orthonormal_and_values_descend() -> None:
    blocks = torch.stack([with_singular_values([3.0, 1.0, smallest], 8, 5) for smallest in (0.5, 1e-6)])
    U, S, Vh = truncated_svd(blocks, 3)
    identity = torch.eye(3, dtype=torch.float64).expand(2, 3, 3)
    assert torch.linalg.norm(U.mT @ U - identity) <= EXACT
    assert torch.linalg.norm(Vh @ Vh.mT - identity) <= EXACT
    assert (S.diff(dim=1) <= 0).all()


@pytest.mark.parametrize("magnitude", [1e-200, 1e-160, 1e160, 1e200])
def test_squares_neither_overflow_nor_vanish(magnitude: float) -> None:
    block = with_singular_values([3.0, 1.0], 6, 4)[None]
    U, S, Vh = truncated_svd(block * magnitude, 2)
    assert torch.linalg.norm((U * (S / magnitude)[:, None]) @ Vh - block) <= EXACT


def test_the_number_of_threads_is_left_as_it_was() -> None:
    before = torch.get_num_threads()
    truncated_svd(torch.stack([with_singular_values([1.0, 1e-9], 6, 4)]), 2)
    assert torch.get_num_threads() == before
