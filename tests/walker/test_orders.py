"""Which rows are whose, and which features may stand in another order: proven, and held against what the model computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional
from vit_pytorch import ViT
from vit_pytorch.deepvit import DeepViT

from flysurgery.walker import HEADS, QUERY_KEY, VALUE, Heads, Slice, find_heads, survey, targets_of, walk
from tests.walker.toys import HEADS as COUNT
from tests.walker.toys import TOKENS, WIDTH, FusedAttention, WrittenOutAttention, attend, heads, keys_first, merged, tokens

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


IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2)).double()
SEQUENCES = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3)).double()

MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "vit": (lambda: timm.create_model("vit_tiny_patch16_224", **SMALL), {}),
    "pvt, keys on a coarser grid": (lambda: timm.create_model("pvt_v2_b0", depths=(1, 0, 0, 0), num_heads=(4, 4, 4, 4)), {}),
    "vit-pytorch": (lambda: ViT(**SIZES, dim_head=16), {}),
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


PER_HEAD = torch.arange(1.0, COUNT + 1).double()[:, None, None]
PER_ENTRY = torch.arange(1.0, 9).double()


def halves_turned(x: Tensor) -> Tensor:
    return torch.cat([-x[..., 4:], x[..., :4]], -1)


@pytest.mark.parametrize(
    ("at", "change", "tied"),
    [
        ("q", lambda x: 0.3 * torch.tanh(x) + 1, set()),
        ("q", lambda x: functional.normalize(x, dim=-1), set()),
        ("k", lambda x: x[:, :, 1:].mean(2, keepdim=True) + x, set()),
        ("scores", lambda x: x + torch.arange(TOKENS).double() - x.amax(-1, keepdim=True), set()),
        ("result", torch.relu, set()),
        ("q", lambda x: x * PER_HEAD, {HEADS}),
        ("scores", lambda x: x * PER_HEAD, {HEADS}),
        ("scores", lambda x: x + x.flip(1), {HEADS}),
        ("scores", lambda x: x.softmax(1), {*ORDERS}),
        ("q", lambda x: torch.cat([x[:, :1], x[:, 1:].relu()], 1), {HEADS}),
        ("q", lambda x: torch.cat([x[..., :2], x[..., 2:].relu()], -1), {QUERY_KEY}),
        ("q", lambda x: x * PER_ENTRY, {QUERY_KEY}),
        ("q", halves_turned, {QUERY_KEY, HEADS}),
        ("v", lambda x: x.cumsum(-1), {HEADS, VALUE}),
        ("result", lambda x: x * PER_ENTRY, {VALUE}),
        ("result", lambda x: x * PER_HEAD, {HEADS}),
        ("result", lambda x: x + x.roll(1, 1), {HEADS, VALUE}),
        ("result", lambda x: functional.layer_norm(x.transpose(1, 2), (COUNT, 8)).transpose(1, 2), {HEADS, VALUE}),
    ],
)
def test_what_stands_at_each_place(at: str, change: Callable[[Tensor], Tensor], tied: set[str]) -> None:
    def at_place(self: Any, x: Tensor, fused: Tensor) -> Tensor:
        q, k, v = (change(heads(part)) if name == at else heads(part) for name, part in zip("qkv", fused.chunk(3, -1), strict=True))
        scores = q @ k.mT
        result = (change(scores) if at == "scores" else scores).softmax(-1) @ v
        return merged(change(result) if at == "result" else result)

    model = shaken(FusedAttention(at_place))
    (each,) = found(model, SEQUENCES)
    assert set(each.tied) == tied, each.tied
    if each.rows is not None:
        for order in set(ORDERS) - tied:
            assert changed(model, each, order, SEQUENCES) < 1e-12


def by_thirds(fused: Tensor) -> tuple[Tensor, ...]:
    return tuple(heads(part) for part in fused.chunk(3, -1))


def grouped(y: Tensor) -> tuple[Tensor, ...]:
    """Three heads of queries, one of keys and one of values."""
    q, k, v = y.split([24, 8, 8], dim=-1)
    return heads(q), *(heads(part, 1).repeat_interleave(3, dim=1) for part in (k, v))


def differential(self: Any, x: Tensor, fused: Tensor) -> Tensor:
    """The difference of two attentions with the same values."""
    q, k, other_q, other_k, v = (heads(part) for part in fused.chunk(5, -1))
    return attend(q, k, v) - 0.5 * attend(other_q, other_k, v)


def gated(self: Any, x: Tensor, fused: Tensor) -> Tensor:
    """A gate for each head, from a linear of its own."""
    gate = self.gate(x).sigmoid().transpose(1, 2)[..., None]
    return merged(functional.scaled_dot_product_attention(*by_thirds(fused)) * gate)


def with_positions(self: Any, x: Tensor, fused: Tensor) -> Tensor:
    """A convolution over the values of neighbouring tokens beside the attention."""
    return attend(*by_thirds(fused)) + self.near(fused[..., 48:].mT).mT


class TwoReaders(FusedAttention):
    def forward(self, x: Tensor) -> Tensor:
        result = attend(*by_thirds(self.apple(x)))
        return self.pear(result) + result.cumsum(-1)


class WrittenElsewhere(FusedAttention):
    """Values that are added, in place, to a tensor which something else reads."""

    def forward(self, x: Tensor) -> Tensor:
        fused, sums = self.apple(x), torch.ones_like(x)
        sums[:, 1:] += fused[:, 1:, 48:]
        return self.pear(attend(*by_thirds(fused))) + sums


@pytest.mark.parametrize(
    ("make", "tied"),
    [
        *MODELS.values(),
        (lambda: FusedAttention(lambda self, x, fused: attend(*grouped(fused)), 40), dict.fromkeys(ORDERS, "share keys and values")),
        (lambda: FusedAttention(differential, 5 * WIDTH), dict.fromkeys(ORDERS, "several attentions")),
        (lambda: FusedAttention(gated, gate=nn.Linear(WIDTH, COUNT)), {HEADS: "gate of their own"}),
        (
            lambda: FusedAttention(with_positions, near=nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)),
            dict.fromkeys((HEADS, VALUE), "read by 'conv1d'"),
        ),
        (TwoReaders, dict.fromkeys((HEADS, VALUE), "read by 'cumsum'")),
        (WrittenElsewhere, dict.fromkeys(ORDERS, "does not prove which rows")),
        (WrittenOutAttention, {}),
        (FusedAttention, {}),
    ],
)
def test_orders_are_free_where_the_output_does_not_depend_on_them(make: Callable[[], nn.Module], tied: dict[str, str]) -> None:
    """Free orders leave the output alone, tied ones do not; and the reasons hold the given words."""
    torch.manual_seed(0)
    model = shaken(make())
    x = SEQUENCES if isinstance(model, FusedAttention | WrittenOutAttention) else IMAGES
    everything = found(model, x)
    assert everything
    for each in everything:
        assert set(each.tied) == set(tied), each.tied
        assert all(words in each.tied[order] for order, words in tied.items()), each.tied
        for order in ORDERS if each.rows is not None else ():
            change = changed(model, each, order, x)
            assert change > 1e-7 if order in tied else change < 1e-12, (order, change)


def by_three_and_head(y: Tensor) -> tuple[Tensor, ...]:
    return y.unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4).unbind(0)


def by_head_and_three(y: Tensor) -> tuple[Tensor, ...]:
    return y.unflatten(-1, (3, 3, 8)).permute(3, 0, 2, 1, 4).unbind(0)


def backwards(y: Tensor) -> tuple[Tensor, ...]:
    v, k, q = (heads(part) for part in (y[..., 48:], y[..., 24:48], y[..., :24]))
    return v, k, q


def rotated(y: Tensor) -> tuple[Tensor, ...]:
    q, k, v = by_three_and_head(y)
    angle = torch.arange(8.0, device=y.device)
    return (q * angle.cos() + torch.cat([-q[..., 4:], q[..., :4]], -1) * angle.sin(), nn.functional.normalize(k, dim=-1), v)


def mixed_query_and_key(y: Tensor) -> tuple[Tensor, ...]:
    q, k, v = by_three_and_head(y)
    return q + k, k, v


def overwritten_query(y: Tensor) -> tuple[Tensor, ...]:
    q, k, v = by_three_and_head(y)
    q[:, :, 1:] = k[:, :, 1:]
    return q, k, v


def assembled_query(y: Tensor) -> tuple[Tensor, ...]:
    q, k, v = by_three_and_head(y)
    empty = torch.zeros_like(q)
    empty[:, :, :1] = q[:, :, :1]
    empty[:, :, 1:] = k[:, :, 1:]
    return empty, k, v


def keys_as_values(y: Tensor) -> tuple[Tensor, ...]:
    q, both = (heads(part) for part in y.chunk(2, -1))
    return q, both, both


THIRDS = (Slice("q", 0, 24), Slice("k", 24, 48), Slice("v", 48, 72))


@pytest.mark.parametrize(
    ("arrange", "rows", "expected"),
    [
        (by_three_and_head, 72, THIRDS),
        (by_head_and_three, 72, None),
        (backwards, 72, (Slice("v", 0, 24), Slice("k", 24, 48), Slice("q", 48, 72))),
        (rotated, 72, THIRDS),
        (keys_as_values, 48, (Slice("q", 0, 24), Slice("k_v", 24, 48))),
        (grouped, 40, (Slice("q", 0, 24), Slice("k", 24, 32), Slice("v", 32, 40))),
        (mixed_query_and_key, 72, None),
        (overwritten_query, 72, None),
        (assembled_query, 72, None),
    ],
)
def test_arrangements(arrange: Callable[[Tensor], tuple[Tensor, ...]], rows: int, expected: tuple[Slice, ...] | None) -> None:
    target = walk(FusedAttention(lambda self, x, fused: attend(*arrange(fused)), rows), tokens())[0]
    assert (target.fqn, target.role) == ("apple", "qkv")
    assert target.split == expected


def by_einsum(self: Any, k: Tensor, q: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhjd,bhid->bhij", k, q).softmax(-1) @ v


@pytest.mark.parametrize("weigh", [keys_first, by_einsum])
def test_which_is_the_query_follows_from_the_softmax(weigh: Callable[..., Tensor]) -> None:
    def weighed(self: Any, x: Tensor, fused: Tensor) -> Tensor:
        q, k, v = by_thirds(fused)
        return merged(weigh(self, k, q, v))

    assert walk(FusedAttention(weighed), tokens())[0].split == THIRDS


IN, HIDDEN = 8, 12


class Ffn(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor] | nn.Module) -> None:
        super().__init__()
        self.up = nn.Linear(IN, HIDDEN)
        self.between = between
        self.down = nn.Linear(HIDDEN, IN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(x)))


def pairs_of(model: nn.Module) -> dict[str, str]:
    return {target.fqn: target.pair for target in walk(model, torch.zeros(2, 5, IN)) if target.pair is not None}


ANY_ORDER = {
    "gelu": functional.gelu,
    "dropout": nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.5)),
    "square and scale": lambda x: 0.5 * torch.relu(x).square() + 1,
    "through other shapes": lambda x: functional.silu(x.reshape(-1, HIDDEN)).view(-1, 5, HIDDEN),
    "nothing": lambda x: x,
}
OWN_ORDER = {
    "norm": nn.LayerNorm(HIDDEN),
    "one threshold a feature": lambda x: torch.maximum(x, torch.arange(1.0, HIDDEN + 1)),
    "softmax": lambda x: x.softmax(-1),
    "scale of each feature": lambda x: x * torch.arange(1.0, HIDDEN + 1),
    "gate": lambda x: x * torch.sigmoid(x.mean(-1, keepdim=True)),
    "flip": lambda x: x.flip(-1),
    "features among tokens": lambda x: x.reshape(-1, HIDDEN, 5).relu().reshape(-1, 5, HIDDEN),
    "order of tokens": lambda x: functional.pad(x[..., 1:], (0, 1)),
}


@pytest.mark.parametrize("name", ANY_ORDER)
@torch.no_grad()
def test_element_wise_operators_make_a_pair_and_its_units_can_be_permuted(name: str) -> None:
    torch.manual_seed(0)
    model = Ffn(ANY_ORDER[name]).eval()
    assert pairs_of(model) == {"up": "down"}
    x, order = torch.randn(2, 5, IN), torch.randperm(HIDDEN)
    before = model(x)
    for parameter in (model.up.weight, model.up.bias):
        parameter.copy_(parameter[order])
    model.down.weight.copy_(model.down.weight[:, order])
    assert float((model(x) - before).abs().max()) < 1e-6


class ReadTwice(Ffn):
    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.up(x))
        return self.down(hidden) + hidden.mean(-1, keepdim=True)


class Twice(Ffn):
    def forward(self, x: Tensor) -> Tensor:
        other = self.down(x.repeat(1, 1, 2)[..., :HIDDEN])
        return self.down(functional.gelu(self.up(x))) + other


@pytest.mark.parametrize("model", [*(Ffn(each) for each in OWN_ORDER.values()), ReadTwice(functional.gelu), Twice(functional.gelu)])
def test_units_that_are_told_apart_or_read_elsewhere_or_come_from_elsewhere_make_no_pair(model: nn.Module) -> None:
    assert pairs_of(model) == {}
