"""Proofs of row ranges: by construction, and against the numbers that a model computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn

from flysurgery.walker import Slice, walk
from tests.walker.toys import WIDTH, FusedAttention, heads, tokens

Arrange = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


class Arranged(FusedAttention):
    """Fused attention whose query, key and value come out of the projection as ``arrange`` says."""

    def __init__(self, arrange: Arrange):
        super().__init__()
        self.arrange = arrange

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.arrange(self.apple(x))
        return self.pear(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def by_three_and_head(y: Tensor) -> tuple[Tensor, ...]:
    return y.unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4).unbind(0)


def by_head_and_three(y: Tensor) -> tuple[Tensor, ...]:
    return y.unflatten(-1, (3, 3, 8)).permute(3, 0, 2, 1, 4).unbind(0)


def by_head_then_split(y: Tensor) -> tuple[Tensor, ...]:
    return heads(y).split([8, 8, 8], dim=-1)


def backwards(y: Tensor) -> tuple[Tensor, ...]:
    v, k, q = (heads(part) for part in (y[..., 48:], y[..., 24:48], y[..., :24]))
    return v, k, q


def rotated(y: Tensor) -> tuple[Tensor, ...]:
    q, k, v = by_three_and_head(y)
    angle = torch.arange(8.0, device=y.device)
    return (q * angle.cos() + torch.cat([-q[..., 4:], q[..., :4]], -1) * angle.sin(), nn.functional.normalize(k, dim=-1), v)


def scaled_in_place(y: Tensor) -> tuple[Tensor, ...]:
    y += 1.0
    q, k, v = by_three_and_head(y)
    q *= 0.5
    return q, k, v


def normalized_before_the_split(y: Tensor) -> tuple[Tensor, ...]:
    return by_three_and_head(nn.functional.layer_norm(y, (72,)))


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


def repeated_by_a_tensor(y: Tensor) -> tuple[Tensor, ...]:
    q, k, v = by_three_and_head(y)
    return q, *(part.repeat_interleave(torch.tensor([2] * 5), dim=2, output_size=10) for part in (k, v))


def chosen_tokens(y: Tensor) -> tuple[Tensor, ...]:
    q, k, v = by_three_and_head(y)
    best = k.sum(-1).topk(2).indices[..., None].expand(-1, -1, -1, 8)
    return q, k.gather(2, best), v.gather(2, best)


def rows_left_out(y: Tensor) -> tuple[Tensor, ...]:
    return tuple(part[..., :-1] for part in by_three_and_head(y))


THIRDS = (Slice("q", 0, 24), Slice("k", 24, 48), Slice("v", 48, 72))


@pytest.mark.parametrize(
    ("arrange", "expected"),
    [
        (by_three_and_head, THIRDS),
        (by_head_and_three, None),
        (by_head_then_split, None),
        (backwards, (Slice("v", 0, 24), Slice("k", 24, 48), Slice("q", 48, 72))),
        (rotated, THIRDS),
        (scaled_in_place, THIRDS),
        (repeated_by_a_tensor, THIRDS),
        (chosen_tokens, THIRDS),
        (normalized_before_the_split, None),
        (mixed_query_and_key, None),
        (overwritten_query, None),
        (assembled_query, None),
    ],
)
def test_arrangements(arrange: Arrange, expected: tuple[Slice, ...] | None) -> None:
    target = walk(Arranged(arrange), tokens())[0]
    assert (target.fqn, target.role) == ("apple", "qkv")
    assert target.split == expected


def keys_first(q: Tensor, k: Tensor) -> Tensor:
    return (k @ q.mT).softmax(-2).mT


def keys_first_by_einsum(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bhjd,bhid->bhij", k, q).softmax(-1)


def queries_first_by_einsum(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bhid,bhjd->bhij", q, k).softmax(3)


@pytest.mark.parametrize("weigh", [keys_first, keys_first_by_einsum, queries_first_by_einsum])
def test_which_is_the_query_follows_from_the_softmax(weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
    class WrittenOut(FusedAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (heads(part) for part in self.apple(x).chunk(3, -1))
            return self.pear((weigh(q, k) @ v).transpose(1, 2).flatten(2))

    assert walk(WrittenOut(), tokens())[0].split == THIRDS


def test_rows_that_reach_nothing_are_no_proof() -> None:
    model = Arranged(rows_left_out)  # pyright: ignore[reportArgumentType]
    model.pear = nn.Linear(21, WIDTH)
    assert walk(model, tokens())[0].split is None


def test_keys_that_are_also_values() -> None:
    class Shared(FusedAttention):
        def __init__(self) -> None:
            super().__init__()
            self.apple = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q, both = self.apple(x).chunk(2, -1)
            return self.pear(nn.functional.scaled_dot_product_attention(q, both, both))

    assert walk(Shared(), tokens())[0].split == (Slice("q", 0, 24), Slice("k_v", 24, 48))


def test_fewer_heads_of_keys_and_values() -> None:
    class Grouped(FusedAttention):
        def __init__(self) -> None:
            super().__init__()
            self.apple = nn.Linear(WIDTH, 4 * 8)  # two query heads of 8, one key head, one value head
            self.pear = nn.Linear(16, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.apple(x).split([16, 8, 8], dim=-1)
            k, v = (heads(part, 1).repeat_interleave(2, dim=1) for part in (k, v))
            return self.pear(nn.functional.scaled_dot_product_attention(heads(q, 2), k, v).transpose(1, 2).flatten(2))

    assert walk(Grouped(), tokens())[0].split == (Slice("q", 0, 16), Slice("k", 16, 24), Slice("v", 24, 32))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
@torch.no_grad()
def test_the_ranges_against_what_the_model_computes(name: str) -> None:
    """Values of zero silence attention; with queries of zero the keys don't matter, but the values do."""
    torch.manual_seed(5)
    options = {"depth": 1} if name.startswith("vit") else {"depths": (1,), "num_heads": (3,), "embed_dim": 48, "window_size": 4}
    model = timm.create_model(name, img_size=32, **options).eval()
    target = next(target for target in walk(model) if target.role == "qkv")
    attention = model.get_submodule(target.fqn.removesuffix(".qkv"))
    assert target.split is not None
    ranges = {part.name: slice(part.start, part.stop) for part in target.split}
    linear, x = model.get_submodule(target.fqn), torch.randn(2, 16, target.in_features)
    assert isinstance(linear, nn.Linear)
    assert linear.bias is not None

    def result(scale: dict[str, float]) -> Tensor:
        weight, bias = linear.weight.clone(), linear.bias.clone()
        try:
            for part, factor in scale.items():
                linear.weight[ranges[part]] *= factor
                linear.bias[ranges[part]] *= factor
            seen: list[Tensor] = []
            hook = attention.get_submodule("proj").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
            attention(x)
            hook.remove()
            return seen[0]
        finally:
            linear.weight.copy_(weight)
            linear.bias.copy_(bias)

    assert torch.count_nonzero(result({"v": 0})) == 0
    assert torch.count_nonzero(result({"q": 0})) > 0
    assert torch.equal(result({"q": 0}), result({"q": 0, "k": 7}))
    assert not torch.equal(result({"q": 0}), result({"q": 0, "v": 7}))
    assert not torch.equal(result({}), result({"k": 7}))
