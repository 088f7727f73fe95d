"""Attention: what is computed, which launch computes it, and PyTorch's with gradients.

Kernels take it where PyTorch has none on tensor cores or a slower one. Gradients of q, k and v are written where these lie side by side.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from flysurgery.gpu.attention import attention_obstacle, few_attention_obstacle, run_attention
from flysurgery.gpu.device import shared_limit_of
from flysurgery.gpu.modes import mode_for
from flysurgery.ops.ways import Stage, Stages
from flysurgery.torch_state import is_tracing, refuse_second_derivative


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


_PREFERRED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""A part of a tensor: its sizes, strides and offset."""


def attended(q: Tensor, given: Attention) -> Tensor:  # shape: (batch, heads, queries, head)
    """``softmax(scale * q @ k.mT) @ v`` with gradients; ``given`` holds k and v.

    Where q, k and v are parts of one tensor, as of the outputs of one projection, its gradient is written once. PyTorch would join three
    gradients, and put the result into the order of the tensor's memory.
    """
    k, v, _ = given
    whole, parts = q._base, (q, k, v)
    if whole is not None and not is_tracing(*parts) and _fill(whole, parts):
        places = [(tuple(part.shape), part.stride(), part.storage_offset()) for part in parts]
        found: Any = _Parts.apply(whole, places)
        q, k, v = found
    return _by_pytorch(q, k, v, given.scale)


def _fill(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether the parts are views of ``whole`` through which gradients pass, as large as it, and at three places of it."""
    views = all(part._base is whole for part in parts) and whole.requires_grad and whole.is_contiguous() and not whole.storage_offset()
    return views and sum(map(Tensor.numel, parts)) == whole.numel() and len({part.storage_offset() for part in parts}) == len(parts)


def _by_pytorch(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    if not q.is_cuda:
        return functional.scaled_dot_product_attention(q, k, v, scale=scale)
    with sdpa_kernel(_PREFERRED, set_priority=True):
        return functional.scaled_dot_product_attention(q, k, v, scale=scale)


class _Parts(torch.autograd.Function):
    """Three parts of ``whole``, which do not overlap and fill it."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, places: Sequence[_Place]) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.places, ctx.like = places, (whole.shape, whole.dtype, whole.device)
        return tuple([_part(whole, place) for place in places])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_second_derivative()
        shape, dtype, device = ctx.like
        whole = torch.empty(shape, dtype=dtype, device=device)
        for place, gradient in zip(ctx.places, gradients, strict=True):
            part = _part(whole, place)
            wide = _in_vectors(part, gradient)
            if wide is None:
                part.copy_(gradient)
            else:
                wide[0].copy_(wide[1])
        return whole, None


def _part(whole: Tensor, place: _Place) -> Tensor:
    size, stride, offset = place
    return whole.as_strided(size, stride, offset)


def _in_vectors(*tensors: Tensor) -> tuple[Tensor, ...] | None:
    """The same memory as vectors of 16 bytes, which PyTorch copies faster than halves; None where it does not consist of such."""
    each = 16 // tensors[0].element_size()
    for tensor in tensors:
        if tensor.data_ptr() % 16 or tensor.stride(-1) != 1 or any(size % each for size in (tensor.shape[-1], *tensor.stride()[:-1])):
            return None
    return tuple(tensor.view(torch.complex128) for tensor in tensors)
