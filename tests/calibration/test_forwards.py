"""Collected moments are those of the tensors that layers are given, and a model that was watched is as before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flysurgery.calibration import collect, sensitivities, watched
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


def test_a_forward_ends_with_the_last_wanted_call_and_the_model_is_as_before(net: Net, batches: list[Tensor]) -> None:
    state = {name: value.clone() for name, value in net.state_dict().items()}
    collect(net, {"first": 1, "twice": 2}, batches)
    assert net.late_calls == 0
    collect(net, {"late": 1}, batches)
    assert net.late_calls == len(batches)
    assert net.training and net.norm.training
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
    assert all(not module._forward_pre_hooks for module in net.modules())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_failures_name_the_layer_or_the_reason_and_leave_no_hooks(net: Net, batches: list[Tensor]) -> None:
    with pytest.raises(SurgeryError, match="layer unused was not called"):
        collect(net, {"first": 1, "unused": 1}, batches)
    with pytest.raises(DataError, match=r"fails on inputs of shape \(4, 7\): .*7"):
        collect(net, {"first": 1}, [torch.randn(4, 7)])
    with pytest.raises(SurgeryError, match="layer unused has no finite gradient"):
        sensitivities(net, ["first", "unused"], batches)
    nn.init.constant_(net.first.weight, torch.inf)
    with pytest.raises(SurgeryError, match="layer twice is given NaN or infinite inputs"):
        collect(net, {"first": 1, "twice": 2}, batches)
    assert net.training and not any(module._forward_pre_hooks or module._forward_hooks for module in net.modules())


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


def test_sensitivities_are_the_squares_of_the_derivative() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).double()
    found = sensitivities(model, ["0", "1"], [torch.randn(4000, 6, dtype=torch.float64)])
    assert found["1"] == pytest.approx(1)
    assert found["0"] == pytest.approx(float(model[1].weight.detach().square().sum()) / 5, rel=0.1)  # pyright: ignore
    assert all(parameter.grad is None for parameter in model.parameters())
