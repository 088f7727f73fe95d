"""Roles by structure, not names, also in one small model a family; what blocks a replacement; and where one tensor carries all on."""

import importlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import timm
import torch
from timm.layers import set_fused_attn
from timm.models.vision_transformer import ParallelScalingBlock
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from vit_pytorch import SimpleViT, ViT

from flysurgery.walker import Slice, Switch, Target, find_cuts, survey, walk
from tests.support.composed import Composed
from tests.support.models import ONE_BLOCK
from tests.support.models import VIT_PYTORCH as SMALL
from tests.walker.toys import (
    TOKENS,
    WIDTH,
    FusedAttention,
    MisnamedMlp,
    Stack,
    WrittenOutAttention,
    attend_by_thirds,
    codes,
    gated,
    named,
    roles,
    tokens,
)

ATTENTION = {"one": "qkv", "two": "qkv", "three": "qkv", "four": "attn_out"}
FUSED = {"apple": "qkv", "pear": "attn_out"}
MLP = {"qkv": "ffn_in", "proj": "ffn_out"}
ENDS = {"first": ("patch-embedding",), "last": ("head",)}


def under(name: str, expected: dict[str, str]) -> dict[str, str]:
    return {f"{name}.{layer}": role for layer, role in expected.items()}


def test_arbitrary_names_in_a_whole_model() -> None:
    targets = walk(Stack(FusedAttention(), MisnamedMlp(), WrittenOutAttention(), gated()), tokens(7))
    assert roles(targets) == {
        "first": "other",
        **under("blocks.0", FUSED),
        **under("blocks.1", MLP),
        **under("blocks.2", ATTENTION),
        **under("blocks.3", {"left": "ffn_in", "right": "ffn_in", "down": "ffn_out"}),
        "last": "head",
    }
    assert codes(targets) == ENDS


def by_einsum(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
    return torch.einsum("bhij,bhjd->bihd", weights, v).transpose(1, 2)


def with_values_written_elsewhere(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    turned = torch.zeros(q.shape)
    turned[..., :4] = -q[..., 4:]
    turned[..., 4:] = q[..., :4]
    return functional.scaled_dot_product_attention(turned, k, v)


def by_a_context(self: Any, x: Tensor, fused: Tensor) -> Tensor:
    """A score for each token, their weighted sum as a context, and the context times the values."""
    scores, keys, values = fused.split([1, WIDTH, WIDTH], -1)
    return (scores.softmax(1) * keys).sum(1, keepdim=True) * values


def by_states(self: Any, x: Tensor, fused: Tensor) -> Tensor:
    """Tokens are summed into states, a linear works on these, and each token reads the states back."""
    into, out = fused.chunk(2, -1)
    return out @ self.inside(into.mT.softmax(-1) @ x)


WRITTEN: list[tuple[Callable[[], nn.Module], dict[str, str]]] = [
    (lambda: WrittenOutAttention(by_einsum), ATTENTION),
    (lambda: WrittenOutAttention(with_values_written_elsewhere), ATTENTION),
    (lambda: WrittenOutAttention(lambda self, q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v)), ATTENTION),
    (lambda: WrittenOutAttention(lambda self, q, k, v: q.relu() @ (k.relu().mT @ v)), ATTENTION),
    (lambda: FusedAttention(by_a_context, 2 * WIDTH + 1), FUSED),
    (lambda: FusedAttention(by_states, 8, inside=nn.Linear(WIDTH, WIDTH)), FUSED | {"inside": "qkv"}),
]


@pytest.mark.parametrize(("make", "inside"), WRITTEN)
def test_attention_is_known_however_it_is_written_and_blurs_nothing(make: Callable[[], nn.Module], inside: dict[str, str]) -> None:
    targets = walk(Stack(MisnamedMlp(), make(), MisnamedMlp(), WrittenOutAttention()), tokens(7))
    expected = under("blocks.0", MLP) | under("blocks.1", inside) | under("blocks.2", MLP) | under("blocks.3", ATTENTION)
    assert roles(targets) == {"first": "other", **expected, "last": "head"}
    assert codes(targets) == ENDS


def places(model: nn.Module, *kinds: str) -> list[tuple[str, str]]:
    return [(cut.fqn, cut.side) for cut in find_cuts(survey(model.eval())) if cut.kind in kinds]


def test_cuts_are_where_one_tensor_carries_everything_on() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=3, img_size=32)
    assert places(model, "start") == [("pos_drop", "output")]
    assert places(model, "block") == [(f"blocks.{number}", "output") for number in range(3)]
    assert places(model, "tokens") == [("norm", "output")]
    options = {"image_size": 32, "patch_size": 16, "num_classes": 7, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 48}
    for model in (ViT(**options), SimpleViT(**options)):  # residuals summed outside of the blocks are seen at the next module
        assert places(model, "block") == [("transformer.layers.1.0", "input"), ("transformer.norm", "input")]
        assert places(model, "tokens") == [("transformer.norm", "output")]
    block = timm.create_model("vit_tiny_patch16_224", depth=1).blocks[0]  # whose input is needed until the end
    skipping = Composed(lambda self, x: self.norm(self.block(x) * x), block=block, norm=nn.LayerNorm(192))
    cuts = find_cuts(survey(skipping.eval(), torch.randn(2, 5, 192)))
    assert [(cut.fqn, cut.side) for cut in cuts] == [("block", "input"), ("norm", "input"), ("norm", "output")]


def with_parts(model: nn.Module, **parts: Any) -> nn.Module:
    for name, part in parts.items():
        setattr(model, name, part)
    return model


class Renamed(nn.Linear):
    pass


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * super().forward(x)


def reads_its_weight(self: Any, x: Tensor, fused: Tensor) -> Tensor:
    return attend_by_thirds(self, x, nn.functional.linear(x, self.apple.weight, None))


def patched() -> nn.Module:
    model = MisnamedMlp()
    model.qkv.forward = lambda input: nn.functional.linear(input, model.qkv.weight)
    return model


def tied() -> nn.Module:
    model = with_parts(MisnamedMlp(), qkv=nn.Linear(WIDTH, WIDTH), proj=nn.Linear(WIDTH, WIDTH))
    model.proj.weight = model.qkv.weight  # pyright: ignore
    return model


def hooked_attention() -> nn.Module:
    """An ``nn.MultiheadAttention`` that stays as it is."""
    model = nn.TransformerEncoderLayer(WIDTH, 3, 48, batch_first=True)
    model.self_attn.register_forward_hook(lambda *_: None)
    return model


def hooked(register: str) -> nn.Module:
    """A model with a hook that nobody may run."""
    model = MisnamedMlp()
    getattr(model.qkv, register)(lambda *_: pytest.fail("a walk runs no hooks"))
    return model


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (FusedAttention, {}),
        *((lambda name=name: hooked(name), {"qkv": "hooked"}) for name in ("register_forward_hook", "register_full_backward_hook")),
        (lambda: with_parts(MisnamedMlp(), qkv=spectral_norm(nn.Linear(WIDTH, 3 * WIDTH))), {"qkv": "parametrized"}),
        (lambda: with_parts(MisnamedMlp(), qkv=Doubled(WIDTH, 3 * WIDTH), proj=Renamed(3 * WIDTH, WIDTH)), {"qkv": "custom-forward"}),
        (patched, {"qkv": "custom-forward"}),
        (lambda: FusedAttention(reads_its_weight), {"apple": "weight-read"}),
        (lambda: Composed(lambda self, x: self.mlp(x) + self.mlp.proj.weight.sum(), mlp=MisnamedMlp()), {"mlp.proj": "weight-read"}),
        (tied, {"qkv": "tied", "proj": "tied"}),
        (lambda: nn.TransformerEncoderLayer(WIDTH, 3, 48, batch_first=True), {}),
        (
            hooked_attention,
            {"self_attn.in_proj_weight": "raw-weight"} | dict.fromkeys(("self_attn.out_proj", "linear1", "linear2"), "weight-read"),
        ),
    ],
)
def test_what_blocks_a_replacement(make: Callable[[], nn.Module], expected: dict[str, str]) -> None:
    targets = walk(make(), tokens())
    assert codes(targets) == {name: (code,) for name, code in expected.items()}
    assert {*roles(targets).values()} in ({"qkv", "attn_out"}, {"ffn_in", "ffn_out"}, {"qkv", "attn_out", "ffn_in", "ffn_out"})
    assert all(target.blocked == (target.fqn in expected) for target in targets)


def test_shared_uncalled_and_narrow_modules() -> None:
    shared = MisnamedMlp()
    targets = named(walk(Stack(shared, FusedAttention(), shared), tokens(7)))
    twice = targets["blocks.0.qkv"]
    assert (twice.aliases, twice.calls, twice.rows, twice.role) == (("blocks.2.qkv",), 2, 2 * 2 * TOKENS, "ffn_in")
    assert twice.obstacles == () and not targets["first"].blocked and not targets["last"].blocked
    assert "blocks.2.qkv" not in targets and targets["blocks.1.apple"].aliases == ()
    target = walk(with_parts(MisnamedMlp(), spare=nn.Linear(3, 4, bias=False)), tokens())[-1]
    assert (target.fqn, target.role, target.in_features, target.out_features, target.bias) == ("spare", "other", 3, 4, False)
    assert (target.calls, target.rows, target.obstacles[0].code, target.blocked) == (0, 0, "not-called", True)
    narrow = with_parts(MisnamedMlp(), qkv=nn.Linear(WIDTH, 1), proj=nn.Linear(1, WIDTH))
    assert {(each.role, each.obstacles[0].code, each.blocked) for each in walk(narrow, tokens())} == {("other", "rank-one", False)}


def test_pointwise_convolutions_are_linears_of_pixels() -> None:
    parts: dict[str, nn.Module] = {"up": nn.Conv2d(8, 16, 1), "down": nn.Conv2d(16, 8, 1), "hooked": nn.Conv2d(8, 8, 1)}
    others = (nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 8, 1, stride=2))
    parts["hooked"].register_forward_hook(lambda *_: None)
    model = Composed(lambda self, x: self.others(self.hooked(x + self.down(self.up(x).relu()))), **parts, others=nn.Sequential(*others))
    targets = named(walk(model, torch.zeros(2, 8, 4, 4)))
    found = {fqn: (target.role, target.obstacles[-1].code) for fqn, target in targets.items()}
    assert found == {"up": ("ffn_in", "conv1x1"), "down": ("ffn_out", "conv1x1"), "hooked": ("other", "hooked")}
    up = targets["up"]
    assert (up.out_features, up.in_features, up.rows, up.blocked) == (16, 8, 2 * 4 * 4, True)
    assert "conv-stride" in codes(walk(nn.Sequential(others[-1]), torch.zeros(2, 8, 1, 1)))["0"], "at one pixel it would do the same"


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "eva02_tiny_patch14_224"])
def test_a_switch_by_which_attention_calls_its_linear_takes_the_reason_away(name: str) -> None:
    model = timm.create_model(name, depth=1, embed_dim=48, num_heads=3, img_size=28 if "14" in name else 32)
    switched = {target.fqn: target.switches for target in walk(model) if target.switches}
    assert switched == {"blocks.0.attn.qkv": (Switch("blocks.0.attn", "qkv_bias_separate", True),)}


# Per model: qkv, attn_out, ffn_in, ffn_out, head; then the reasons of all others.
Truth = tuple[tuple[int, int, int, int, int], dict[str, int]]

ONE: dict[str, Any] = {"depth": 1, "embed_dim": 48, "num_heads": 3, "img_size": 32}
SWIN: dict[str, Any] = {"embed_dim": 24, "depths": (2, 1), "num_heads": (2, 4), "img_size": 32, "window_size": 4}

TIMM: dict[str, tuple[dict[str, Any], Truth]] = {
    "resnet18": ({}, ((0, 0, 0, 0, 1), {})),  # its 1x1 convolutions have a stride
    # Two blocks of q with k and v apart, whose positions go through a linear, and a plain one.
    "convit_tiny": ({"depth": 3, "local_up_to_layer": 2, "embed_dim": 12, "img_size": 32}, ((5, 3, 3, 3, 1), {"constant": 2})),
    # Attention across channels; two blocks of class attention with q, k, v, proj, fc1 and fc2.
    "xcit_nano_12_p16_224": ({"depth": 2, "img_size": 64}, ((2, 2, 2, 2, 1), {"pool": 12})),
    # A block within a block, each with qk and v; the pixels' tokens go into the patches' by one linear a block and one before all.
    "tnt_s_patch16_224": ({"depth": 2, "img_size": 32}, ((8, 4, 4, 4, 1), {"no-role": 3})),
    # Gated convolutions between two linears, no attention; the head has a hidden layer.
    "mambaout_femto": ({"depths": (1, 1, 1, 1)}, ((0, 0, 4, 4, 1), {"pool": 1})),
    # A single linear over the tokens, without an activation.
    "resmlp_12_224": ({}, ((0, 0, 12, 12, 1), {"no-role": 12})),
    # The patch embedding is a linear, whose weight is read for other patch sizes.
    "naflexvit_base_patch16_gap": ({"depth": 2, "embed_dim": 48, "num_heads": 2}, ((2, 2, 2, 2, 1), {"patch-embedding": 1})),
    # Query, key and value apart, and a gate apart.
    "eva02_base_patch14_448": (ONE | {"img_size": 28}, ((3, 1, 2, 1, 1), {})),
    # Attention whose heads two linears mix; a block of class attention.
    "cait_xxs24_224": (ONE, ((1, 1, 1, 1, 1), {"talking-heads": 2, "pool": 12})),
}

VIT_PYTORCH: dict[str, tuple[dict[str, Any], Truth]] = {
    # Parallel residual streams that weights from bare parameters mix, before and after attention and the FFN.
    "simple_vit_with_hyper_connections:SimpleViT": (
        SMALL | {"depth": 2, "num_residual_streams": 2},
        ((2, 2, 2, 2, 1), {"patch-embedding": 1, "no-role": 4}),
    ),
    # q and kv apart; a block of class attention with q, kv, out and an MLP.
    "cait:CaiT": (SMALL | {"cls_depth": 1}, ((2, 1, 1, 1, 1), {"patch-embedding": 1, "pool": 5})),
    # q and k together, v apart; attention is an operator that takes functions of the scores.
    "vit_nd_rotary:ViTND": (ONE_BLOCK | {"ndim": 2, "input_shape": (32, 32)}, ((2, 1, 1, 1, 1), {"patch-embedding": 1})),
}


def counted(targets: Iterable[Target]) -> Truth:
    linears = [target for target in targets if all(obstacle.code != "conv1x1" for obstacle in target.obstacles)]
    roles = Counter(target.role for target in linears)
    reasons = Counter(target.obstacles[0].code for target in linears if target.role == "other")
    return (roles["qkv"], roles["attn_out"], roles["ffn_in"], roles["ffn_out"], roles["head"]), dict(reasons)


def build(name: str, options: dict[str, Any]) -> nn.Module:
    module, _, of = name.partition(":")
    if of:
        return getattr(importlib.import_module(f"vit_pytorch.{module}"), of)(**options)
    with torch.device("meta"):
        return timm.create_model(name, **options)


@pytest.mark.parametrize("name", [*TIMM, *VIT_PYTORCH])
def test_every_linear_is_listed_with_its_role_or_the_reason_for_none(name: str) -> None:
    options, truth = (TIMM | VIT_PYTORCH)[name]
    model = build(name, options)
    targets = walk(model)
    assert counted(targets) == truth
    listed = {fqn for target in targets for fqn in (target.fqn, *target.aliases)}
    assert {fqn for fqn, module in model.named_modules(remove_duplicate=False) if isinstance(module, nn.Linear)} <= listed


def thirds(width: int) -> tuple[Slice, ...]:
    return (Slice("q", 0, width), Slice("k", width, 2 * width), Slice("v", 2 * width, 3 * width))


PARALLEL = (Slice("ffn", 0, 768), Slice("q", 768, 960), Slice("k", 960, 1152), Slice("v", 1152, 1344))
BRANCHES = {"depth": 1, "img_size": 32, "block_fn": ParallelScalingBlock}


@pytest.mark.parametrize(
    ("name", "options", "layer", "split", "tokens"),
    [
        ("learnable_memory_vit:ViT", SMALL, "transformer.layers.0.0.to_kv", (Slice("k", 0, 64), Slice("v", 64, 128)), None),
        ("vit_tiny_patch16_224", {**ONE, "attn_layer": "diff"}, "blocks.0.attn.qkv", thirds(48), 5),
        ("vit_tiny_patch16_224", BRANCHES | {"patch_drop_rate": 0.5}, "blocks.0.in_proj", PARALLEL, 5),  # as in inference
        ("swin_tiny_patch4_window7_224", SWIN, "layers.0.blocks.1.attn.qkv", thirds(24), 64),  # the shifted one
    ],
)
def test_which_rows_are_query_key_and_value(
    name: str, options: dict[str, Any], layer: str, split: tuple[Slice, ...], tokens: int | None
) -> None:
    target = named(walk(build(name, options)))[layer]
    assert (target.role, target.split) == ("qkv", split)
    assert tokens is None or target.rows == 2 * tokens


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_relpos_small_patch16_224", "beit_base_patch16_224"])
def test_attention_is_known_whether_it_is_one_operator_or_written_out(name: str) -> None:
    found = []
    try:
        for fused in (True, False):
            set_fused_attn(fused)
            found.append([(each.fqn, each.role, each.split, each.rows, each.obstacles) for each in walk(build(name, ONE))])
    finally:
        set_fused_attn(True)
    assert found[0] == found[1]


def test_na_vit_with_images_of_several_sizes_and_functions_as_blocks() -> None:
    model, images = build("na_vit:NaViT", SMALL), ([torch.zeros(3, 32, 32), torch.zeros(3, 16, 32)],)
    for _ in range(2):  # the model's cache of positions holds nothing of the first trace
        assert counted(walk(model, images)) == ((2, 1, 1, 1, 1), {"patch-embedding": 1, "pool": 3})
