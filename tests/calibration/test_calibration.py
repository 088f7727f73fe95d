"""Calibration data as they come, and what is collected from a forward: moments, sensitivities, and a model as before."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flysurgery.calibration import Samples, collect, samples_of, sensitivities
from flysurgery.errors import DataError, OptionError, SurgeryError
from tests.support.composed import Composed


def step(self: Any, x: Tensor) -> Tensor:
    """``twice`` is called two times; ``unused`` never; ``late`` comes after all of them."""
    x = self.first(self.norm(x))
    x = self.twice(torch.relu(self.twice(x)))
    self.late_calls += 1
    return self.late(x)


@pytest.fixture
def net() -> Composed:
    torch.manual_seed(1)
    linears = {name: nn.Linear(6, 6) for name in ("first", "twice", "unused")}
    net = Composed(step, norm=nn.BatchNorm1d(6), **linears, late=nn.Linear(6, 2), late_calls=0).train()
    net.norm.running_mean = torch.randn(6)
    return net


@pytest.fixture
def batches() -> list[Tensor]:
    return list(torch.randn(40, 6, generator=torch.Generator().manual_seed(2)).split(9))


def test_moments_are_those_of_the_inputs_and_a_forward_ends_with_the_last_wanted_call(net: Composed, batches: list[Tensor]) -> None:
    state = {name: value.clone() for name, value in net.state_dict().items()}
    found = collect(net, {"first": 1, "twice": 2}, batches)
    assert net.late_calls == 0
    with torch.no_grad():
        x = net.eval().norm(torch.cat(batches))
        y = net.first(x)
        z = torch.relu(net.twice(y))
    net.train()
    for name, rows in (("first", x), ("twice", torch.cat([y, z]))):
        assert found[name].rows == len(rows)
        assert torch.allclose(found[name].second, rows.double().mT @ rows.double() / len(rows), rtol=1e-5, atol=1e-6)
    collect(net, {"late": 1}, batches)
    assert net.late_calls == len(batches)
    assert net.training and net.norm.training
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
    assert all(not module._forward_pre_hooks for module in net.modules())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_failures_name_the_layer_or_the_reason_and_leave_no_hooks(net: Composed, batches: list[Tensor]) -> None:
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


def test_sensitivities_are_the_squares_of_the_derivative() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).double()
    found = sensitivities(model, ["0", "1"], [torch.randn(4000, 6, dtype=torch.float64)])
    assert found["1"] == pytest.approx(1)
    assert found["0"] == pytest.approx(float(model[1].weight.detach().square().sum()) / 5, rel=0.1)
    assert all(parameter.grad is None for parameter in model.parameters())


SHAPE = (3, 4, 4)


def images(count: int) -> Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(count))


def test_tensors_batches_data_sets_and_loaders_are_the_same_data_and_no_more_is_read_than_needed() -> None:
    x, classes = images(20), torch.arange(20)
    dataset = TensorDataset(x, classes)
    for data in (x, Samples(x), list(x.split(6)), [(part, None) for part in x.split(6)], dataset, DataLoader(dataset, 7)):
        assert torch.equal(samples_of(data, count=15, shape=SHAPE).inputs, x[:15])
    assert len(samples_of(images(7), shape=SHAPE)) == 7 and len(samples_of(torch.zeros(600, 1))) == 512

    def loader() -> Iterator[Tensor]:
        yield from (images(4), images(4), images(4))
        raise AssertionError("ten samples are there already")

    assert len(samples_of(loader(), count=10)) == 10


@pytest.mark.parametrize(("count", "batches"), [(2, 1), (3, 2), (5, 4), (23, 10), (400, 10), (2000, 50)])
def test_every_sample_fits_or_judges_and_none_does_both(count: int, batches: int) -> None:
    """At least eight batches, where there are so many samples, and of at most 32."""
    samples = Samples(torch.arange(count, dtype=torch.float32)[:, None])
    fit, held_out = list(samples.fit()), torch.cat(list(samples.held_out()))
    assert sorted(torch.cat([*fit, held_out])[:, 0].tolist()) == list(range(count))
    assert len(held_out) == samples.held_out_count == max(1, count // 5)
    assert len(fit) == batches and max(map(len, fit)) <= 32


@pytest.mark.parametrize(
    ("data", "count", "words"),
    [
        (torch.zeros(5, 1, 4, 4), None, r"takes samples of shape \(3, 4, 4\), got \(1, 4, 4\) \(another number of channels\)"),
        (torch.zeros(5, 48), None, r"got \(48,\); prepare them"),
        (images(5), 6, "6 were asked for and there are 5 samples"),
        (images(1), None, "at least 2 are needed and there are 1"),
        (images(5).to(torch.uint8), None, "expected floating-point inputs"),
        (torch.full((5, *SHAPE), torch.nan), None, "NaN or infinite"),
        ("digits", None, "expected calibration data as a tensor or as batches of tensors, got 'digits'"),
        ([{"image": 1}], None, "expected batches of tensors"),
        ([], None, "hold no samples"),
        ([images(2), torch.zeros(2, 1, 4, 4)], None, "must have one shape"),
        *((images(5), count, "at least 2 samples") for count in (1, 0, -3, 2.5)),
    ],
)
def test_other_data_and_counts_are_refused_in_a_sentence(data: object, count: int | None, words: str) -> None:
    with pytest.raises((DataError, OptionError), match=words):
        samples_of(data, count=count, shape=SHAPE)
