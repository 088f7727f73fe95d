"""Attention on tensor cores where PyTorch has no such kernel or a slower one: what is computed, and which launch computes it."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from flysurgery.gpu.attention import attention_obstacle, few_attention_obstacle, run_attention
from flysurgery.gpu.device import shared_limit_of
from flysurgery.gpu.modes import mode_for
from flysurgery.ops.ways import Stage, Stages


class Attention(NamedTuple):
    """``softmax(scale * q @ k.mT) @ v`` of x = q: (batch, heads, queries, head); the result's tokens lie before its heads in memory.

    Float32 by pairs of fp16, or in TF32 grade where PyTorch's settings allow that; halves for few queries and for short sequences.
    """

    k: Tensor  # shape: (batch, heads, keys, head)
    v: Tensor  # shape: (batch, heads, keys, head)
    scale: float | None = None  # None stands for one over the root of a head's features

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.k, self.v

    @property
    def form(self) -> tuple[Hashable, ...]:
        return ("attention",)

    def wrong(self, x: Tensor) -> str | None:
        q, k, v = x, self.k, self.v
        if q.dim() != 4 or k.shape != (*q.shape[:2], k.shape[-2], q.shape[-1]) or k.shape != v.shape or not q.dtype == k.dtype == v.dtype:
            kinds = ", ".join(f"{tuple(part.shape)} of {part.dtype}" for part in (q, k, v))
            return f"expected q, k and v of shapes (batch, heads, tokens, features) that fit each other, and one dtype, got {kinds}"
        return "there are no keys" if k.shape[2] == 0 else None

    def stages(self, x: Tensor) -> Stages | str:
        (batch, heads, queries, head), keys, mode = x.shape, self.k.shape[2], mode_for(x)
        if few_attention_obstacle(batch * heads, queries, keys, head, x.dtype) is None:
            return (Stage((), partial(_attended, mode=mode, few=True)),)
        obstacle = attention_obstacle(head, queries, keys, mode, shared_limit_of(x.device.index))
        return obstacle or (Stage((), partial(_attended, mode=mode, few=False)),)

    def plainly(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, self.k, self.v, scale=self.scale)


def _attended(y: Tensor, q: Tensor, given: Attention, mode: str, few: bool) -> Tensor:
    scale = q.shape[-1] ** -0.5 if given.scale is None else given.scale
    return run_attention(q, given.k, given.v, scale, mode, few)
