"""Models that are optimized for training: the same gradients, what stays as it is, and the way back."""

from __future__ import annotations

import copy
from statistics import median
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import flysurgery
from flysurgery.errors import InferenceError
from tests.inference.models import SMALL, images, left

ALL = {"patch_embed", "patch_embed.proj", *(f"blocks.{n}.{part}" for n in (0, 1) for part in ("attn", "attn.qkv", "attn.proj", "mlp.fc2"))}


def learning(*, convert: bool = False, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **SMALL | options)
    if convert:
        flysurgery.convert(model, "monarch", base="vit_tiny_patch16_224", base_args=SMALL | options)
    return model.train()


def gradients(model: nn.Module, x: Tensor, autocast: bool = False) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    y.double().square().sum().backward()
    return {"result": y.detach()} | {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative to each gradient's size; that of a bias of k, which is zero in truth, to that of the largest."""
    assert found.keys() == expected.keys()
    least = 1e-6 * max(float(each.norm()) for each in expected.values())
    return {name: float((found[name].double() - each).norm()) / max(float(each.norm()), least) for name, each in expected.items()}


@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("options", [{}, {"convert": True, "init_values": 0.5}])
def test_gradients_stay(options: dict[str, Any]) -> None:
    model = learning(**options).double()
    x = images(model, 3).double()
    before, names = gradients(model, x), [*model.state_dict()]
    report = flysurgery.optimize(model, x, training=True)
    assert {row.fqn for row in report.fused} == ALL and left(report) == {"norm": "no-gradients"}
    assert max(distance(gradients(model, x), before).values()) < 1e-12
    assert [*model.state_dict()] == names
    model.get_submodule("blocks.0").register_forward_hook(lambda *_: None)  # on a block itself, hooks may be there
    assert max(distance(gradients(model, x), before).values()) < 1e-12
    assert report.restore() > 0
    assert max(distance(gradients(model, x), before).values()) == 0


@pytest.mark.usefixtures("faster")
def test_under_autocast_errors_are_those_of_the_own_modules() -> None:
    model = learning()
    x = images(model, 8)
    truth = gradients(copy.deepcopy(model).double(), x.double())
    plain = distance(gradients(model, x, autocast=True), truth)
    with torch.autocast("cpu", torch.bfloat16):
        report = flysurgery.optimize(model, x, training=True)
    assert report.dtype == "bfloat16" and report.fused
    fused = distance(gradients(model, x, autocast=True), truth)
    ratios = {name: fused[name] / error for name, error in plain.items()}
    assert max(ratios.values()) < 4 and median(ratios.values()) < 1.5  # the stream between blocks is bfloat16, not float32


@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("option", ["drop_path_rate", "proj_drop_rate", "attn_drop_rate"])
def test_blocks_that_drop_something_stay(option: str) -> None:
    rates: dict[str, Any] = {option: 0.5}
    model = learning(**rates)
    report = flysurgery.optimize(model, images(model), training=True)
    codes = left(report)
    assert codes["blocks.1.mlp.fc2"] == codes["blocks.1.attn.proj"] == "dropout"


@pytest.mark.usefixtures("faster")
def test_a_rate_that_is_set_later_counts() -> None:
    model = learning()
    x = images(model, 3)
    flysurgery.optimize(model, x, training=True)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    seen = []
    for _ in range(2):
        torch.manual_seed(3)
        seen.append(gradients(model, x)["result"])
    assert torch.equal(*seen) and not torch.equal(seen[0], gradients(model.eval(), x)["result"])


@pytest.mark.usefixtures("faster")
def test_measuring_leaves_no_trace() -> None:
    model = learning()
    x = images(model, 3)
    parameters, before = [*model.parameters()], torch.get_rng_state()
    flysurgery.optimize(model, x, training=True)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert all(parameter.grad is None for parameter in parameters) and torch.equal(torch.get_rng_state(), before)


def test_other_values_are_refused() -> None:
    with pytest.raises(InferenceError, match="training must be False, True or 'captured', got 'eager'"):
        flysurgery.optimize(learning(), training="eager")  # pyright: ignore[reportArgumentType]
