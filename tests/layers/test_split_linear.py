"""SplitLinear: layers side by side."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flysurgery.errors import PatternError
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.patterns import Architecture
from tests.support.problems import make_input
from tests.support.tolerance import FP32, assert_equal

SMALL = Architecture.of((1, 8, 6, 2), (2, 6, 4, 1))


def parts() -> dict[str, ButterflyLinear | nn.Linear]:
    return {"q": ButterflyLinear(SMALL), "k": nn.Linear(8, 3), "v": ButterflyLinear(SMALL, bias=False)}


@pytest.mark.parametrize("shape", [(5,), (2, 3), (0,), ()])
def test_joins_the_outputs_in_order(shape: tuple[int, ...]) -> None:
    children = parts()
    split = SplitLinear(children)
    x = make_input(torch.Size(shape).numel(), 8, FP32).view(*shape, 8)
    out = split(x)
    assert out.shape == (*shape, 35)
    start = 0
    for child in children.values():
        assert_equal(out[..., start : start + child.out_features].detach(), child(x).detach())
        start += child.out_features
    assert (split.in_features, split.out_features) == (8, 35) and "in_features=8, out_features=35" in repr(split)
    names = ["q.bias", "q.factors.0", "q.factors.1", "k.weight", "k.bias", "v.factors.0", "v.factors.1"]
    assert sorted(split.state_dict()) == sorted(names)


@pytest.mark.parametrize("split", [SplitLinear(parts()), SplitLinear({name: ButterflyLinear(SMALL) for name in "qkv"})])
def test_hooks_of_the_parts_run(split: SplitLinear) -> None:
    called = []
    for name, child in split.named_children():
        child.register_forward_hook(lambda module, inputs, output, name=name: called.append(name))
    split(torch.ones(2, 8))
    assert called == ["q", "k", "v"]


def test_parts_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(PatternError, match="at least one part"):
        SplitLinear({})
    with pytest.raises(PatternError, match="'q' takes 8, 'k' takes 9"):
        SplitLinear({"q": ButterflyLinear(SMALL), "k": nn.Linear(9, 3)})
