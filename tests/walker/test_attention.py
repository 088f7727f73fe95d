"""Attention with a linear for each product gives what ``nn.MultiheadAttention`` gives, for all of its arguments."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flysurgery.walker import SeparateAttention, separated, walk
from tests.support.composed import Composed
from tests.support.models import is_close

WIDTH, COUNT, BATCH, QUERIES, KEYS = 24, 3, 2, 5, 7


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    made = nn.MultiheadAttention(WIDTH, COUNT, dtype=torch.float64, **options)
    for parameter in made.parameters():  # biases start at zero
        nn.init.normal_(parameter, std=0.3)
    return made


def inputs(made: nn.MultiheadAttention, batched: bool) -> list[Tensor]:
    sizes = ((QUERIES, WIDTH), (KEYS, made.kdim), (KEYS, made.vdim))
    found = [torch.randn(BATCH, *size, dtype=torch.float64, requires_grad=True) for size in sizes]
    return found if batched and made.batch_first else [x.transpose(0, 1) if batched else x[0] for x in found]


def masks(batched: bool) -> dict[str, dict[str, Any]]:
    count = BATCH * COUNT if batched else COUNT
    causal = nn.Transformer.generate_square_subsequent_mask(KEYS, dtype=torch.float64)[:QUERIES]
    padding = torch.tensor([[False] * KEYS, [False] * 4 + [True] * 3])
    padding = padding if batched else padding[1]
    return {
        "none": {},
        "added": {"attn_mask": torch.randn(QUERIES, KEYS, dtype=torch.float64)},
        "of each head": {"attn_mask": torch.randn(count, QUERIES, KEYS, dtype=torch.float64)},
        "causal": {"attn_mask": causal, "is_causal": True},
        "of truth values": {"attn_mask": causal < 0},
        "padding": {"key_padding_mask": padding},
        "both": {"key_padding_mask": padding, "attn_mask": causal < 0},
    }


OPTIONS: list[dict[str, Any]] = [{}, {"bias": False}, {"kdim": 10, "vdim": 14}, {"dropout": 0.3}]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
def test_results_weights_and_gradients(options: dict[str, Any], batch_first: bool) -> None:
    made = attention(batch_first=batch_first, **options)
    apart = SeparateAttention(made)
    for batched in (True, False):
        for name, given in masks(batched).items():
            for kind in ({}, {"average_attn_weights": False}, {"need_weights": False}):
                q, k, v = inputs(made, batched)
                found = []
                for module in (made, apart):
                    torch.manual_seed(1)  # for dropout
                    result, weights = module(q, k, v, **given, **kind)
                    found.append([result, weights, *torch.autograd.grad(result.square().sum(), (q, k, v))])
                for expected, got in zip(*found, strict=True):
                    assert (got is None) == (expected is None) and (got is None or is_close(got, expected, 1e-12)), (name, kind)
    with pytest.raises(RuntimeError, match="give the mask too"):  # as in torch
        apart(q, k, v, is_causal=True)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
def test_there_and_back(options: dict[str, Any]) -> None:
    made = attention(**options).eval()
    made.in_proj_bias = None if made.in_proj_bias is None else made.in_proj_bias.requires_grad_(False)
    apart = SeparateAttention(made)
    assert not any(module.training for module in apart.modules())
    again = apart.joined()
    assert again.state_dict().keys() == made.state_dict().keys()
    for name, parameter in made.named_parameters():
        other = again.get_parameter(name)
        assert torch.equal(other, parameter) and other.requires_grad == parameter.requires_grad, name
    assert again.__dict__.keys() == made.__dict__.keys()
    assert all(again.__dict__[name] == made.__dict__[name] for name in ("batch_first", "dropout", "kdim", "vdim"))
    if made.in_proj_weight is not None:
        assert apart.in_proj_weight is not None and torch.equal(apart.in_proj_weight, made.in_proj_weight)
        assert apart.q.weight.data_ptr() == made.in_proj_weight.data_ptr()  # a view: a walk copies no weight


def test_what_stays_together() -> None:
    def names(model: nn.Module) -> set[str]:
        return {target.fqn for target in walk(model, (torch.zeros(2, 5, WIDTH),) * 3)}

    def two(tied: bool) -> nn.Module:
        first, second = nn.MultiheadAttention(WIDTH, 3), nn.MultiheadAttention(WIDTH, 3)
        second.in_proj_weight = first.in_proj_weight if tied else second.in_proj_weight
        return Composed(lambda self, q, k, v: self.second(self.first(q, k, v)[0], k, v)[0], first=first, second=second)

    assert names(two(tied=False)) == {f"{each}.{name}" for each in ("first", "second") for name in ("q", "k", "v", "out_proj")}
    assert names(two(tied=True)).isdisjoint({"first.q", "second.q"})
    for option in ("add_bias_kv", "add_zero_attn"):
        assert separated(nn.Sequential(nn.MultiheadAttention(WIDTH, 3, **{option: True}))) == {}
    assert names(nn.MultiheadAttention(WIDTH, 3)) == {"in_proj_weight", "out_proj"}  # a model cannot be replaced in itself
