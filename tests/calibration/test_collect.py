"""Collected moments are those of the tensors that layers are given, and a model that was watched is as before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flysurgery.calibration import collect, watched
from flysurgery.errors import DataError, SurgeryError


class Net(nn.Module):
    """``twice`` is called two times; ``unused`` never; ``late`` comes after all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.first = nn.Linear(6, 6)
        self.twice = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)
        self.late = nn.Linear(6, 2)
        self.late_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.norm(x))
        x = self.twice(torch.relu(self.twice(x)))
        self.late_calls += 1
        return self.late(x)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(1)
    net = Net().train()
    net.norm.running_mean = torch.randn(6)
    return net


@pytest.fixture
def batches() -> list[Tensor]:
    return list(torch.randn(40, 6, generator=torch.Generator().manual_seed(2)).split(9))


def test_moments_are_those_of_the_inputs_in_eval_mode(net: Net, batches: list[Tensor]) -> None:
    found = collect(net, {"first": 1, "twice": 2}, batches)
    net.eval()
    with torch.no_grad():
        x = net.norm(torch.cat(batches))
        y = net.first(x)
        z = torch.relu(net.twice(y))
    for name, rows in (("first", x), ("twice", torch.cat([y, z]))):
        assert found[name].rows == len(rows)
        assert torch.allclose(found[name].second, rows.double().mT @ rows.double() / len(rows), rtol=1e-5, atol=1e-6)


def test_a_forward_ends_with_the_last_wanted_call(net: Net, batches: list[Tensor]) -> None:
    collect(net, {"first": 1, "twice": 2}, batches)
    assert net.late_calls == 0
    collect(net, {"late": 1}, batches)
    assert net.late_calls == len(batches)


def test_the_model_is_as_before(net: Net, batches: list[Tensor]) -> None:
    state = {name: value.clone() for name, value in net.state_dict().items()}
    collect(net, {"first": 1}, batches)
    assert net.training and net.norm.training
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
    assert all(not module._forward_pre_hooks for module in net.modules())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_layer_that_is_not_called_is_named(net: Net, batches: list[Tensor]) -> None:
    with pytest.raises(SurgeryError, match="layer unused was not called"):
        collect(net, {"first": 1, "unused": 1}, batches)
    assert not net.first._forward_pre_hooks


def test_inputs_that_are_not_finite_name_the_layer(net: Net, batches: list[Tensor]) -> None:
    nn.init.constant_(net.first.weight, torch.inf)
    with pytest.raises(SurgeryError, match="layer twice is given NaN or infinite inputs"):
        collect(net, {"first": 1, "twice": 2}, batches)


def test_a_model_that_fails_says_why(net: Net) -> None:
    with pytest.raises(DataError, match=r"fails on calibration inputs of shape \(4, 7\): .*7"):
        collect(net, {"first": 1}, [torch.randn(4, 7)])
    assert net.training and not net.first._forward_pre_hooks


def test_a_pass_that_is_made_anyway_can_be_watched(net: Net, batches: list[Tensor]) -> None:
    expected = collect(net, {"first": 1, "twice": 2}, batches)
    net.eval()
    with watched(net, ["first", "twice"]) as found:
        for batch in batches:
            net(batch.requires_grad_())
    for fqn, moments in expected.items():
        assert torch.allclose(found[fqn].covariance, moments.covariance, rtol=1e-12)
        assert found[fqn].rows == moments.rows and not found[fqn].covariance.requires_grad
    assert net.late_calls and not net.first._forward_pre_hooks
    with pytest.raises(SurgeryError, match="unused was not called"), watched(net, ["unused"]):
        net(batches[0])
