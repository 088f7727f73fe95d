"""Orders of heads and of their entries: free only where the model computes the same in any of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional
from vit_pytorch import SimpleViT, ViT
from vit_pytorch.deepvit import DeepViT

from flysurgery.walker import HEADS, QUERY_KEY, VALUE, Heads, find_heads, survey, targets_of
from tests.walker.toys import HEADS as COUNT
from tests.walker.toys import TOKENS, WIDTH, FusedAttention, WrittenOutAttention, heads, tokens

ORDERS = (HEADS, QUERY_KEY, VALUE)
SMALL: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 1, "num_heads": 3}
WINDOWS: dict[str, Any] = {"img_size": 32, "depths": (2,), "num_heads": (3,), "embed_dim": 48, "window_size": 4}
SIZES: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 48, "depth": 1, "heads": 4, "mlp_dim": 96}


def found(model: nn.Module, example: Tensor | None = None) -> tuple[Heads, ...]:
    seen = survey(model, example)
    return find_heads(seen, targets_of(model, seen))


@torch.no_grad()
def changed(model: nn.Module, which: Heads, order: str, x: Tensor) -> float:
    """By how much the output of ``model`` changes, relative to its size, where the heads of one attention are put into another order."""
    assert which.rows is not None
    new = copy.deepcopy(model)
    heads_in_order = torch.arange(which.count).roll(1 if order == HEADS else 0)
    places = []
    for rows, moves in zip(which.rows, (QUERY_KEY, QUERY_KEY, VALUE), strict=True):
        numbers = torch.arange(rows.stop - rows.start).reshape(which.count, -1)
        entries = torch.stack([torch.randperm(numbers.shape[1], generator=torch.Generator().manual_seed(i)) for i in range(which.count)])
        places.append(numbers[heads_in_order[:, None], entries if order == moves else torch.arange(numbers.shape[1])].flatten())
        linear = new.get_submodule(rows.fqn)
        for parameter in linear.parameters():
            parameter[rows.start : rows.stop] = parameter[rows.start : rows.stop][places[-1]].clone()
    if which.out is not None:
        out = new.get_parameter(f"{which.out}.weight")
        out.copy_(out[:, places[-1]].clone())
    right = model(x)
    return float((new(x) - right).abs().max() / right.abs().max())


@torch.no_grad()
def shaken(model: nn.Module) -> nn.Module:
    """In float64 and with no parameter at a value that hides what it does."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.eval().double().parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator).double() * 0.3)
    return model


def check(model: nn.Module, x: Tensor, tied: dict[str, str]) -> None:
    """Free orders leave the output alone, tied ones do not; and the reasons hold the given words."""
    model = shaken(model)
    everything = found(model, x)
    assert everything
    for each in everything:
        assert set(each.tied) == set(tied), each.tied
        assert all(words in each.tied[order] for order, words in tied.items()), each.tied
        if each.rows is None:
            continue
        for order in ORDERS:
            change = changed(model, each, order, x)
            assert change > 1e-7 if order in tied else change < 1e-12, (order, change)


IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2)).double()
SEQUENCES = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3)).double()

MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "vit": (lambda: timm.create_model("vit_tiny_patch16_224", **SMALL), {}),
    "deit3": (lambda: timm.create_model("deit3_small_patch16_224", **SMALL), {}),
    "pvt, keys on a coarser grid": (lambda: timm.create_model("pvt_v2_b0", depths=(1, 0, 0, 0), num_heads=(4, 4, 4, 4)), {}),
    "vit-pytorch": (lambda: ViT(**SIZES, dim_head=16), {}),
    "vit-pytorch, simple": (lambda: SimpleViT(**SIZES, dim_head=16), {}),
    "norms of query and key": (
        lambda: timm.create_model("vit_tiny_patch16_224", qk_norm=True, **SMALL),
        {QUERY_KEY: "a weight of its own in 'layer_norm'"},
    ),
    "rotary embedding": (lambda: timm.create_model("vit_small_patch16_rope_ape_224", **SMALL), {QUERY_KEY: "as of a rotary embedding"}),
    "relative positions": (
        lambda: timm.create_model("swin_tiny_patch4_window7_224", **WINDOWS),
        {HEADS: "bias, scale or gate of their own"},
    ),
    "talking heads": (lambda: DeepViT(**SIZES, dim_head=16), {HEADS: "scores of the heads are read by 'einsum'"}),
    "a norm of all heads": (
        lambda: timm.create_model("vit_tiny_patch16_224", scale_attn_norm=True, **SMALL),
        dict.fromkeys((HEADS, VALUE), "'layer_norm'"),
    ),
    "biases of the parent": (
        lambda: timm.create_model("beit_base_patch16_224", **SMALL),
        {HEADS: "bias", QUERY_KEY: "a number of its own", VALUE: "a number of its own"},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    make, tied = MODELS[name]
    torch.manual_seed(0)
    check(make(), IMAGES, tied)


class Attention(FusedAttention):
    """Softmax attention with something of its own at one place."""

    def __init__(self, at: str, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.at, self.change = at, change

    def forward(self, x: Tensor) -> Tensor:
        parts = dict(zip("qkv", (heads(part) for part in self.apple(x).chunk(3, -1)), strict=True))
        if self.at in parts:
            parts[self.at] = self.change(parts[self.at])
        q, k, v = parts.values()
        scores = q @ k.mT
        weights = (self.change(scores) if self.at == "scores" else scores).softmax(-1)
        result = weights @ v
        return self.pear((self.change(result) if self.at == "result" else result).transpose(1, 2).flatten(2))


PER_HEAD = torch.arange(1.0, COUNT + 1).double()[:, None, None]
PER_ENTRY = torch.arange(1.0, 9).double()


def halves_turned(x: Tensor) -> Tensor:
    return torch.cat([-x[..., 4:], x[..., :4]], -1)


def first_head_scaled_in_place(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, :1] *= 2
    return x


@pytest.mark.parametrize(
    ("at", "change", "tied"),
    [
        ("q", lambda x: 0.3 * torch.tanh(x) + 1, set()),
        ("q", lambda x: functional.normalize(x, dim=-1), set()),
        ("k", lambda x: functional.rms_norm(x, (8,)), set()),
        ("k", lambda x: x[:, :, 1:].mean(2, keepdim=True) + x, set()),
        ("scores", lambda x: x + torch.arange(TOKENS).double() - x.amax(-1, keepdim=True), set()),
        ("result", torch.relu, set()),
        ("q", lambda x: x * PER_HEAD, {HEADS}),
        ("scores", lambda x: x * PER_HEAD, {HEADS}),
        ("scores", lambda x: x + x.flip(1), {HEADS}),
        ("scores", lambda x: x.softmax(1), {*ORDERS}),
        ("q", first_head_scaled_in_place, {*ORDERS}),
        ("q", lambda x: torch.cat([x[:, :1], x[:, 1:].relu()], 1), {HEADS}),
        ("q", lambda x: torch.cat([x[..., :2], x[..., 2:].relu()], -1), {QUERY_KEY}),
        ("q", lambda x: x * PER_ENTRY, {QUERY_KEY}),
        ("q", halves_turned, {QUERY_KEY, HEADS}),
        ("k", lambda x: x + 0.5 * halves_turned(x), {QUERY_KEY}),
        ("v", lambda x: x.cumsum(-1), {HEADS, VALUE}),
        ("v", lambda x: x.softmax(-1), {*ORDERS}),
        ("result", lambda x: x * PER_ENTRY, {VALUE}),
        ("result", lambda x: x * PER_HEAD, {HEADS}),
        ("result", lambda x: x + x.roll(1, 1), {HEADS, VALUE}),
        ("result", lambda x: functional.layer_norm(x, (8,), PER_ENTRY), {VALUE}),
        ("result", lambda x: functional.layer_norm(x.transpose(1, 2), (COUNT, 8)).transpose(1, 2), {HEADS, VALUE}),
    ],
)
def test_what_stands_at_each_place(at: str, change: Callable[[Tensor], Tensor], tied: set[str]) -> None:
    model = shaken(Attention(at, change))
    (each,) = found(model, SEQUENCES)
    assert set(each.tied) == tied, each.tied
    if each.rows is not None:
        for order in set(ORDERS) - tied:
            assert changed(model, each, order, SEQUENCES) < 1e-12


class Grouped(FusedAttention):
    """Two query heads share one head of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.apple = nn.Linear(WIDTH, 4 * 8)
        self.pear = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.apple(x).split([16, 8, 8], dim=-1)
        k, v = (heads(part, 1).repeat_interleave(2, dim=1) for part in (k, v))
        return self.pear(functional.scaled_dot_product_attention(heads(q, 2), k, v).transpose(1, 2).flatten(2))


class Differential(FusedAttention):
    """The difference of two attentions with the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.apple = nn.Linear(WIDTH, 5 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, other_q, other_k, v = (heads(part) for part in self.apple(x).chunk(5, -1))
        result = functional.scaled_dot_product_attention(q, k, v) - 0.5 * functional.scaled_dot_product_attention(other_q, other_k, v)
        return self.pear(result.transpose(1, 2).flatten(2))


class Gated(FusedAttention):
    """A gate for each head, from a linear of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, COUNT)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part) for part in self.apple(x).chunk(3, -1))
        gate = self.gate(x).sigmoid().transpose(1, 2)[..., None]
        return self.pear((functional.scaled_dot_product_attention(q, k, v) * gate).transpose(1, 2).flatten(2))


class Interleaved(FusedAttention):
    """Query, key and value of one head after the other."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.apple(x).unflatten(-1, (COUNT, 3, 8)).permute(3, 0, 2, 1, 4).unbind(0)
        return self.pear(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Positions(FusedAttention):
    """A convolution over the values of neighbouring tokens beside the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.apple(x).chunk(3, -1)
        result = functional.scaled_dot_product_attention(*(heads(part) for part in parts)).transpose(1, 2).flatten(2)
        return self.pear(result + self.near(parts[2].mT).mT)


class TwoReaders(FusedAttention):
    def forward(self, x: Tensor) -> Tensor:
        parts = self.apple(x).chunk(3, -1)
        result = functional.scaled_dot_product_attention(*(heads(part) for part in parts)).transpose(1, 2).flatten(2)
        return self.pear(result) + result.cumsum(-1)


class WrittenElsewhere(FusedAttention):
    """Values that are added, in place, to a tensor which something else reads."""

    def forward(self, x: Tensor) -> Tensor:
        parts = self.apple(x).chunk(3, -1)
        sums = torch.ones_like(x)
        sums[:, 1:] += parts[2][:, 1:]
        return self.pear(functional.scaled_dot_product_attention(*(heads(part) for part in parts)).transpose(1, 2).flatten(2)) + sums


@pytest.mark.parametrize(
    ("model", "tied"),
    [
        (Grouped, dict.fromkeys(ORDERS, "share keys and values")),
        (Differential, dict.fromkeys(ORDERS, "several attentions")),
        (Gated, {HEADS: "gate of their own"}),
        (Interleaved, dict.fromkeys(ORDERS, "does not prove which rows")),
        (Positions, dict.fromkeys((HEADS, VALUE), "read by 'conv1d'")),
        (TwoReaders, dict.fromkeys((HEADS, VALUE), "read by 'cumsum'")),
        (WrittenElsewhere, dict.fromkeys(ORDERS, "does not prove which rows")),
        (WrittenOutAttention, {}),
        (FusedAttention, {}),
    ],
)
def test_attentions(model: type[nn.Module], tied: dict[str, str]) -> None:
    torch.manual_seed(0)
    check(model(), SEQUENCES, tied)


def test_where_the_heads_are() -> None:
    (each,) = found(WrittenOutAttention(), tokens())
    assert each.rows is not None
    assert [(rows.fqn, rows.start, rows.stop) for rows in each.rows] == [("two", 0, 24), ("one", 0, 24), ("three", 0, 24)]
    assert (each.count, each.out) == (COUNT, "four")
