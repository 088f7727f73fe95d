"""Proofs of row ranges: by construction, and against the numbers that a model computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn

from flysurgery.walker import Slice, walk
from tests.walker.toys import FusedAttention, attend, heads, merged, tokens


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
    return tuple(part[..., :-1] for part in y.unflatten(-1, (3, 3, 9)).permute(2, 0, 3, 1, 4).unbind(0))


def keys_as_values(y: Tensor) -> tuple[Tensor, ...]:
    q, both = (heads(part) for part in y.chunk(2, -1))
    return q, both, both


def grouped(y: Tensor) -> tuple[Tensor, ...]:
    """Three heads of queries, one of keys and one of values."""
    q, k, v = y.split([24, 8, 8], dim=-1)
    return heads(q), *(heads(part, 1).repeat_interleave(3, dim=1) for part in (k, v))


THIRDS = (Slice("q", 0, 24), Slice("k", 24, 48), Slice("v", 48, 72))


@pytest.mark.parametrize(
    ("arrange", "rows", "expected"),
    [
        (by_three_and_head, 72, THIRDS),
        (by_head_and_three, 72, None),
        (by_head_then_split, 72, None),
        (backwards, 72, (Slice("v", 0, 24), Slice("k", 24, 48), Slice("q", 48, 72))),
        (rotated, 72, THIRDS),
        (scaled_in_place, 72, THIRDS),
        (repeated_by_a_tensor, 72, THIRDS),
        (chosen_tokens, 72, THIRDS),
        (keys_as_values, 48, (Slice("q", 0, 24), Slice("k_v", 24, 48))),
        (grouped, 40, (Slice("q", 0, 24), Slice("k", 24, 32), Slice("v", 32, 40))),
        (normalized_before_the_split, 72, None),
        (mixed_query_and_key, 72, None),
        (overwritten_query, 72, None),
        (assembled_query, 72, None),
        (rows_left_out, 81, None),
    ],
)
def test_arrangements(arrange: Callable[[Tensor], tuple[Tensor, ...]], rows: int, expected: tuple[Slice, ...] | None) -> None:
    target = walk(FusedAttention(lambda self, x, fused: attend(*arrange(fused)), rows), tokens())[0]
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
    def weighed(self: FusedAttention, x: Tensor, fused: Tensor) -> Tensor:
        q, k, v = (heads(part) for part in fused.chunk(3, -1))
        return merged(weigh(q, k) @ v)

    assert walk(FusedAttention(weighed), tokens())[0].split == THIRDS


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
