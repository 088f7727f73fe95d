"""On a GPU: whole forwards as CUDA graphs."""

from __future__ import annotations

import pytest
import torch

import flysurgery
from flysurgery.errors import InferenceError
from flysurgery.gpu import weight_cache as derivation
from flysurgery.gpu.weight_cache import forget_derived
from tests.inference.models import images, small
from tests.support.tolerance import assert_equal

pytestmark = pytest.mark.gpu


def test_replays_give_what_the_model_gives() -> None:
    model = small(embed_dim=64)
    x = images(model).cuda()
    model.cuda()
    captured = flysurgery.capture(model, x)
    with torch.no_grad():
        for scale in (1.0, -2.0):
            assert_equal(captured(scale * x), model(scale * x))
    first = captured(x)
    kept = first.clone()
    shared = captured(2 * x, fresh=False)
    assert_equal(first, kept)
    captured(x, fresh=False)
    assert_equal(shared, kept)
    assert_equal(captured(x.clone().requires_grad_()), kept)
    assert not captured._input.requires_grad
    with torch.inference_mode():
        captured = flysurgery.capture(model, 3 * x)
        assert_equal(captured(x), kept)
    assert_equal(captured(x), kept)  # out of the mode that it was made in
    with pytest.raises(InferenceError, match="captured for"):
        captured(x[:1])
    with pytest.raises(InferenceError, match="training mode"):
        flysurgery.capture(model.train(), x)


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trains"])
def test_weights_that_were_packed_count_in_the_next_call(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(embed_dim=64)
    x = images(model).cuda()
    model.cuda().requires_grad_(trains)
    captured, weight = flysurgery.capture(model, x), model.get_parameter("blocks.0.mlp.fc1.factors.0")
    packed = list[object]()
    monkeypatch.setattr(derivation, "_make", lambda make, own=derivation._make: packed.append(make) or own(make))
    with torch.no_grad():
        before = captured(x)
        assert_equal(before, model(x))
        assert not packed, "graphs read weights as they were packed before"
        weight.mul_(2)
        after = captured(x)
        assert packed and not torch.equal(after, before)
        assert_equal(after, model(x))
        weight.data = 0.5 * weight.data
        assert_equal(captured(x), before)
        weight.data.mul_(2)  # which PyTorch does not tell
        forget_derived()
        assert_equal(captured(x), after)
    model.train()
    assert_equal(captured(x), after)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(InferenceError, match="training mode"):
        captured(x)
