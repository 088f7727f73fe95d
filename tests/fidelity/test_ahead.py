"""Batches that are made beside the update before theirs are the same ones, each as it was made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flysurgery.fidelity import made_ahead


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_all_batches_come_in_order_and_whole(kind: str) -> None:
    device, made, size = torch.device(kind), list[int](), 512 if kind == "cuda" else 8

    def batches() -> Iterator[tuple[Tensor, ...]]:
        for number in range(20):
            made.append(number)
            x = torch.randn(size, size, generator=torch.Generator(device).manual_seed(number), device=device)
            for _ in range(20):
                x = torch.tanh(x @ x)  # takes longer than the use of the batch before
            yield x, torch.full((3,), number, device=device)

    expected, used = [x.clone() for x, _ in batches()], list[Tensor]()
    made.clear()
    for number, (x, label) in enumerate(made_ahead(batches(), device)):
        assert len(made) == number + 1 + (kind == "cuda" and number < 19)
        used.append(x + label[0])
        del x, label  # whose memory others may take as soon as nothing uses it
    assert len(used) == 20
    assert all(torch.equal(mine, theirs + number) for number, (mine, theirs) in enumerate(zip(used, expected, strict=True)))
    assert next(made_ahead(iter(()), device), None) is None
