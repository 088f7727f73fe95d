"""Which rows of a fused projection are whose, and which features may stand in another order."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

from flysurgery.errors import WalkError
from flysurgery.walker import HEADS, HIDDEN_UNITS, QUERY_KEY, VALUE, Shared, Slice, Trial, find_shared, survey, targets_of, walk
from tests.support.composed import Composed
from tests.walker.toys import HEADS as COUNT
from tests.walker.toys import (
    TOKENS,
    WIDTH,
    FusedAttention,
    WrittenOutAttention,
    attend,
    attend_by_thirds,
    heads,
    keys_first,
    merged,
    tokens,
)

ORDERS = (HEADS, QUERY_KEY, VALUE)


def found(model: nn.Module, x: Tensor, what: str = HEADS) -> list[Shared]:
    seen = survey(model, x)
    return [each for each in find_shared(model, seen, targets_of(model, seen)) if each.what == what]


@torch.no_grad()
def shaken(model: nn.Module) -> nn.Module:
    """In float64 and with no parameter at a value that hides what it does."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.eval().double().parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator).double() * 0.3)
    return model


IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2)).double()
SEQUENCES = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3)).double()


def changed(at: str, change: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Attention in which something is done to q, the scores or the result."""

    def step(self: Any, x: Tensor, fused: Tensor) -> Tensor:
        q, k, v = by_thirds(fused)
        scores = (change(q) if at == "q" else q) @ k.mT
        result = (change(scores) if at == "scores" else scores).softmax(-1) @ v
        return merged(change(result) if at == "result" else result)

    return lambda: FusedAttention(step)


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


def with_two_readers(self: Any, x: Tensor) -> Tensor:
    result = attend(*by_thirds(self.apple(x)))
    return self.pear(result) + result.cumsum(-1)


def written_elsewhere(self: Any, x: Tensor) -> Tensor:
    """Values are added, in place, to a tensor which something else reads."""
    fused, sums = self.apple(x), torch.ones_like(x)
    sums[:, 1:] += fused[:, 1:, 48:]
    return self.pear(attend(*by_thirds(fused))) + sums


def composed(step: Any) -> nn.Module:
    return Composed(step, apple=nn.Linear(WIDTH, 3 * WIDTH), pear=nn.Linear(WIDTH, WIDTH))


DEPENDS = "the model's output depends on the order of"
SHARED = "heads share keys and values"
SEVERAL = "serve several attentions"
UNPROVEN = "does not prove which rows"


@pytest.mark.parametrize(
    ("make", "tied"),
    [
        (changed("q", lambda x: functional.normalize(x, dim=-1)), {}),
        (changed("scores", lambda x: x + torch.arange(TOKENS).double() - x.amax(-1, keepdim=True)), {}),
        (changed("q", lambda x: x * torch.arange(1.0, COUNT + 1).double()[:, None, None]), {HEADS: DEPENDS}),
        (changed("q", lambda x: x * torch.arange(1.0, 9).double()), {QUERY_KEY: DEPENDS}),
        (changed("result", lambda x: x + x.roll(1, 1)), {VALUE: DEPENDS}),
        (WrittenOutAttention, {}),
        (lambda: timm.create_model("pvt_v2_b0", depths=(1, 0, 0, 0), num_heads=(4, 4, 4, 4)), {}),  # keys on a coarser grid
        (
            lambda: timm.create_model("beit_base_patch16_224", img_size=32, embed_dim=48, depth=1, num_heads=3),
            dict.fromkeys(ORDERS, DEPENDS),
        ),
        (lambda: composed(with_two_readers), dict.fromkeys((HEADS, VALUE), DEPENDS)),
        (lambda: FusedAttention(lambda self, x, fused: attend(*grouped(fused)), 40), dict.fromkeys(ORDERS, SHARED)),
        (lambda: FusedAttention(differential, 5 * WIDTH), dict.fromkeys(ORDERS, SEVERAL)),
        (lambda: composed(written_elsewhere), dict.fromkeys(ORDERS, UNPROVEN)),
    ],
)
def test_orders_are_tied_where_outputs_depend_on_them_or_rows_are_unknown(make: Callable[[], nn.Module], tied: dict[str, str]) -> None:
    torch.manual_seed(0)
    model = shaken(make())
    everything = found(model, SEQUENCES if isinstance(model, Composed) else IMAGES)
    assert everything
    for each in everything:
        assert set(each.tied) == set(tied), each.tied
        assert all(words in each.tied[order] for order, words in tied.items()), each.tied


def by_three_and_head(y: Tensor) -> tuple[Tensor, ...]:
    return y.unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4).unbind(0)


def overwritten_query(y: Tensor) -> tuple[Tensor, ...]:
    q, k, v = by_three_and_head(y)
    q[:, :, 1:] = k[:, :, 1:]
    return q, k, v


def keys_as_values(y: Tensor) -> tuple[Tensor, ...]:
    q, both = (heads(part) for part in y.chunk(2, -1))
    return q, both, both


def weighed(self: Any, x: Tensor, fused: Tensor) -> Tensor:
    """Which is the query follows from the softmax."""
    q, k, v = by_thirds(fused)
    return merged(keys_first(self, k, q, v))


def by_name(self: Any, x: Tensor, fused: Tensor) -> Tensor:
    v, q, k = fused.chunk(3, -1)
    return functional.scaled_dot_product_attention(value=v, query=q, key=k)


def under_autocast(self: Any, x: Tensor, fused: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        q, k, v = (heads(part * 2) for part in fused.chunk(3, -1))
    return attend(q, k, v)


def thirds(names: str) -> tuple[Slice, ...]:
    return tuple(Slice(name, 24 * i, 24 * i + 24) for i, name in enumerate(names))


def arranged(arrange: Callable[[Tensor], tuple[Tensor, ...]]) -> Any:
    return lambda self, x, fused: attend(*arrange(fused))


@pytest.mark.parametrize(
    ("step", "rows", "expected"),
    [
        (weighed, 72, thirds("qkv")),
        (by_name, 72, thirds("vqk")),
        (under_autocast, 72, thirds("qkv")),
        (arranged(by_three_and_head), 72, thirds("qkv")),
        (arranged(lambda y: y.unflatten(-1, (3, 3, 8)).permute(3, 0, 2, 1, 4).unbind(0)), 72, None),  # interleaved by head
        (arranged(overwritten_query), 72, None),
        (arranged(keys_as_values), 48, (Slice("q", 0, 24), Slice("k_v", 24, 48))),
        (arranged(grouped), 40, (Slice("q", 0, 24), Slice("k", 24, 32), Slice("v", 32, 40))),
    ],
)
def test_arrangements(step: Any, rows: int, expected: tuple[Slice, ...] | None) -> None:
    target = walk(FusedAttention(step, rows), tokens())[0]
    assert (target.fqn, target.role, target.split) == ("apple", "qkv", expected)


IN, HIDDEN = 8, 12


def ffn(step: Callable[..., Tensor], between: Callable[[Tensor], Tensor] | nn.Module = functional.gelu) -> nn.Module:
    return Composed(step, up=nn.Linear(IN, HIDDEN), between=between, down=nn.Linear(HIDDEN, IN))


def read_twice(self: Any, x: Tensor) -> Tensor:
    hidden = functional.gelu(self.up(x))
    return self.down(hidden) + hidden[..., :IN]


def called_twice(self: Any, x: Tensor) -> Tensor:
    other = self.down(x.repeat(1, 1, 2)[..., :HIDDEN])
    return self.down(functional.gelu(self.up(x))) + other


BETWEEN: list[tuple[Callable[[Tensor], Tensor] | nn.Module, bool]] = [
    (nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.5)), True),
    (lambda x: functional.silu(x.reshape(-1, HIDDEN)).view(-1, 5, HIDDEN), True),
    (lambda x: x * torch.sigmoid(x.mean(-1, keepdim=True)), True),
    (shaken(nn.LayerNorm(HIDDEN)).float(), False),
    (lambda x: torch.maximum(x, torch.arange(1.0, HIDDEN + 1)), False),
    (lambda x: functional.pad(x[..., 1:], (0, 1)), False),
]
"""What lies between two linears, and whether the units may stand in any order."""


@pytest.mark.parametrize(
    ("model", "is_pair"),
    [
        *((ffn(lambda self, x: x + self.down(self.between(self.up(x))), between), is_pair) for between, is_pair in BETWEEN),
        (ffn(read_twice), False),
        (ffn(called_twice), False),
    ],
)
def test_units_that_pass_by_themselves_and_are_read_once_make_a_pair(model: nn.Module, is_pair: bool) -> None:
    x = torch.randn(2, 5, IN, generator=torch.Generator().manual_seed(0))
    assert [each.linears for each in found(model, x, HIDDEN_UNITS)] == ([("up", "down")] if is_pair else [])


def test_a_model_that_does_not_run_in_float64_is_refused_in_a_sentence() -> None:
    model = FusedAttention(lambda self, x, fused: attend_by_thirds(self, x, fused).float())
    with pytest.raises(WalkError, match=r"^FusedAttention cannot be tried with features in another order: "):
        Trial(model, (SEQUENCES,))
