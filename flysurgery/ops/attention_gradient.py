"""PyTorch's attention, whose gradients of q, k and v are written where these lie side by side in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from flysurgery.ops.attend import Attention
from flysurgery.torch_state import is_tracing, refuse_second_derivative

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
