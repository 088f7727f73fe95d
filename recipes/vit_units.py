"""The parts of a ViT that are timed, converted, each with its input: as Gonon et al. 2024 time them, and as timm builds them today."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import timm
import torch
from einops import rearrange
from torch import Tensor, nn

from flysurgery.bench.multiply import layer_sizes
from flysurgery.bench.variants import reset
from flysurgery.errors import OptionError
from flysurgery.layers import ButterflyLinear
from flysurgery.patterns import named
from flysurgery.surgery import install, plan

PROTOCOLS = ("paper", "today")
"""``paper``: separate q, k, v, attention written out. ``today``: timm's model, one qkv, ``scaled_dot_product_attention``."""

Make = Callable[[int, int, bool], nn.Module]  # makes the linear layer of ``(out_features, in_features, bias)``


@dataclass(frozen=True)
class VitSizes:
    """The sizes of a ViT. ``tokens`` are those of its patches alone."""

    width: int
    hidden: int
    heads: int
    depth: int
    image: int
    patch: int
    classes: int = 1000

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2


@dataclass(frozen=True)
class Unit:
    """One part of a model. ``make`` builds it converted, in eval mode, on the CPU; ``shape`` is a sample's input, ``rows`` its tokens."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    rows: int


@cache
def parts(protocol: str, model: str, arch: str) -> Mapping[str, Unit]:
    """The parts of a timm ViT under a protocol, by name, from single linears to the whole model, which is built once.

    Raises ``OptionError`` where the model is no ViT with ``blocks``, ``embed_dim`` and ``patch_embed``.
    """
    sizes, prefix_tokens = vit_sizes(model)
    found = _paper_units(sizes, arch) if protocol == "paper" else _today_units(model, arch, sizes, sizes.tokens + prefix_tokens)
    return {unit.name: unit for unit in found}


def vit_sizes(model: str) -> tuple[VitSizes, int]:
    """Read the sizes of a timm ViT, and how many tokens precede its patches, off the model on the meta device."""
    try:
        with torch.device("meta"):
            vit: Any = timm.create_model(model, pretrained=False)
        image, patch = vit.patch_embed.img_size[0], vit.patch_embed.patch_size[0]
        block = vit.blocks[0]
        sizes = VitSizes(vit.embed_dim, block.mlp.fc2.in_features, block.attn.num_heads, len(vit.blocks), image, patch, vit.num_classes)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise OptionError(f"'{model}' is no ViT of timm that can be taken apart: {error}") from error
    return sizes, int(getattr(vit, "num_prefix_tokens", 0))


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return make().eval().requires_grad_(False)

    return build


def _paper_units(sizes: VitSizes, arch: str) -> Iterator[Unit]:
    def make(out_features: int, in_features: int, bias: bool) -> nn.Module:
        return ButterflyLinear(named(arch, out_features, in_features), bias=bias)

    width, tokens = sizes.width, sizes.tokens
    for name, (out_features, in_features) in zip(("N x N", "4N x N", "N x 4N"), layer_sizes(width).values(), strict=True):
        for bias in (False, True):
            build = _seeded(partial(make, out_features, in_features, bias))
            yield Unit(f"linear {name}{' + bias' if bias else ''}", build, (tokens, in_features), tokens)
    for name, part in (("FFN", PaperFeedForward), ("attention", PaperAttention), ("block", PaperBlock)):
        yield Unit(name, _seeded(partial(part, sizes, make)), (tokens, width), tokens)
    yield Unit("model", _seeded(partial(PaperVit, sizes, make)), (3, sizes.image, sizes.image), tokens)


def _today_units(model: str, arch: str, sizes: VitSizes, tokens: int) -> Iterator[Unit]:
    def converted(**arguments: Any) -> nn.Module:  # with random factors: nothing is projected, as times do not depend on values
        vit = timm.create_model(model, pretrained=False, **arguments).eval()
        install(plan(vit, arch), vit)
        reset(vit)
        return vit

    whole, one = cache(_seeded(converted)), cache(_seeded(partial(converted, depth=1)))  # a plan takes seconds

    def part(of: Callable[[Any], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: copy.deepcopy(of(one())).eval()  # a Residual around parts of the model is in training mode

    token, wide = (tokens, sizes.width), (tokens, sizes.hidden)
    yield Unit("qkv + bias", part(lambda vit: vit.blocks[0].attn.qkv), token, tokens)
    yield Unit("linear 4N x N + bias", part(lambda vit: vit.blocks[0].mlp.fc1), token, tokens)
    yield Unit("linear N x 4N + bias", part(lambda vit: vit.blocks[0].mlp.fc2), wide, tokens)
    yield Unit("FFN", part(lambda vit: Residual(vit.blocks[0].norm2, vit.blocks[0].mlp)), token, tokens)
    yield Unit("attention", part(lambda vit: Residual(vit.blocks[0].norm1, vit.blocks[0].attn)), token, tokens)
    yield Unit("block", part(lambda vit: vit.blocks[0]), token, tokens)
    yield Unit("model", lambda: copy.deepcopy(whole()), (3, sizes.image, sizes.image), tokens)


class Residual(nn.Module):
    """``x + inner(norm(x))``, what a block does with its attention and its FFN. As in the classes below, x is (batch, tokens, width)."""

    def __init__(self, norm: nn.Module, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = norm, inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def dense_layer(out_features: int, in_features: int, bias: bool) -> nn.Module:
    """Make what stays dense in the paper's models: the projection after attention, the patch embedding and the head."""
    return nn.Linear(in_features, out_features, bias=bias)


class PaperAttention(nn.Module):
    """Norm, q, k and v by ``make``, softmax of q kᵀ, and a dense projection; no biases."""

    def __init__(self, sizes: VitSizes, make: Make) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.scale = (sizes.width // sizes.heads) ** -0.5
        self.norm = nn.LayerNorm(sizes.width)
        self.q, self.k, self.v = (make(sizes.width, sizes.width, False) for _ in range(3))
        self.out = dense_layer(sizes.width, sizes.width, False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.mT * self.scale, dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class PaperFeedForward(nn.Sequential):
    """Norm, linear to four times the width, GELU, linear back."""

    def __init__(self, sizes: VitSizes, make: Make) -> None:
        width = sizes.width
        super().__init__(nn.LayerNorm(width), make(4 * width, width, True), nn.GELU(), make(width, 4 * width, True))


class PaperBlock(nn.Module):
    """Attention and feed-forward, each added to its input."""

    def __init__(self, sizes: VitSizes, make: Make) -> None:
        super().__init__()
        self.attention, self.feed_forward = PaperAttention(sizes, make), PaperFeedForward(sizes, make)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.feed_forward(x)


class PaperVit(nn.Module):
    """A ViT as Gonon et al. 2024 time it: no class token, patches averaged at the end. (batch, 3, image, image) to (batch, classes)."""

    def __init__(self, sizes: VitSizes, make: Make) -> None:
        super().__init__()
        self.patch = sizes.patch
        inputs = 3 * sizes.patch**2
        self.embed = nn.Sequential(nn.LayerNorm(inputs), dense_layer(sizes.width, inputs, True), nn.LayerNorm(sizes.width))
        self.position = nn.Parameter(torch.randn(sizes.tokens, sizes.width) * 0.02)
        self.blocks = nn.Sequential(*(PaperBlock(sizes, make) for _ in range(sizes.depth)))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = dense_layer(sizes.classes, sizes.width, True)

    def forward(self, x: Tensor) -> Tensor:
        patches = rearrange(x, "n c (h p) (w q) -> n (h w) (p q c)", p=self.patch, q=self.patch)
        x = self.embed(patches) + self.position
        return self.head(self.norm(self.blocks(x)).mean(dim=1))
