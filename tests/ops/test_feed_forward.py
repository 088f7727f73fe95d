"""A feed-forward block that no kernel takes says why, and what is remembered of one that kernels take holds no tensors."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from flysurgery.errors import BackendError
from flysurgery.ops import Dense, FeedForward, FusedFactors, Gated, Norm, feed_forward, launches, reason, run, ways
from flysurgery.patterns import Architecture, monarch

WIDTH, HIDDEN = 32, 64


def factors(architecture: Architecture) -> FusedFactors:
    return FusedFactors(tuple(torch.zeros(pattern.factor_shape) for pattern in architecture), torch.zeros(architecture.out_features))


@pytest.fixture(autouse=True)
def _any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tensors of any device through to the kernels, of which those for norms and gates take them and those for more do not."""
    monkeypatch.setattr(ways, "_decided", {})
    for module, name in ((ways, "_obstacle"), (feed_forward, "norm_reason"), (feed_forward, "gated_obstacle")):
        monkeypatch.setattr(module, name, lambda *_: None)
    for name in ("takes_few_rows", "takes_ffn", "in_one_launch", "takes_gated_dense"):
        monkeypatch.setattr(feed_forward, name, lambda *_, **__: False)
    monkeypatch.setattr(launches, "_has_fewest", lambda *_: False)


def test_what_no_kernel_takes_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, words in (("whole_reason", "not whole"), ("epilogue_reason", "no epilogue")):
        monkeypatch.setattr(feed_forward, name, lambda *_, words=words, **__: words)
    block = FeedForward(Norm(torch.ones(WIDTH), None), factors(monarch(HIDDEN, WIDTH)), factors(monarch(WIDTH, HIDDEN)), "gelu")
    x = torch.zeros(3, WIDTH)
    assert reason(x, block) == "not whole; no epilogue"
    with pytest.raises(BackendError, match="not whole; no epilogue"):
        run(x, block)


def test_what_is_remembered_holds_no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_forward, "epilogue_reason", lambda *_, **__: None)
    dense, down, scale, x = Dense(torch.zeros(HIDDEN, WIDTH)), factors(monarch(WIDTH, HIDDEN)), torch.ones(WIDTH), torch.zeros(3, WIDTH)
    references = [weakref.ref(tensor) for tensor in (x, scale, *down.tensors)]
    block = FeedForward(Norm(torch.ones(WIDTH), None), Gated((dense, dense)), down, "gelu", scale, True, Norm(None, None))
    assert reason(x, block) is None
    del block, x, down, scale
    gc.collect()
    assert all(reference() is None for reference in references)
