"""Steps that are shares of a parameter's size."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from flysurgery.fidelity import Muon, parameter_groups
from flysurgery.fidelity.optimizer import orthogonal
from flysurgery.layers import ButterflyLinear
from flysurgery.patterns import monarch


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(ButterflyLinear(monarch(24, 36, 3)), nn.LayerNorm(24), nn.Linear(24, 10))


def test_orthogonal_moves_have_the_singular_vectors_of_the_matrix_and_values_near_one() -> None:
    torch.manual_seed(1)
    left, right = torch.linalg.qr(torch.randn(4, 20, 8))[0], torch.linalg.qr(torch.randn(4, 8, 8))[0]
    values = torch.linspace(0.05, 1, 8)
    found = orthogonal(left @ torch.diag(values) @ right.mT)
    core = left.mT @ found @ right
    assert torch.all((core.diagonal(dim1=1, dim2=2) > 0.6) & (core.diagonal(dim1=1, dim2=2) < 1.3))
    assert (core - torch.diag_embed(core.diagonal(dim1=1, dim2=2))).abs().max() < 0.05


def test_groups_hold_every_parameter_once_with_the_blocks_of_its_factor() -> None:
    network = model()
    network[1].bias.requires_grad_(False)
    groups = parameter_groups(network)
    members = [parameter for group in groups for parameter in group["params"]]
    assert len(members) == len(set(members)) == len(list(network.parameters())) - 1
    blocks = {parameter: group["block"] for group in groups for parameter in group["params"]}
    layer = network[0]
    assert isinstance(layer, ButterflyLinear)
    assert [blocks[factor] for factor in layer.factors] == [(pattern.b, pattern.c) for pattern in layer.architecture]
    assert blocks[network[2].weight] == (10, 24)
    assert blocks[network[2].bias] is None


def test_a_step_moves_each_parameter_by_its_size_times_the_rate() -> None:
    network = model()
    with torch.no_grad():
        network[1].weight.mul_(8)
    before = copy.deepcopy(network)
    optimizer = Muon(parameter_groups(network), lr=1e-2)
    for _ in range(2):
        network(torch.randn(64, 36)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, old), new in zip(before.named_parameters(), network.parameters(), strict=True):
        moved = float((new - old).detach().square().mean().sqrt())
        size = max(float(old.detach().square().mean().sqrt()), 1e-3)
        assert 0.2 < moved / (2e-2 * size) < 3, name


def test_each_block_of_a_factor_is_a_matrix_of_its_own() -> None:
    layer = ButterflyLinear(monarch(24, 36, 3), bias=False)
    old = layer.factors[0].detach().clone()
    optimizer = Muon(parameter_groups(layer), lr=1.0)
    gradient = torch.zeros_like(old)
    gradient[:, :, :, 1] = torch.randn_like(gradient[:, :, :, 1])
    layer.factors[0].grad = gradient
    optimizer.step()
    moved = (layer.factors[0].detach() - old).abs().amax((0, 1, 2))
    assert moved[1] > 0 and moved[0] == moved[2] == 0


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_state_that_is_loaded_goes_on_with_the_same_steps(as_tensor: bool) -> None:
    def steps(network: nn.Module, optimizer: Muon, numbers: range) -> None:
        for number in numbers:
            torch.manual_seed(number)
            network(torch.randn(16, 36)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    rate = torch.tensor(1e-2) if as_tensor else 1e-2
    networks = [model() for _ in range(3)]
    optimizers = [Muon(parameter_groups(each), lr=rate) for each in networks]
    steps(networks[0], optimizers[0], range(4))
    steps(networks[1], optimizers[1], range(2))
    networks[2].load_state_dict(networks[1].state_dict())
    optimizers[2].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    steps(networks[2], optimizers[2], range(2, 4))
    for one, other in zip(networks[0].parameters(), networks[2].parameters(), strict=True):
        assert torch.equal(one, other)
