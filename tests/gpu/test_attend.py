"""Which attention kernel is asked; on the CPU, with the kernels replaced by the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops import Attention, attend, reason, run, ways
from tests.support.tolerance import assert_equal


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were asked, in turn; every device will do."""
    names: list[str] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mode: str, few: bool) -> Tensor:
        names.append("few queries" if few else "whole heads")
        return Attention(k, v, scale).plainly(q).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(attend, "run_attention", attention)
    monkeypatch.setattr(ways, "_decided", {})
    monkeypatch.setattr(ways, "_obstacle", lambda *_: None)
    monkeypatch.setattr(attend, "shared_limit_of", lambda _: 227 * 1024)
    return names


def operands(images: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = torch.randn(3, images, 2, tokens, 64, generator=generator).half()
    return q, k, v


def test_few_queries_have_a_kernel_of_their_own(asked: list[str]) -> None:
    for images, tokens in ((1, 50), (60, 50), (1, 257)):
        q, k, v = operands(images, tokens)
        assert_equal(run(q, Attention(k, v)), Attention(k, v, None).plainly(q))
    assert asked == ["few queries", "whole heads", "whole heads"]


def test_long_sequences_are_left_to_pytorch(asked: list[str]) -> None:
    q, k, v = operands(1, 1000)
    assert "1000 keys" in str(reason(q, Attention(k, v)))
    with pytest.raises(BackendError, match="exceed 232448 bytes of shared memory; PyTorch has a kernel"):
        run(q, Attention(k, v))
    assert not asked
