"""1x1 convolutions, which are replaced where that is asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flysurgery.errors import PlanError
from flysurgery.layers import ButterflyConv
from flysurgery.surgery import Plan, apply, densify, install, plan
from tests.support.tolerance import FP32, MIN_OUTPUTS


class Mobile(nn.Module):
    """A feed-forward block of convolutions, whose result goes through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(16, 64, 1), nn.Conv2d(64, 16, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(self.up(x).relu())).view(x.shape[0], 16, -1)


X = torch.zeros(2, 16, 8, 8)


def test_they_stay_by_default() -> None:
    with pytest.raises(PlanError, match="conv1x1 \\(2 layers\\): it is a 1x1 convolution, replaced only where convs are asked for"):
        plan(Mobile(), example=X)


def test_exact_products_keep_the_outputs(make_exact: Callable[[Plan, nn.Module], None]) -> None:
    torch.manual_seed(0)
    model, x = Mobile(), torch.randn(8, 16, 8, 8)
    made = Plan.from_json(plan(model, example=X, convs=True).to_json())
    make_exact(made, model)
    with torch.no_grad():
        truth = Mobile().double()
        truth.load_state_dict(model.state_dict())
        expected, before = truth(x.double()), model(x)
        apply(made, model)
        assert isinstance(model.up, ButterflyConv)
        after = model(x)
        assert densify(model) == 2
        densified = model(x)
    assert [type(layer) for layer in model.children()] == [nn.Conv2d, nn.Conv2d]
    assert expected.numel() >= MIN_OUTPUTS
    allowed = FP32.k * float((before - expected).square().mean().sqrt())
    assert 0 < allowed < 1e-4
    assert float((after - expected).square().mean().sqrt()) <= allowed
    assert float((densified - expected).square().mean().sqrt()) <= allowed


def test_install_names_the_tensors_as_a_linear_does() -> None:
    with torch.device("meta"):
        model = Mobile()
    install(plan(model, example=X, convs=True), model)
    assert sorted(model.state_dict()) == ["down.factors.0", "down.factors.1", "up.bias", "up.factors.0", "up.factors.1"]


def test_a_plan_for_convolutions_refuses_others() -> None:
    made, model = plan(Mobile(), example=X, convs=True), Mobile()
    model.up = nn.Conv2d(16, 64, 1, stride=2)
    with pytest.raises(PlanError, match="layer up: expected a 1x1 convolution without stride"):
        apply(made, model)
    assert isinstance(model.down, nn.Conv2d)


def test_calibration_sees_their_channels() -> None:
    model = Mobile()
    generator = torch.Generator().manual_seed(1)
    decay = 0.6 ** torch.arange(16)[:, None] * torch.randn(16, 16, generator=generator)
    x = torch.einsum("bchw,cn->bnhw", torch.randn(40, 16, 8, 8, generator=generator), decay)
    report = apply(plan(model, example=X, convs=True), model, calibrate=x)
    assert isinstance(model.up, ButterflyConv)
    for row in report.replaced:
        assert row.calibration is not None
        assert row.calibration.output_error < 0.95 * row.calibration.plain_output_error
