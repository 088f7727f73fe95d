"""The parts of a ViT that are timed, converted, each with its input: as Gonon et al. 2024 time them, and as timm builds them today."""

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import timm
import torch
from einops.layers.torch import Rearrange
from torch import Tensor, nn

from flysurgery.bench.multiply import layer_sizes
from flysurgery.errors import OptionError
from flysurgery.layers import ButterflyLinear
from flysurgery.patterns import named
from flysurgery.surgery import draw_anew, install, plan

PROTOCOLS = ("paper", "today")
"""``paper``: separate q, k, v, attention written out. ``today``: timm's model, one qkv, ``scaled_dot_product_attention``."""

Make = Callable[[int, int, bool], nn.Module]  # makes the linear layer of ``(out_features, in_features, bias)``


class Unit(NamedTuple):
    """One part of a model. ``make`` builds it converted, in eval mode, on the CPU; ``shape`` is a sample's input, ``rows`` its tokens."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    rows: int


@cache
def parts(protocol: str, model: str, arch: str) -> Mapping[str, Unit]:
    """The parts of a timm ViT under a protocol, by name, from single linears to the whole model, which is built once."""
    vit = skeleton(model)
    return dict(_paper_units(vit, arch) if protocol == "paper" else _today_units(model, arch, vit))


def skeleton(model: str) -> Any:
    """A timm ViT on the meta device. Raises ``OptionError`` where the model is no ViT with what its parts are made of."""
    try:
        with torch.device("meta"):
            vit: Any = timm.create_model(model, pretrained=False)
        _ = vit.embed_dim, vit.blocks[0].attn.num_heads, vit.blocks[0].mlp.fc2.in_features
        if vit.patch_embed.num_patches != (vit.patch_embed.img_size[0] // vit.patch_embed.patch_size[0]) ** 2:
            raise ValueError("its patches are not cut out of the image")
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise OptionError(f"'{model}' is no ViT of timm that can be taken apart: {error}") from error
    return vit


def shapes_of(vit: Any) -> tuple[tuple[int, ...], tuple[int, int]]:
    """The shapes of a sample's image and of its tokens."""
    return (3, *vit.patch_embed.img_size), (vit.patch_embed.num_patches + getattr(vit, "num_prefix_tokens", 0), vit.embed_dim)


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return make().eval().requires_grad_(False)

    return build


def _paper_units(vit: Any, arch: str) -> Iterator[tuple[str, Unit]]:
    def linear(out_features: int, in_features: int, bias: bool) -> nn.Module:
        return ButterflyLinear(named(arch, out_features, in_features), bias=bias)

    tokens = vit.patch_embed.num_patches
    for name, (out_features, in_features) in zip(("N x N", "4N x N", "N x 4N"), layer_sizes(vit.embed_dim).values(), strict=True):
        for bias in (False, True):
            build = _seeded(partial(linear, out_features, in_features, bias))
            yield f"linear {name}{' + bias' if bias else ''}", Unit(build, (tokens, in_features), tokens)
    for name, part in (("FFN", paper_feed_forward), ("attention", PaperAttention), ("block", PaperBlock)):
        yield name, Unit(_seeded(partial(part, vit, linear)), (tokens, vit.embed_dim), tokens)
    yield "model", Unit(_seeded(partial(PaperVit, vit, linear)), shapes_of(vit)[0], tokens)


def _today_units(model: str, arch: str, vit: Any) -> Iterator[tuple[str, Unit]]:
    def converted(**arguments: Any) -> nn.Module:  # with random factors: nothing is projected, as times do not depend on values
        made = timm.create_model(model, pretrained=False, **arguments).eval()
        install(plan(made, arch), made)
        draw_anew(made)
        return made

    whole, one = cache(_seeded(converted)), cache(_seeded(partial(converted, depth=1)))  # a plan takes seconds
    image, (tokens, width) = shapes_of(vit)
    of_block: Mapping[str, Callable[[Any], nn.Module]] = {
        "qkv + bias": lambda block: block.attn.qkv,
        "linear 4N x N + bias": lambda block: block.mlp.fc1,
        "linear N x 4N + bias": lambda block: block.mlp.fc2,
        "FFN": lambda block: Residual(block.norm2, block.mlp),
        "attention": lambda block: Residual(block.norm1, block.attn),
        "block": lambda block: block,
    }
    for name, of in of_block.items():
        shape = (tokens, vit.blocks[0].mlp.fc2.in_features if name == "linear N x 4N + bias" else width)
        # A Residual around parts of the model is in training mode.
        yield name, Unit(lambda of=of: copy.deepcopy(of(one().blocks[0])).eval(), shape, tokens)  # pyright: ignore[reportIndexIssue]
    yield "model", Unit(lambda: copy.deepcopy(whole()), image, tokens)


class Residual(nn.Module):
    """``x + inner(norm(x))``, what a block does with its attention and its FFN. As in what follows, x is (batch, tokens, width)."""

    def __init__(self, norm: nn.Module, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = norm, inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class PaperAttention(nn.Module):
    """Norm, q, k and v by ``make``, softmax of q kᵀ, and a dense projection; no biases."""

    def __init__(self, vit: Any, make: Make) -> None:
        super().__init__()
        width, self.heads = vit.embed_dim, vit.blocks[0].attn.num_heads
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width, bias=False)
        self.q, self.k, self.v = (make(width, width, False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def paper_feed_forward(vit: Any, make: Make) -> nn.Module:
    width = vit.embed_dim
    return nn.Sequential(nn.LayerNorm(width), make(4 * width, width, True), nn.GELU(), make(width, 4 * width, True))


class PaperBlock(nn.Module):
    """Attention and feed-forward, each added to its input."""

    def __init__(self, vit: Any, make: Make) -> None:
        super().__init__()
        self.attention, self.feed_forward = PaperAttention(vit, make), paper_feed_forward(vit, make)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.feed_forward(x)


class PaperVit(nn.Module):
    """A ViT as Gonon et al. 2024 time it: no class token, patches averaged at the end. Patch embedding and head are dense."""

    def __init__(self, vit: Any, make: Make) -> None:
        super().__init__()
        width, patch = vit.embed_dim, vit.patch_embed.patch_size[0]
        patches, inputs = Rearrange("n c (h p) (w q) -> n (h w) (p q c)", p=patch, q=patch), 3 * patch**2
        self.embed = nn.Sequential(patches, nn.LayerNorm(inputs), nn.Linear(inputs, width), nn.LayerNorm(width))
        self.position = nn.Parameter(torch.randn(vit.patch_embed.num_patches, width) * 0.02)
        self.blocks = nn.Sequential(*(PaperBlock(vit, make) for _ in vit.blocks), nn.LayerNorm(width))
        self.head = nn.Linear(width, vit.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x) + self.position).mean(dim=1))
