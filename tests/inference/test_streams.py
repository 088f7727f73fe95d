"""The gradient that a residual sum brings is added in the launch of the norm's gradient; whole steps in one captured graph."""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flysurgery
from flysurgery import ops
from flysurgery.ops import training
from tests.inference.models import SMALL, images
from tests.inference.test_optimize import VIT, build
from tests.inference.test_training import distance, frozen, gradients, learning
from tests.support.captured import checkpoint_each, races_of_steps, take_hidden_units

pytestmark = pytest.mark.usefixtures("faster")


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each norm's gradient, the last one first: whether the residual's gradient was added in the same launch."""
    noted, own = list[bool](), training.norm_gradient
    monkeypatch.setattr(training, "norm_gradient", lambda *given: noted.append(given[4] is not None) or own(*given))
    return noted


@pytest.mark.parametrize(("name", "options"), [("vit_tiny_patch16_224", SMALL), ("vit_pytorch.vit:ViT", VIT)])
def test_residuals_gradients_are_added_with_those_of_norms(joined: list[bool], name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = build(name, options).double().train()
    x = images(model, 3).double()
    before = gradients(model, x)
    flysurgery.optimize(model, x, training=True)
    joined.clear()
    assert max(distance(gradients(model, x), before).values()) < 1e-12
    assert joined.count(True) == 4, "those of two blocks; norms outside of blocks have nothing beside them"
    joined.clear()
    frozen(model, ("head", "mlp_head"))
    gradients(model, x)
    assert joined == [], "no gradient goes back through blocks"


def test_inputs_without_gradients_get_none_and_a_stream_that_autocast_casts_is_not_passed_on(joined: list[bool]) -> None:
    """Its residual sum is float32 where the own modules make it."""
    blocks, x = learning().get_submodule("blocks"), torch.randn(3, 17, 48)
    flysurgery.optimize(blocks, x, training=True)
    for needs_x, cast, expected in ((False, False, [True] * 3 + [False]), (True, True, [True] * 3 + [False]), (True, False, [True] * 4)):
        joined.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            blocks(given := x.clone().requires_grad_(needs_x)).float().square().sum().backward()
        assert joined == expected and (given.grad is None or given.grad.dtype == torch.float32)


def test_hooks_of_blocks_see_whole_gradients() -> None:
    model, x = learning().double(), torch.randn(3, 3, 32, 32, dtype=torch.float64)
    plain, found = copy.deepcopy(model), list[dict[str, Tensor]]()
    flysurgery.optimize(model, x, training=True)

    def see(name: str, module: nn.Module, given: Any, results: Any) -> None:
        found[-1] |= {f"x{name}": given[0], f"y{name}": results[0]}

    for each in (model, plain):
        for name, block in each.get_submodule("blocks").named_children():
            block.register_full_backward_hook(partial(see, name))
        found.append({})
        gradients(each, x)
    assert len(found[0]) == 4 and max(distance(*found).values()) < 1e-12


def test_threads_that_share_a_model() -> None:
    model = learning().double()
    x, plain = images(model, 4).double(), copy.deepcopy(model)
    flysurgery.optimize(model, x, training=True)

    def gradient(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(model(x).square().sum(), x)[0]

    xs = [x * scale for scale in (1.0, 2.0, 3.0, 4.0)]
    with ThreadPoolExecutor(len(xs)) as threads:
        found = [each for _ in range(5) for each in threads.map(partial(gradient, model), xs)]
    expected = [gradient(plain, x) for x in xs] * 5
    assert all(float((one - other).norm() / other.norm()) < 1e-10 for one, other in zip(found, expected, strict=True))


def test_a_failed_call_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = learning().get_submodule("blocks.0"), torch.randn(3, 17, 48, requires_grad=True)
    flysurgery.optimize(block, x, training=True)
    monkeypatch.setattr(ops, "attended", lambda *_: 1 / 0)
    given = x * 1.0
    kept = weakref.ref(given)
    with pytest.raises(ZeroDivisionError):
        block(given)
    del given
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize(("convert", "use_reentrant"), [(False, None), (True, None), (True, False), (True, True)])
def test_steps_wait_for_what_they_read(convert: bool, use_reentrant: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation of a captured graph waits for what it reads and for those that read what it overwrites."""
    model = learning(convert=convert, embed_dim=64, num_heads=1, num_classes=10, init_values=0.5)
    x = images(model, 4)
    report = flysurgery.optimize(model, x, training=True)
    assert {row.group for row in report.fused} == {"qkv", "attention", "attn_out", "ffn", "norm", "patches"}
    if use_reentrant is not None:
        checkpoint_each(model.get_submodule("blocks"), use_reentrant)
    take_hidden_units(monkeypatch)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert races_of_steps(step, monkeypatch) == []
