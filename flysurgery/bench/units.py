"""The parts of a ViT that are timed, converted, each with the input that it takes: by the paper's protocol and by today's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import timm
import torch
from torch import Tensor, nn

from flysurgery.bench.paper_vit import Make, PaperAttention, PaperBlock, PaperFeedForward, PaperVit, VitSizes
from flysurgery.errors import OptionError, PatternError
from flysurgery.layers import ButterflyLinear
from flysurgery.patterns import named
from flysurgery.surgery import install, plan

PROTOCOLS = ("paper", "today")
"""``paper``: separate q, k, v, attention written out. ``today``: timm's model, one qkv, ``scaled_dot_product_attention``."""


@dataclass(frozen=True)
class Unit:
    """One part of a model. ``make`` builds it converted, in eval mode, on the CPU; ``shape`` is a sample's input, ``rows`` its tokens."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    rows: int


class Residual(nn.Module):
    """``x + inner(norm(x))``, what a block does with its attention and its FFN."""

    def __init__(self, norm: nn.Module, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = norm, inner

    def forward(self, x: Tensor) -> Tensor:  # shape: (batch, tokens, width), unchanged
        return x + self.inner(self.norm(x))


def units(protocol: str, model: str, model_args: Mapping[str, Any], arch: str, seed: int) -> list[Unit]:
    """The parts of ``model``, a timm ViT, under a protocol, from single linears to the whole model.

    Raises:
        OptionError: no such protocol, or the model is no ViT with ``blocks``, ``embed_dim`` and ``patch_embed``.
    """
    if protocol not in PROTOCOLS:
        raise OptionError(f"there is no protocol '{protocol}'; choose from {', '.join(PROTOCOLS)}")
    sizes = vit_sizes(model, model_args)
    return list((_paper_units if protocol == "paper" else _today_units)(sizes, model, model_args, arch, seed))


def model_name(model: str, model_args: Mapping[str, Any]) -> str:
    """How rows call a model: its name, and what its constructor is told besides, so that a run that goes on takes no other for it."""
    return ", ".join((model, *(f"{name}={value}" for name, value in model_args.items())))


def vit_sizes(model: str, model_args: Mapping[str, Any]) -> VitSizes:
    """The sizes of a timm ViT, read off it on the meta device.

    Raises:
        OptionError: timm does not know the model, or it is built otherwise.
    """
    try:
        with torch.device("meta"):
            vit: Any = timm.create_model(model, pretrained=False, **model_args)
        image, patch = vit.patch_embed.img_size[0], vit.patch_embed.patch_size[0]
        return VitSizes(vit.embed_dim, vit.blocks[0].attn.num_heads, len(vit.blocks), image, patch, vit.num_classes)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise OptionError(f"'{model}' is no ViT of timm that can be taken apart: {error}") from error


def _paper_units(sizes: VitSizes, model: str, model_args: Mapping[str, Any], arch: str, seed: int) -> Iterator[Unit]:
    make = _maker(arch)
    width, tokens = sizes.width, sizes.tokens
    for name, out_features, in_features in (("N x N", width, width), ("4N x N", 4 * width, width), ("N x 4N", width, 4 * width)):
        for bias in (False, True):
            label = f"linear {name}{' + bias' if bias else ''}"
            build = _seeded(seed, lambda out=out_features, inner=in_features, bias=bias: make(out, inner, bias))
            yield Unit(label, build, (tokens, in_features), tokens)
    for label, part in (("FFN", PaperFeedForward), ("attention", PaperAttention), ("block", PaperBlock)):
        yield Unit(label, _seeded(seed, lambda part=part: part(sizes, make)), (tokens, width), tokens)
    yield Unit("model", _seeded(seed, lambda: PaperVit(sizes, make)), (3, sizes.image, sizes.image), tokens)


def _today_units(sizes: VitSizes, model: str, model_args: Mapping[str, Any], arch: str, seed: int) -> Iterator[Unit]:
    built = cache(_seeded(seed, lambda: converted_timm(model, model_args, arch)))  # its plan takes seconds

    def whole() -> nn.Module:
        return copy.deepcopy(built())

    def part(of: Callable[[Any], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: copy.deepcopy(of(built())).eval()  # what was put around parts of the model is in training mode

    tokens = sizes.tokens + _prefix_tokens(model, model_args)
    token, wide = (tokens, sizes.width), (tokens, 4 * sizes.width)
    yield Unit("qkv + bias", part(lambda vit: vit.blocks[0].attn.qkv), token, tokens)
    yield Unit("linear 4N x N + bias", part(lambda vit: vit.blocks[0].mlp.fc1), token, tokens)
    yield Unit("linear N x 4N + bias", part(lambda vit: vit.blocks[0].mlp.fc2), wide, tokens)
    yield Unit("FFN", part(lambda vit: Residual(vit.blocks[0].norm2, vit.blocks[0].mlp)), token, tokens)
    yield Unit("attention", part(lambda vit: Residual(vit.blocks[0].norm1, vit.blocks[0].attn)), token, tokens)
    yield Unit("block", part(lambda vit: vit.blocks[0]), token, tokens)
    yield Unit("model", whole, (3, sizes.image, sizes.image), tokens)


def _prefix_tokens(model: str, model_args: Mapping[str, Any]) -> int:
    with torch.device("meta"):
        vit: Any = timm.create_model(model, pretrained=False, **model_args)
    return int(getattr(vit, "num_prefix_tokens", 0))


def converted_timm(model: str, model_args: Mapping[str, Any], arch: str) -> nn.Module:
    """A timm model in eval mode, converted with random factors: nothing is projected, as times do not depend on values."""
    vit = timm.create_model(model, pretrained=False, **model_args).eval()
    install(plan(vit, arch), vit)
    reset(vit)
    return vit


def reset(model: nn.Module) -> None:
    """Draw the weights of every linear and converted layer anew; ``install`` leaves the new ones without values."""
    for module in model.modules():
        if isinstance(module, ButterflyLinear | nn.Linear):
            module.reset_parameters()


def _maker(arch: str) -> Make:
    def make(out_features: int, in_features: int, bias: bool) -> nn.Module:
        return ButterflyLinear(named(arch, out_features, in_features), bias=bias)

    return make


def _seeded(seed: int, make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(seed)
        return make().eval().requires_grad_(False)

    return build


def fits(arch: str, width: int) -> str | None:
    """Why an architecture does not exist at this width; None when it does."""
    try:
        for out_features, in_features in ((width, width), (4 * width, width), (width, 4 * width)):
            named(arch, out_features, in_features)
    except PatternError as error:
        return str(error)
    return None
