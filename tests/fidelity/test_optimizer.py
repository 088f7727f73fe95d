"""Steps that are shares of a parameter's size, and a copy in bfloat16 that works for parameters in float32."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import Tensor, nn

from flysurgery.fidelity import Muon, parameter_groups
from flysurgery.fidelity.copies import HalfCopy, precision
from flysurgery.fidelity.optimizer import orthogonal
from flysurgery.layers import ButterflyLinear
from flysurgery.patterns import monarch


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(ButterflyLinear(monarch(24, 36, 3)), nn.LayerNorm(24), nn.Linear(24, 10))


def steps(network: nn.Module, optimizer: Muon, numbers: range) -> None:
    for number in numbers:
        torch.manual_seed(number)
        network(torch.randn(64, 36)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_orthogonal_moves_have_the_singular_vectors_of_the_matrix_and_values_near_one() -> None:
    torch.manual_seed(1)
    left, right = torch.linalg.qr(torch.randn(4, 20, 8))[0], torch.linalg.qr(torch.randn(4, 8, 8))[0]
    core = left.mT @ orthogonal(left @ torch.diag(torch.linspace(0.05, 1, 8)) @ right.mT) @ right
    diagonal = core.diagonal(dim1=1, dim2=2)
    assert torch.all((diagonal > 0.6) & (diagonal < 1.3)) and (core - torch.diag_embed(diagonal)).abs().max() < 0.05


def test_groups_hold_every_parameter_once_with_the_blocks_of_its_factor() -> None:
    network = model()
    network[1].bias.requires_grad_(False)
    groups = parameter_groups(network)
    assert sum(len(group["params"]) for group in groups) == len(list(network.parameters())) - 1
    blocks = {parameter: group["block"] for group in groups for parameter in group["params"]}
    assert [blocks[factor] for factor in network[0].factors] == [(pattern.b, pattern.c) for pattern in network[0].architecture]
    assert blocks[network[2].weight] == (10, 24) and blocks[network[2].bias] is None


def test_a_step_moves_each_parameter_by_its_size_times_the_rate_and_each_block_on_its_own() -> None:
    network = model()
    with torch.no_grad():
        network[1].weight.mul_(8)
    before = copy.deepcopy(network)
    steps(network, Muon(parameter_groups(network), lr=1e-2), range(2))
    for (name, old), new in zip(before.named_parameters(), network.parameters(), strict=True):
        moved = float((new - old).detach().square().mean().sqrt())
        assert 0.2 < moved / (2e-2 * max(float(old.detach().square().mean().sqrt()), 1e-3)) < 3, name
    layer, factor = network[0], network[0].factors[0]
    old, factor.grad = factor.detach().clone(), torch.zeros_like(factor)
    factor.grad[:, :, :, 1] = torch.randn_like(factor[:, :, :, 1])
    Muon(parameter_groups(layer), lr=1.0).step()
    moved = (factor.detach() - old).abs().amax((0, 1, 2))
    assert moved[1] > 0 and moved[0] == moved[2] == 0


@pytest.mark.parametrize("rate", [1e-2, torch.tensor(1e-2)])
def test_a_state_that_is_loaded_goes_on_with_the_same_steps(rate: float | Tensor) -> None:
    whole, begun, resumed = networks = [model() for _ in range(3)]
    optimizers = [Muon(parameter_groups(each), lr=rate) for each in networks]
    steps(whole, optimizers[0], range(4))
    steps(begun, optimizers[1], range(2))
    resumed.load_state_dict(begun.state_dict())
    optimizers[2].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    steps(resumed, optimizers[2], range(2, 4))
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_gradients_come_back_in_float32_and_values_go_over() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    network.unused = nn.Linear(4, 4)
    network[0].bias.requires_grad_(False)
    half, x = HalfCopy(network), torch.randn(32, 8)
    half.model[:3](x.bfloat16()).float().square().sum().backward()
    half.give_gradients()
    found = {name: parameter.grad for name, parameter in network.named_parameters() if parameter.grad is not None}
    assert list(found) == ["0.weight", "2.weight", "2.bias"] and all(parameter.grad is None for parameter in half.model.parameters())
    network.zero_grad()
    network[:3](x).square().sum().backward()
    for name, gradient in found.items():
        exact = network.get_parameter(name).grad
        assert gradient.dtype == torch.float32 and exact is not None and (gradient - exact).norm() < 0.02 * exact.norm()
    with torch.no_grad():
        network[2].weight.add_(1.0)
    half.take_values()
    assert torch.equal(half.model[2].weight, network[2].weight.bfloat16())


class Mixes(nn.Linear):
    """Adds a float32 tensor, as models do that make their positions in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.linspace(0, 1, 4))


def test_models_that_mix_dtypes_run_under_autocast() -> None:
    x = torch.randn(2, 4, dtype=torch.bfloat16)
    plain, mixes = HalfCopy(nn.Linear(4, 4)).model, HalfCopy(Mixes(4, 4)).model
    assert isinstance(precision((plain,), x), contextlib.nullcontext)
    with precision((plain, mixes), x):
        assert mixes(x).dtype == torch.bfloat16
