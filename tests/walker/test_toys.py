"""Structure, not names: modules with names that say nothing, or lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flysurgery.walker import Slice, walk
from tests.walker.toys import (
    BATCH,
    TOKENS,
    WIDTH,
    FusedAttention,
    Gated,
    MisnamedMlp,
    Stack,
    WrittenOutAttention,
    attend,
    codes,
    heads,
    named,
    roles,
    tokens,
)

ATTENTION = {"one": "qkv", "two": "qkv", "three": "qkv", "four": "attn_out"}
MLP = {"qkv": "ffn_in", "proj": "ffn_out"}


def under(name: str, expected: dict[str, str]) -> dict[str, str]:
    return {f"{name}.{layer}": role for layer, role in expected.items()}


def test_arbitrary_names_in_a_whole_model() -> None:
    model = Stack(FusedAttention(), MisnamedMlp(), WrittenOutAttention(), Gated())
    assert roles(model, tokens(7)) == {
        "first": "other",
        **under("blocks.0", {"apple": "qkv", "pear": "attn_out"}),
        **under("blocks.1", MLP),
        **under("blocks.2", ATTENTION),
        **under("blocks.3", {"left": "ffn_in", "right": "ffn_in", "down": "ffn_out"}),
        "last": "head",
    }
    assert codes(model, tokens(7)) == {"first": ("patch-embedding",), "last": ("head",)}


def test_sizes_bias_and_rows() -> None:
    first, second = walk(FusedAttention(), tokens())
    assert (first.fqn, first.in_features, first.out_features, first.bias) == ("apple", WIDTH, 3 * WIDTH, True)
    assert (second.fqn, second.in_features, second.out_features, second.bias) == ("pear", WIDTH, WIDTH, False)
    assert (first.calls, first.rows) == (second.calls, second.rows) == (1, BATCH * TOKENS)


def by_einsum(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
    return torch.einsum("bhij,bhjd->bihd", weights, v).transpose(1, 2)


def mixed_by_a_parameter(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhij,hg->bgij", q @ k.mT, self.mix).softmax(-1) @ v


def with_a_bias_from_the_query(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT + torch.einsum("bhid,dj->bhij", q, self.table)).softmax(-1) @ v


def with_values_written_elsewhere(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    turned = torch.zeros(q.shape)
    turned[..., :4] = -q[..., 4:]
    turned[..., 4:] = q[..., :4]
    return functional.scaled_dot_product_attention(turned, k, v)


WRITTEN: dict[str, Callable[[], nn.Module]] = {
    "einsum": lambda: WrittenOutAttention(by_einsum),
    "heads mixed by a parameter": lambda: WrittenOutAttention(mixed_by_a_parameter, mix=nn.Parameter(torch.eye(3))),
    "a bias from the query": lambda: WrittenOutAttention(with_a_bias_from_the_query, table=nn.Parameter(torch.zeros(8, TOKENS))),
    "values written elsewhere": lambda: WrittenOutAttention(with_values_written_elsewhere),
    "softmax of query and key": lambda: WrittenOutAttention(lambda self, q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v)),
    "no softmax": lambda: WrittenOutAttention(lambda self, q, k, v: q.relu() @ (k.relu().mT @ v)),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_attention_is_known_however_it_is_written_and_does_not_blur_what_follows(kind: str) -> None:
    model = Stack(WRITTEN[kind](), MisnamedMlp(), WrittenOutAttention())
    expected = under("blocks.0", ATTENTION) | under("blocks.1", MLP) | under("blocks.2", ATTENTION)
    assert roles(model, tokens(7)) == {"first": "other", **expected, "last": "head"}
    assert codes(model, tokens(7)) == {"first": ("patch-embedding",), "last": ("head",)}


def test_heads_mixed_by_a_linear_are_no_projection() -> None:
    def talking(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.before((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.after(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2) @ v

    model = WrittenOutAttention(talking, before=nn.Linear(3, 3), after=nn.Linear(3, 3))
    assert roles(model, tokens()) == {**ATTENTION, "before": "other", "after": "other"}
    assert codes(model, tokens()) == {"before": ("talking-heads",), "after": ("talking-heads",)}


def named_arguments(self: Any, x: Tensor, fused: Tensor) -> Tensor:
    v, q, k = fused.chunk(3, -1)
    return functional.scaled_dot_product_attention(value=v, query=q, key=k)


def under_autocast(self: Any, x: Tensor, fused: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        q, k, v = (heads(part * 2) for part in fused.chunk(3, -1))
    return attend(q, k, v)


@pytest.mark.parametrize(("step", "order"), [(named_arguments, "vqk"), (under_autocast, "qkv")])
def test_named_arguments_and_regions_under_autocast_are_followed(step: Any, order: str) -> None:
    model = FusedAttention(step)
    assert roles(model, tokens()) == {"apple": "qkv", "pear": "attn_out"}
    assert named(model, tokens())["apple"].split == tuple(Slice(name, 24 * i, 24 * i + 24) for i, name in enumerate(order))


def test_a_number_of_rows_that_depends_on_data() -> None:
    class Masked(MisnamedMlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[x.sum(-1) > 0])

    targets = walk(Masked(), tokens())
    assert [(each.fqn, each.role, each.calls, each.rows) for each in targets] == [("qkv", "ffn_in", 1, 0), ("proj", "ffn_out", 1, 0)]


class Layers(nn.Module):
    """What ``step`` makes of linears: square ones, and a last one to ten classes."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor], *names: str):
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(WIDTH, 1 if name == "score" else 10 if name == "classify" else WIDTH))
        self.step = step
        self.seed = nn.Parameter(torch.zeros(1, 4, WIDTH))
        self.row = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, x)


def pooled_features(self: Any, x: Tensor) -> Tensor:
    """A last layer before pooling and the head is no feed-forward block."""
    return self.classify(functional.adaptive_avg_pool1d(functional.silu(self.one(x)).transpose(1, 2), 1).flatten(1))


def normalized(self: Any, x: Tensor) -> Tensor:
    """Normalization written out is no gate."""
    x = self.one(x)
    return self.two(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def by_learned_queries(self: Any, x: Tensor) -> Tensor:
    q = self.one(self.seed.expand(len(x), -1, -1))
    return self.four(functional.scaled_dot_product_attention(q, self.two(x), self.three(x))).mean(1)


def by_a_learned_query(self: Any, x: Tensor) -> Tensor:
    """One row of parameters, repeated."""
    q = self.one(self.row.expand(len(x), 3, -1))
    return self.four(functional.scaled_dot_product_attention(q, self.two(x), self.three(x))).mean(1)


def by_weights_of_a_linear(self: Any, x: Tensor) -> Tensor:
    return self.classify((self.score(x).softmax(1).mT @ x).squeeze(1))


def squeezed(self: Any, x: Tensor) -> Tensor:
    """Squeeze and excitation is no attention."""
    return self.two(self.one(x * self.squeeze(x.mean(1, keepdim=True)).sigmoid()).relu())


def gated_output(self: Any, x: Tensor) -> Tensor:
    """A gate on the output of attention is no feed-forward block."""
    return self.four(attend(*(heads(layer(x)) for layer in (self.one, self.two, self.three))) * self.door(x).sigmoid())


def additive(self: Any, x: Tensor) -> Tensor:
    """A score for each token, their weighted sum as a context, and the context times the values."""
    weights = self.score(self.one(x)).softmax(1)
    return self.four((weights * self.two(x)).sum(1, keepdim=True) * self.three(x))


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (pooled_features, {"one": "other", "classify": "head"}),
        (normalized, {"one": "other", "two": "head"}),
        (by_learned_queries, {**ATTENTION, "one": "other"}),
        (by_a_learned_query, dict.fromkeys(ATTENTION, "other")),
        (by_weights_of_a_linear, {"score": "other", "classify": "head"}),
        (squeezed, {"squeeze": "other", "one": "ffn_in", "two": "ffn_out"}),
        (gated_output, {**ATTENTION, "door": "other"}),
        (additive, {"score": "other", **ATTENTION, "one": "other"}),
    ],
)
def test_what_is_no_role(step: Callable[[Any, Tensor], Tensor], expected: dict[str, str]) -> None:
    model = Layers(step, *expected)
    assert roles(model, tokens()) == expected
    pools = {name for name, found in codes(model, tokens()).items() if "pool" in found}
    assert pools == {by_a_learned_query: {*ATTENTION}, by_weights_of_a_linear: {"score"}}.get(step, pools)
    assert ("constant" in codes(model, tokens()).get("one", ())) == (step is by_learned_queries)


@pytest.mark.parametrize("samples", [1, 2])
def test_samples_without_tokens_are_told_from_tokens_without_samples(samples: int) -> None:
    """A first input of two axes: features of each sample that become tokens, or the tokens of one sample."""

    class Tabular(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.width, self.attention, self.mlp = nn.Parameter(torch.zeros(WIDTH)), FusedAttention(), MisnamedMlp()
            self.squeeze, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.attention(x[..., None] * self.width)
            x = x + self.mlp(x)
            return self.score(x.mean(1) * self.squeeze(x.mean(1)).sigmoid())

    found = {"attention.apple": "qkv", "attention.pear": "attn_out", **under("mlp", MLP), "squeeze": "other", "score": "head"}
    assert roles(Tabular(), torch.zeros(samples, 9)) == found
    assert roles(FusedAttention(by_rows), torch.zeros(TOKENS, WIDTH)) == {"apple": "qkv", "pear": "attn_out"}
    assert roles(MisnamedMlp(), torch.zeros(TOKENS, WIDTH)) == {"qkv": "ffn_in", "proj": "ffn_out"}


def by_rows(self: Any, x: Tensor, fused: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(*(part[None] for part in fused.chunk(3, -1)))[0]


class ManyStreams(nn.Module):
    """Parallel residual streams that weights from a bare parameter mix, and that a block writes to by gates."""

    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.weights = nn.ParameterList(torch.zeros(WIDTH, 3) for _ in blocks)
        self.gates = nn.ParameterList(torch.zeros(WIDTH) for _ in blocks)
        self.first, self.last = nn.Linear(7, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        streams = self.first(x)[:, :, None].expand(-1, -1, 2, -1)
        for block, weights, gates in zip(self.blocks, self.weights, self.gates, strict=True):
            mixed = torch.einsum("bnse,bnsd->bned", (streams @ weights).tanh(), streams)
            branch = block(mixed[..., 0, :])
            streams = torch.einsum("bnd,bns->bnsd", branch, (streams @ gates).tanh()) + mixed[..., 1:, :]
        return self.last(streams.sum(2).mean(1))


def test_parallel_residual_streams_are_no_attention() -> None:
    model = ManyStreams(FusedAttention(), MisnamedMlp(), WrittenOutAttention(), MisnamedMlp())
    found = {fqn: role for fqn, role in roles(model, tokens(7)).items() if fqn.startswith("blocks")}
    assert found == {
        **under("blocks.0", {"apple": "qkv", "pear": "attn_out"}),
        **under("blocks.1", MLP),
        **under("blocks.2", ATTENTION),
        **under("blocks.3", MLP),
    }


def test_states_that_attention_summed_up_and_queries_read() -> None:
    """Tokens are summed into states, linears work on these, and each token reads the states back."""

    def by_states(self: Any, x: Tensor, fused: Tensor) -> Tensor:
        into, out = fused.chunk(2, -1)
        states = self.inside(into.mT.softmax(-1) @ x)
        return out @ states

    model = Stack(MisnamedMlp(), FusedAttention(by_states, rows=8, inside=nn.Linear(WIDTH, WIDTH)), MisnamedMlp())
    assert roles(model, tokens(7)) == {
        "first": "other",
        **under("blocks.0", MLP),
        **under("blocks.1", {"apple": "qkv", "inside": "qkv", "pear": "attn_out"}),
        **under("blocks.2", MLP),
        "last": "head",
    }


def test_an_in_place_activation_and_bias() -> None:
    class InPlace(MisnamedMlp):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.zeros(3 * WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.qkv(x)
            hidden += self.extra
            return self.proj(functional.relu(hidden, inplace=True))

    assert roles(InPlace(), tokens()) == MLP
