"""A training step of converted layers through ``torch.compile``: one graph, made once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from flysurgery.factors import storage
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.patterns import Architecture

WIDE = Architecture.of((1, 8, 6, 2), (2, 6, 4, 1))
NARROW = Architecture.of((1, 4, 6, 2), (2, 6, 8, 1))


def small_model() -> nn.Module:
    split = SplitLinear({name: ButterflyLinear(Architecture.of((1, 4, 2, 2), (2, 2, 4, 1))) for name in "qkv"})
    return nn.Sequential(ButterflyLinear(WIDE), nn.GELU(), ButterflyLinear(NARROW), split)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_step_is_one_graph_made_once(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(storage, "_known", {})  # nothing has met these shapes before
    torch.manual_seed(0)
    model, x = small_model(), torch.randn(5, 8)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found, expected = compiled(x), model(x)
        torch.testing.assert_close(found, expected, rtol=2e-2 if autocast else 1e-5, atol=2e-2 if autocast else 1e-6)
        found.float().square().mean().backward()
        optimizer.step()
    assert counter.frame_count == 1
