"""A copy in bfloat16 works for a model whose parameters stay in float32."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from flysurgery.fidelity.copies import HalfCopy, precision


def test_gradients_come_back_in_float32_and_values_go_over() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    model.unused = nn.Linear(4, 4)
    model[0].bias.requires_grad_(False)
    half, x = HalfCopy(model), torch.randn(32, 8)
    half.model[:3](x.bfloat16()).float().square().sum().backward()
    half.give_gradients()
    found = [parameter.grad for parameter in model.parameters()]
    assert all(parameter.grad is None for parameter in half.model.parameters())
    model.zero_grad()
    model[:3](x).square().sum().backward()
    assert found[1] is None and model[0].bias.grad is None, "it does not learn"
    assert found[4] is None and found[5] is None, "it has no gradient"
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        if gradient is not None and parameter.grad is not None:
            assert gradient.dtype == torch.float32
            assert (gradient - parameter.grad).norm() < 0.02 * parameter.grad.norm()
    with torch.no_grad():
        model[2].weight.add_(1.0)
    half.take_values()
    assert torch.equal(half.model[2].weight, model[2].weight.bfloat16())


class Mixes(nn.Module):
    """Adds a float32 tensor, as models do that make their positions in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + torch.linspace(0, 1, 4))


def test_models_that_mix_dtypes_run_under_autocast() -> None:
    x = torch.randn(2, 4, dtype=torch.bfloat16)
    plain, mixes = HalfCopy(nn.Linear(4, 4)).model, HalfCopy(Mixes()).model
    assert isinstance(precision((plain,), x), contextlib.nullcontext)
    with precision((plain, mixes), x):
        assert mixes(x).dtype == torch.bfloat16
