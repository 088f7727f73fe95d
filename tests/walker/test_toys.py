"""Structure, not names: modules with names that say nothing, or lie."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flysurgery.walker import Slice, walk
from tests.walker.toys import BATCH, TOKENS, WIDTH, FusedAttention, Gated, MisnamedMlp, Stack, WrittenOutAttention, heads, tokens


def roles(model: nn.Module, example: Tensor) -> dict[str, str]:
    return {target.fqn: target.role for target in walk(model, example)}


def codes(model: nn.Module, example: Tensor) -> dict[str, tuple[str, ...]]:
    return {target.fqn: tuple(o.code for o in target.obstacles) for target in walk(model, example)}


def test_arbitrary_names_in_a_whole_model() -> None:
    model = Stack(FusedAttention(), MisnamedMlp(), WrittenOutAttention(), Gated())
    assert roles(model, tokens(7)) == {
        "first": "other",
        "blocks.0.apple": "qkv",
        "blocks.0.pear": "attn_out",
        "blocks.1.qkv": "ffn_in",
        "blocks.1.proj": "ffn_out",
        "blocks.2.one": "qkv",
        "blocks.2.two": "qkv",
        "blocks.2.three": "qkv",
        "blocks.2.four": "attn_out",
        "blocks.3.left": "ffn_in",
        "blocks.3.right": "ffn_in",
        "blocks.3.down": "ffn_out",
        "last": "head",
    }
    found = codes(model, tokens(7))
    assert found.pop("first") == ("patch-embedding",)
    assert found.pop("last") == ("head",)
    assert set(found.values()) == {()}


def test_sizes_bias_and_rows() -> None:
    first, second = walk(FusedAttention(), tokens())
    assert (first.fqn, first.in_features, first.out_features, first.bias) == ("apple", WIDTH, 3 * WIDTH, True)
    assert (second.fqn, second.in_features, second.out_features, second.bias) == ("pear", WIDTH, WIDTH, False)
    assert (first.calls, first.rows) == (second.calls, second.rows) == (1, BATCH * TOKENS)


def test_keyword_arguments_of_the_fused_operator() -> None:
    class Keywords(FusedAttention):
        def forward(self, x: Tensor) -> Tensor:
            v, q, k = self.apple(x).chunk(3, -1)
            return self.pear(nn.functional.scaled_dot_product_attention(value=v, query=q, key=k))

    target = walk(Keywords(), tokens())[0]
    assert target.split == (Slice("v", 0, 24), Slice("q", 24, 48), Slice("k", 48, 72))


def test_attention_by_einsum() -> None:
    class Einsum(WrittenOutAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = heads(self.one(x)), heads(self.two(x)), heads(self.three(x))
            weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
            return self.four(torch.einsum("bhij,bhjd->bihd", weights, v).flatten(2))

    assert roles(Einsum(), tokens()) == {"one": "qkv", "two": "qkv", "three": "qkv", "four": "attn_out"}


def test_heads_mixed_by_a_linear_are_no_projection() -> None:
    class TalkingHeads(WrittenOutAttention):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(3, 3)
            self.after = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = heads(self.one(x)), heads(self.two(x)), heads(self.three(x))
            scores = self.before((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            weights = self.after(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            return self.four((weights @ v).transpose(1, 2).flatten(2))

    model = TalkingHeads()
    assert roles(model, tokens()) == {
        "one": "qkv",
        "two": "qkv",
        "three": "qkv",
        "before": "other",
        "after": "other",
        "four": "attn_out",
    }
    assert codes(model, tokens())["before"] == codes(model, tokens())["after"] == ("talking-heads",)


def test_heads_mixed_by_a_parameter_leave_the_projections_alone() -> None:
    class Mixed(WrittenOutAttention):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Parameter(torch.eye(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = heads(self.one(x)), heads(self.two(x)), heads(self.three(x))
            scores = torch.einsum("bhij,hg->bgij", q @ k.mT, self.mix)
            return self.four((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    assert roles(Mixed(), tokens()) == {"one": "qkv", "two": "qkv", "three": "qkv", "four": "attn_out"}


def test_a_position_bias_computed_from_the_query() -> None:
    class Relative(WrittenOutAttention):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(8, TOKENS))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = heads(self.one(x)), heads(self.two(x)), heads(self.three(x))
            scores = q @ k.mT + torch.einsum("bhid,dj->bhij", q, self.table)
            return self.four((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    assert roles(Relative(), tokens()) == {"one": "qkv", "two": "qkv", "three": "qkv", "four": "attn_out"}


def test_values_written_into_another_tensor() -> None:
    class Assembled(WrittenOutAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = heads(self.one(x)), heads(self.two(x)), heads(self.three(x))
            turned = torch.zeros(q.shape)
            turned[..., :4] = -q[..., 4:]
            turned[..., 4:] = q[..., :4]
            return self.four(nn.functional.scaled_dot_product_attention(turned, k, v).transpose(1, 2).flatten(2))

    assert roles(Assembled(), tokens()) == {"one": "qkv", "two": "qkv", "three": "qkv", "four": "attn_out"}
    assert set(codes(Assembled(), tokens()).values()) == {()}


def test_a_number_of_rows_that_depends_on_data() -> None:
    class Masked(MisnamedMlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[x.sum(-1) > 0])

    targets = walk(Masked(), tokens())
    assert [(target.fqn, target.role, target.calls, target.rows) for target in targets] == [
        ("qkv", "ffn_in", 1, 0),
        ("proj", "ffn_out", 1, 0),
    ]


def test_a_last_layer_before_pooling_and_the_head_is_no_feed_forward() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(WIDTH, 40)
            self.classify = nn.Linear(40, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.silu(self.mix(x)).transpose(1, 2)
            return self.classify(nn.functional.adaptive_avg_pool1d(x, 1).flatten(1))

    assert roles(Pooled(), tokens()) == {"mix": "other", "classify": "head"}


def test_attention_without_softmax_does_not_blur_what_follows() -> None:
    class Linear(WrittenOutAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = heads(self.one(x)).relu(), heads(self.two(x)).relu(), heads(self.three(x))
            return self.four((q @ (k.mT @ v)).transpose(1, 2).flatten(2))

    found = roles(Stack(Linear(), MisnamedMlp(), WrittenOutAttention()), tokens(7))
    assert [found[f"blocks.0.{name}"] for name in ("one", "two", "three", "four")] == ["qkv", "qkv", "qkv", "attn_out"]
    assert (found["blocks.1.qkv"], found["blocks.1.proj"]) == ("ffn_in", "ffn_out")
    assert [found[f"blocks.2.{name}"] for name in ("one", "two", "three", "four")] == ["qkv", "qkv", "qkv", "attn_out"]
    assert found["last"] == "head"


def test_attention_with_the_softmax_on_query_and_key() -> None:
    class Efficient(WrittenOutAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = heads(self.one(x)).softmax(-1), heads(self.two(x)).softmax(-2), heads(self.three(x))
            return self.four((q @ (k.mT @ v)).transpose(1, 2).flatten(2))

    assert roles(Efficient(), tokens()) == {"one": "qkv", "two": "qkv", "three": "qkv", "four": "attn_out"}


def test_a_gate_on_the_output_of_attention_is_no_feed_forward() -> None:
    class GatedOutput(FusedAttention):
        def __init__(self) -> None:
            super().__init__()
            self.door = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (heads(part) for part in self.apple(x).chunk(3, -1))
            attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return self.pear(attended * self.door(x).sigmoid())

    assert roles(GatedOutput(), tokens()) == {"apple": "qkv", "door": "other", "pear": "attn_out"}


def test_normalization_written_out_is_no_gate() -> None:
    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(WIDTH, WIDTH)
            self.two = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x)
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            return self.two(x)

    assert roles(Normalized(), tokens()) == {"one": "other", "two": "head"}


def test_an_in_place_activation_and_bias() -> None:
    class InPlace(MisnamedMlp):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.zeros(3 * WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.qkv(x)
            hidden += self.extra
            nn.functional.relu(hidden, inplace=True)
            return self.proj(hidden)

    assert roles(InPlace(), tokens()) == {"qkv": "ffn_in", "proj": "ffn_out"}


def test_queries_that_are_parameters_pool() -> None:
    class Pool(WrittenOutAttention):
        def __init__(self) -> None:
            super().__init__()
            self.seed = nn.Parameter(torch.zeros(1, 4, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            q = self.one(self.seed.expand(len(x), -1, -1))
            attended = nn.functional.scaled_dot_product_attention(q, self.two(x), self.three(x))
            return self.four(attended).mean(1)

    model = Pool()
    assert set(roles(model, tokens()).values()) == {"other"}
    assert set(codes(model, tokens()).values()) == {("pool",)}


def test_a_region_under_autocast_is_followed() -> None:
    class Autocast(FusedAttention):
        def forward(self, x: Tensor) -> Tensor:
            fused = self.apple(x)
            with torch.autocast("cpu", enabled=False):
                q, k, v = (heads(part * 2) for part in fused.chunk(3, -1))
            return self.pear(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    first, second = walk(Autocast(), tokens())
    assert (first.role, second.role) == ("qkv", "attn_out")
    assert first.split == (Slice("q", 0, 24), Slice("k", 24, 48), Slice("v", 48, 72))


def test_additive_attention() -> None:
    """A score for each token, their weighted sum as a context, and the context times the values."""

    class Additive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three, self.four = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.score = nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            weights = self.score(self.one(x)).softmax(1)
            context = (weights * self.two(x)).sum(1, keepdim=True)
            return self.four(context * self.three(x))

    found = roles(Stack(Additive(), MisnamedMlp()), tokens(7))
    assert [found[f"blocks.0.{name}"] for name in ("one", "two", "three", "four", "score")] == ["other", "qkv", "qkv", "attn_out", "other"]
    assert (found["blocks.1.qkv"], found["blocks.1.proj"]) == ("ffn_in", "ffn_out")


def test_pooling_by_weights_straight_from_a_linear() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.classify = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.classify((self.score(x).softmax(1).mT @ x).squeeze(1))

    assert roles(Pooled(), tokens()) == {"score": "other", "classify": "head"}
    assert codes(Pooled(), tokens())["score"] == ("pool",)


def test_squeeze_and_excitation_is_no_attention() -> None:
    class Excited(MisnamedMlp):
        def __init__(self) -> None:
            super().__init__()
            self.squeeze = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.squeeze(x.mean(1, keepdim=True)).sigmoid())

    assert roles(Excited(), tokens()) == {"squeeze": "other", "qkv": "ffn_in", "proj": "ffn_out"}
