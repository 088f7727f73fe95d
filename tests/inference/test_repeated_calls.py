"""Fused modules that launch again what they launched before, on a GPU: the same results as anew, whatever changes between two calls."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import flysurgery
from flysurgery.inference import clock
from flysurgery.ops import Repeating
from tests.support.tolerance import assert_equal

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {"img_size": 64, "patch_size": 16, "embed_dim": 384, "depth": 2, "num_heads": 6, "num_classes": 5}
REPEATED = 4
"""What is fused by itself: the patches, two blocks, and the last norm."""


@pytest.fixture
def x() -> Tensor:
    return torch.randn((64, 3, 64, 64), generator=torch.Generator().manual_seed(3)).cuda().half()


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, x: Tensor) -> Iterator[nn.Module]:
    """A small ViT all of whose groups are fused, called twice."""
    monkeypatch.setattr(clock, "medians_ms", lambda ways, inputs, **_: (2.0, 1.0))
    model = timm.create_model("vit_small_patch16_224", **SIZES).eval().requires_grad_(False)
    flysurgery.convert(model, "gonon", roles=("ffn", "qkv"))
    model.cuda().half()
    flysurgery.optimize(model, x)
    with torch.no_grad():
        model(x)
        model(x)
        yield model


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The functions that were called, because what they launched before could not be launched again."""
    repeat, seen = Repeating.__call__, list[object]()

    def noting(self: Repeating, run: Callable[..., Any], modules: Any, *operands: Tensor) -> Any:
        def counted(*operands: Tensor) -> Any:
            seen.append(run)
            return run(*operands)

        return repeat(self, counted, modules, *operands)

    monkeypatch.setattr(Repeating, "__call__", noting)
    return seen


def anew(model: nn.Module, x: Tensor) -> Tensor:
    """What the model gives where nothing is repeated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Repeating, "__call__", lambda self, run, modules, *operands: run(*operands))
        return model(x)


def test_calls_are_repeated_for_every_input_that_looks_the_same(model: nn.Module, x: Tensor, asked: list[object]) -> None:
    for scale in (1.0, -2.0):
        expected = anew(model, scale * x)
        asked.clear()
        assert_equal(model(scale * x), expected)
        assert not asked
    few, expected = x[:3], anew(model, x[:3])
    assert_equal(model(few), expected)
    assert len(asked) >= REPEATED
    asked.clear()
    assert_equal(model(few), expected)
    assert not asked


def test_weights_that_change_are_followed(model: nn.Module, x: Tensor, asked: list[object]) -> None:
    before, weight = model(x), model.get_parameter("blocks.1.mlp.fc1.factors.0")
    original = weight.clone()
    weight.mul_(2)
    for _ in range(3):
        assert_equal(model(x), anew(model, x))
    assert not torch.equal(model(x), before)
    weight.copy_(original)
    assert_equal(model(x), before)
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: 0.5 * value for name, value in state.items()}, assign=True)
    assert_equal(model(x), anew(model, x))
    model.load_state_dict(state)
    assert_equal(model(x), before)
    assert_equal(model.bfloat16()(x.bfloat16()), anew(model, x.bfloat16()))
    assert_equal(model.half()(x), anew(model, x))


def test_modes_streams_threads_and_graphs(model: nn.Module, x: Tensor) -> None:
    expected = model(x)
    with torch.inference_mode():
        for _ in range(3):
            assert_equal(model(x), expected)
        assert model(x).is_inference()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        elsewhere = [model(x) for _ in range(3)]
    torch.cuda.current_stream().wait_stream(stream)
    for y in elsewhere:
        assert_equal(y, expected)
    captured = flysurgery.capture(model, x)
    assert_equal(captured(x), expected)
    model.get_parameter("blocks.0.mlp.fc1.factors.0").mul_(3)
    changed = model(x)  # also outside of the graph
    assert_equal(captured(x), changed)
    assert not torch.equal(changed, expected)
    results = list[Tensor]()

    def work() -> None:
        with torch.no_grad():
            results.extend(model(x) for _ in range(5))
        torch.cuda.synchronize()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 15
    for y in results:
        assert_equal(y, changed)


def test_gradients_and_training_are_not_repeated(model: nn.Module, x: Tensor) -> None:
    expected = model(x)
    with torch.enable_grad():
        model.requires_grad_()
        model(x).float().sum().backward()
        assert model.get_parameter("blocks.0.mlp.fc1.factors.0").grad is not None
    model.requires_grad_(False)
    assert_equal(model(x), expected)
    twin = copy.deepcopy(model)
    model.get_parameter("blocks.0.mlp.fc1.factors.0").mul_(3)
    assert_equal(twin(x), expected)
