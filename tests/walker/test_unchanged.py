"""A walk leaves no trace: not in the model, not in the process."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from flysurgery.errors import WalkError
from flysurgery.walker import walk
from tests.support.composed import Composed
from tests.walker.toys import WIDTH, FusedAttention, Stack, tokens


def beit() -> nn.Module:
    return timm.create_model("beit_base_patch16_224", depth=2, embed_dim=48, num_heads=3, img_size=32, drop_rate=0.1)


def state(model: nn.Module) -> list[object]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    modules = [(name, type(module), module.training) for name, module in model.named_modules()]
    return [(name, id(each), each.requires_grad, each.grad, each.detach().clone().tolist()) for name, each in tensors.items()] + modules


def test_the_model_is_as_before() -> None:
    model = beit().train()
    model.get_submodule("blocks.1").eval()
    model.get_submodule("blocks.0").requires_grad_(False)
    spectral_norm(model.get_submodule("blocks.0.mlp.fc1"))  # whose buffers change where the weight is read in training mode
    before = state(model)
    walk(model)
    assert state(model) == before
    assert model.get_submodule("blocks.0.attn").qkv_bias_separate is False


def test_what_a_forward_stores_stays_out_of_the_model() -> None:
    class Storing(FusedAttention):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Tensor] = []
            self.last: Tensor | None = None
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(7)
            x = x + torch.rand_like(x) * random.random()
            self.count += 1
            self.kept.append(x)
            self.last = super().forward(x)
            return self.last

    model = Storing()
    model(tokens()).sum().backward()  # leaves a tensor with a gradient function behind, which deepcopy alone refuses
    last, states = model.last, (torch.get_rng_state(), random.getstate())
    assert [target.role for target in walk(model, tokens())] == ["qkv", "attn_out"]
    assert len(model.kept) == 1 and model.last is last and model.count == 1
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1] and torch.is_grad_enabled()


@pytest.mark.parametrize("context", [torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta")])
def test_within_a_context_of_the_caller_and_on_the_meta_device(context: AbstractContextManager[object]) -> None:
    model = Stack(FusedAttention())
    outside = walk(model, tokens(7))
    with context:
        assert walk(model, tokens(7)) == outside
    assert walk(model.to("meta"), tokens(7)) == outside


def deciding() -> nn.Module:
    return Composed(lambda self, x: self.linear(x) if x.sum() > 0 else x, linear=nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize(
    ("make", "width", "words"),
    [
        (deciding, WIDTH, r"^Composed cannot be walked, because torch\.export cannot trace it: "),
        (FusedAttention, WIDTH + 1, r"^FusedAttention cannot be walked, because torch\.export cannot trace it: .*25"),
        (lambda: FusedAttention(handle=(_ for _ in ())), WIDTH, "FusedAttention cannot be walked, .* its modules cannot be copied"),
        (lambda: "vit", WIDTH, r"^expected a torch\.nn\.Module to walk, got str$"),
    ],
)
def test_what_cannot_be_walked_is_one_sentence_and_nothing_is_printed(
    make: Callable[[], Any], width: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WalkError, match=words) as caught:
        walk(make(), tokens(width))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""


def test_parameters_may_be_swapped_after_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model = beit()
    walk(model)
    weight = model.get_parameter("fc_norm.weight")
    model.double().load_state_dict(beit().double().state_dict())
    assert model.get_parameter("fc_norm.weight") is weight and weight.dtype == torch.float64
