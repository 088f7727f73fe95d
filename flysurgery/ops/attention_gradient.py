"""PyTorch's attention, whose gradients of q, k and v are written where these lie side by side in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from flysurgery.ops.attend import Attention

_PREFERRED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""A part of a tensor: its sizes, strides and offset."""


def attended(q: Tensor, given: Attention) -> Tensor:  # shape: (batch, heads, queries, head)
    """``softmax(scale * q @ k.mT) @ v`` with gradients; ``given`` holds k and v.

    Where q, k and v are parts of one tensor, as of the outputs of one projection, its gradient is written once. PyTorch would join three
    gradients, and put the result into the order of the tensor's memory.
    """
    whole, parts = q._base, (q, given.k, given.v)
    if whole is None or not _fill(whole, parts):
        return _by_pytorch(*parts, given.scale)
    places = [(tuple(part.shape), part.stride(), part.storage_offset()) for part in parts]
    result: Any = _Attended.apply(whole, places, given.scale)
    return result


def _fill(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether the parts are views of ``whole`` through which gradients pass, as large as it, and at three places of it."""
    views = all(part._base is whole for part in parts) and whole.requires_grad and whole.is_contiguous() and not whole.storage_offset()
    return views and sum(map(Tensor.numel, parts)) == whole.numel() and len({part.storage_offset() for part in parts}) == len(parts)


def _by_pytorch(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    if not q.is_cuda:
        return functional.scaled_dot_product_attention(q, k, v, scale=scale)
    with sdpa_kernel(_PREFERRED, set_priority=True):
        return functional.scaled_dot_product_attention(q, k, v, scale=scale)


class _Attended(torch.autograd.Function):
    """Attention of three parts of ``whole``, which do not overlap and fill it."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, places: Sequence[_Place], scale: float | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.enable_grad():
            q, k, v = parts = [_part(whole.detach(), place).requires_grad_() for place in places]
            found = _by_pytorch(q, k, v, scale)
        ctx.graph, ctx.places = (found, parts), places
        ctx.like = whole.shape, whole.dtype, whole.device
        return found.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.graph is None:
            raise RuntimeError("fused attention keeps nothing for a second backward pass; compute the forward pass again")
        (found, parts), ctx.graph = ctx.graph, None
        gradients = torch.autograd.grad(found, parts, dy)
        shape, dtype, device = ctx.like
        whole = torch.empty(shape, dtype=dtype, device=device)
        for place, gradient in zip(ctx.places, gradients, strict=True):
            part = _part(whole, place)
            wide = _in_vectors(part, gradient)
            if wide is None:
                part.copy_(gradient)
            else:
                wide[0].copy_(wide[1])
        return whole, None, None


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
