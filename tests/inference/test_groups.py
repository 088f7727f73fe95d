"""Groups by dataflow: blocks, halves, rows of halves and gated ones; fused where they are the model itself too, and the way back."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.layers.mlp import GluMlp, SwiGLU
from torch import Tensor, nn
from torch.nn import functional

import flysurgery
from flysurgery.inference.find_groups import find_groups
from recipes.vit_units import PaperBlock, Residual, paper_feed_forward
from tests.inference.conftest import FFN_LAUNCHES
from tests.inference.models import BLOCK, SMALL, check_fused, ready, small
from tests.support.composed import Composed
from tests.support.problems import all_pairs
from tests.support.tolerance import OF_DTYPE, assert_epilogue_comparable, assert_equal

WIDTH = 48
ATTENTION = BLOCK[:3]


def vit(width: int = WIDTH, heads: int = 2) -> Any:
    return timm.create_model("vit_tiny_patch16_224", **{**SMALL, "embed_dim": width, "num_heads": heads, "init_values": 0.1})


def dense(out_features: int, in_features: int, bias: bool) -> nn.Module:
    return nn.Linear(in_features, out_features, bias)


def tokens(count: int = 2) -> Tensor:
    return torch.randn((count, 17, WIDTH), generator=torch.Generator().manual_seed(2))


def attend(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, dim=-1)
    return self.out(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(1))


def attention(step: Callable[..., Tensor] = attend, *, normed: bool = True) -> Composed:
    """Attention of one head, with the norm inside of it or none, and a mask where it is given one."""
    norm = nn.LayerNorm(WIDTH) if normed else nn.Identity()
    return Composed(step, norm=norm, qkv=nn.Linear(WIDTH, 3 * WIDTH), out=nn.Linear(WIDTH, WIDTH))


class Feed(nn.Sequential):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Row(nn.Module):
    """What ``step`` makes of two attentions, two feed-forward modules and a last norm."""

    def __init__(self, step: Callable[..., Tensor], *, normed: bool = True) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(attention(normed=normed) for _ in range(2))
        self.feeds = nn.ModuleList(Feed() for _ in range(2))
        self.last = nn.LayerNorm(WIDTH)
        self.step = step

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.step(self, x, *others)


def row(self: Any, x: Tensor, *others: Tensor) -> Tensor:
    for attend, feed in zip(self.attentions, self.feeds, strict=True):
        x = attend(x, *others) + x
        x = x + feed(x)
    return self.last(x)


PARTS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a block": (lambda: vit().blocks[0], BLOCK),
    "attention": (lambda: (lambda block: Residual(block.norm1, block.attn))(vit().blocks[0]), ATTENTION),
    "feed-forward": (lambda: (lambda block: Residual(block.norm2, block.mlp))(vit().blocks[0]), ["ffn"]),
    "feed-forward without a sum": (lambda: paper_feed_forward(vit(), dense), ["ffn"]),
    "q, k and v apart, attention written out": (lambda: PaperBlock(vit(), dense), ["linear_residual", "ffn"]),
    "a row of halves and a norm": (lambda: Row(row), BLOCK * 2),
    "a row without norms before attention": (lambda: Row(row, normed=False), [name for name in BLOCK * 2 if name != "norm_linear"]),
    "feed-forward first": (lambda: Row(lambda self, x: (lambda y: y + self.attentions[0](y))(x + self.feeds[0](x))), ["ffn", *ATTENTION]),
}


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("held", [False, True])
def test_each_part_is_fused_alone_and_held(called: list[str], kind: str, held: bool) -> None:
    make, kernels = PARTS[kind]
    part = ready(make(), convert=False)
    model, x = nn.Sequential(part).eval() if held else part, tokens()
    before, modules = model(x), list(model.modules())
    first = next(iter(inspect.signature(model.forward).parameters))
    check_fused(model, x, called, kernels, keep=True)
    assert_equal(model(**{first: x}), before)
    assert called == kernels * held, "a call by name goes to the own forward"
    called.clear()
    assert list(part.modules()) == modules[held:]
    assert flysurgery.restore(model) == 1
    assert list(model.modules()) == modules and "forward" not in vars(part)
    assert flysurgery.restore(model) == 0
    assert_equal(model(x), before)
    assert not called


def test_a_norm_that_norms_something_else_as_well_is_kept(called: list[str]) -> None:
    crossing = attention(lambda self, x: attend(self, x) * self.norm(x.flip(-1)))
    report = check_fused(ready(crossing, convert=False), tokens(), called)
    assert {row.group: row.reason and row.reason.code for row in report.rows} == {"qkv": "calls", "attn_out": "no-residual"}


def test_numbers_that_may_be_the_inputs_size_are_left(called: list[str]) -> None:
    def scaled(self: Any, x: Tensor, size: Any) -> Tensor:
        return attend(self, x * (size[0] if isinstance(size, tuple) else size))

    def sized(self: Any, x: Tensor, *size: Any) -> Tensor:
        return x + self.attend(x, *(size or (x.shape[1],)))

    for given, fused in (((), False), ((17,), True), (((17, 3),), True)):
        model, x = ready(Composed(sized, attend=attention(scaled)), convert=False), tokens()
        report = check_fused(model, (x, *given), called, keep=True)
        assert ("attn_out" in {row.group for row in report.fused}) is fused
        assert_equal(model(x[:, :9], *given), report.model.attend(x[:, :9], *(given or (9,))) + x[:, :9])  # pyright: ignore
        assert_equal(model(x, 5), x + model.attend(x, 5))  # pyright: ignore


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (lambda self, x: row(self, x) * 2, "more"),
        (lambda self, x: row(self, x + 1), "more"),
        (lambda self, x: self.attentions[0](x) + x.flip(1), "no-residual"),
        (lambda self, x: (lambda y: y + self.attentions[1](x))(x + self.attentions[0](x)), "no-residual"),
        (lambda self, x: (lambda y: torch.stack((y, self.last(y))))(x + self.attentions[0](x)), "more"),
        (lambda self, x: (lambda y: (y, y + self.feeds[0](y)))(x + self.attentions[0](x)), "exits"),
        (lambda self, x: (lambda y: y + self.attentions[0](y))(x + self.attentions[0](x)), "calls"),
    ],
)
def test_what_does_more_is_left_with_the_reason(called: list[str], step: Callable[..., Tensor], code: str) -> None:
    report = check_fused(ready(Row(step), convert=False), tokens(), called)
    assert code in {row.reason.code for row in report.rows if row.reason and row.group == "attn_out"}
    assert "attn_out" not in {row.group for row in report.fused}


HIDDEN = 2 * WIDTH


def alone(mlp: nn.Module) -> nn.Module:
    """A norm, a feed-forward module, and a residual."""
    return ready(Composed(lambda self, x: x + self.mlp(self.norm(x)), norm=nn.LayerNorm(WIDTH), mlp=mlp), convert=False)


def written(hidden: Callable[..., Any], outputs: int = 2 * HIDDEN) -> nn.Module:
    """A feed-forward module whose hidden units are what ``hidden`` makes of the outputs of one layer and, where it has it, of another.

    Where it gives two results, the second is added to the output.
    """

    def step(self: Any, x: Tensor) -> Tensor:
        made = hidden(self.up, self.other, x)
        return self.down(made) if isinstance(made, Tensor) else self.down(made[0]) + made[1]

    return Composed(step, up=nn.Linear(WIDTH, outputs), other=nn.Linear(WIDTH, HIDDEN), down=nn.Linear(HIDDEN, WIDTH))


def halves(up: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    return up(x).chunk(2, dim=-1)


def packed(gate: int) -> nn.Module:
    return GluMlp(WIDTH, 2 * HIDDEN, act_layer=nn.SiLU, gate_last=bool(gate))


MODULES = {
    "two layers": lambda: SwiGLU(WIDTH, HIDDEN),
    "two layers and a norm": lambda: SwiGLU(WIDTH, HIDDEN, norm_layer=nn.LayerNorm),
    "halves, the gate first": lambda: packed(0),
    "halves, the gate last": lambda: packed(1),
    "halves and a norm": lambda: GluMlp(WIDTH, 2 * HIDDEN, act_layer=nn.GELU, norm_layer=nn.LayerNorm),
    "halves by split": lambda: written(
        lambda up, other, x: (lambda a, b: b * functional.gelu(a, approximate="tanh"))(*up(x).split(HIDDEN, dim=-1))
    ),
}


@pytest.mark.parametrize("converted", [(), ("ffn_in",), ("ffn_in", "ffn_out")], ids=str)
@pytest.mark.parametrize("kind", MODULES)
def test_each_form_is_fused_and_outputs_stay(called: list[str], kind: str, converted: tuple[str, ...]) -> None:
    model, x = alone(MODULES[kind]()), torch.randn(3, 5, WIDTH)
    if converted:
        flysurgery.convert(model, "monarch", roles=converted, nblocks=4, example=x)
    report = check_fused(model, x, called, ["ffn"])
    assert [(row.group, row.launches) for row in report.fused] == [("ffn", FFN_LAUNCHES)]
    assert " | ".join(FFN_LAUNCHES) in str(report)


@pytest.mark.parametrize(
    ("hidden", "outputs", "code"),
    [
        (lambda up, other, x: functional.silu(halves(up, x)[0]) * halves(up, x)[1], 2 * HIDDEN, "gated"),  # the layer runs twice
        (lambda up, other, x: functional.silu(up(x)) * other(2 * x), HIDDEN, "gated"),  # of other inputs
        (lambda up, other, x: functional.silu(up(x)) * x.repeat(1, 1, 2), HIDDEN, "gated"),
        (lambda up, other, x: functional.silu(up(x)) * functional.silu(other(x)), HIDDEN, "gated"),
        (lambda up, other, x: functional.silu(up(x)[..., :HIDDEN]) * up(x)[..., :1], 2 * HIDDEN, "gated"),
        (lambda up, other, x: (lambda a, b: (functional.silu(a) * b, b[..., :1]))(*halves(up, x)), 2 * HIDDEN, "shared"),
        (lambda up, other, x: functional.glu(up(x)), 2 * HIDDEN, "activation"),
        (lambda up, other, x: (lambda a: a * torch.sigmoid(1.702 * a))(up(x)), HIDDEN, "activation"),  # QuickGELU
        (lambda up, other, x: (lambda a, b: functional.silu(a) * b + b.mean())(*halves(up, x)), 2 * HIDDEN, "activation"),
        (lambda up, other, x: (lambda a, b: functional.silu(a) * functional.dropout(b, 0.5))(*halves(up, x)), 2 * HIDDEN, "gated"),
    ],
)
def test_what_is_something_else_is_left_with_the_reason(called: list[str], hidden: Callable[..., Tensor], outputs: int, code: str) -> None:
    model, x = alone(written(hidden, outputs)), torch.randn(3, 5, WIDTH)
    assert [reason.code for _, reason in find_groups(model, x).reasons.values()] == [code]
    assert not flysurgery.optimize(model, x).fused


GPU_SIZES: dict[str, Any] = {"img_size": 48, "patch_size": 16, "embed_dim": 192, "num_heads": 3, "num_classes": 64}
GPU_MODELS: list[tuple[str, dict[str, Any]]] = [
    ("vit_tiny_patch16_224", {"init_values": 0.1}),
    ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg", "embed_dim": 384, "num_heads": 6}),
    ("vit_small_patch14_reg4_dinov2", {}),
    ("eva02_tiny_patch14_224", {}),
    ("eva02_base_patch14_224", {}),
    ("vit_giant_patch14_dinov2", {}),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize(
    ("given", "dtype", "convert"), all_pairs(GPU_MODELS, (torch.float16, torch.bfloat16, torch.float32), (False, True)), ids=str
)
def test_on_a_gpu_models_keep_their_outputs(given: tuple[str, dict[str, Any]], dtype: torch.dtype, convert: bool) -> None:
    name, options = given
    model = small(name, convert=convert, **GPU_SIZES | options).cuda().to(dtype)
    x = torch.randn((65, 3, 48, 48), generator=torch.Generator().manual_seed(2)).cuda().to(dtype)
    with torch.no_grad():
        truth, before = copy.deepcopy(model).double()(x.double()), model(x)
        report = flysurgery.optimize(model, x)
        found = model(x)
        assert_epilogue_comparable(found, before, truth, OF_DTYPE[dtype])
        assert sum(row.group == "ffn" for row in report.fused) == 2
        if "eva" not in name:
            assert {"patch_embed", "patch_embed.proj"} <= {row.fqn for row in report.fused}
            assert_equal(flysurgery.capture(model, x)(x), found)
        assert report.restore() > 0
        assert_equal(model(x), before)
