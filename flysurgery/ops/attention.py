"""Attention: what is computed, which launch computes it, and the same with gradients, written where q, k and v lie side by side."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from flysurgery.gpu.attention import (
    AttentionGradient,
    attention_gradient,
    attention_obstacle,
    few_attention_obstacle,
    parts_of_sums,
    reads_in_place,
    run_attention,
    run_attention_gradient,
)
from flysurgery.gpu.device import kernels_take, shared_limit_of
from flysurgery.gpu.modes import HALF_MODES, mode_for
from flysurgery.gpu.row_sums import keep_sums
from flysurgery.ops.choose_launches import Stage, Stages
from flysurgery.torch_state import is_tracing, refuse_second_derivative


class Attention(NamedTuple):
    """``softmax(scale * q @ k.mT) @ v`` of x = q: (batch, heads, queries, head); the result's tokens lie before its heads in memory.

    Kernels take it where PyTorch has none on tensor cores or a slower one: float32 by pairs of fp16, or in TF32 grade where PyTorch's
    settings allow that; halves for few queries and for short sequences.
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
        few = few_attention_obstacle(batch * heads, queries, keys, head, x.dtype) is None
        obstacle = None if few else attention_obstacle(head, queries, keys, mode, shared_limit_of(x.device.index))

        def attend(y: Tensor, q: Tensor, given: Attention) -> Tensor:
            return run_attention(q, given.k, given.v, _scale(q, given.scale), mode, few)

        return obstacle or (Stage((), attend),)

    def plainly(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, self.k, self.v, scale=self.scale)


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


_PREFERRED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""A part of a tensor: its sizes, strides and offset."""


def attended(q: Tensor, given: Attention) -> Tensor:  # shape: (batch, heads, queries, head)
    """``softmax(scale * q @ k.mT) @ v`` with gradients; ``given`` holds k and v.

    Kernels take halves with heads of 64 features, as many queries as keys, up to some 350, and a scale above zero; they sum in float32.
    PyTorch takes all others. Where q, k and v are parts of one tensor, as of the outputs of one projection, its gradient is written once.
    PyTorch would join three gradients, and put the result into the order of the tensor's memory.
    """
    k, v, scale = given
    parts, whole = (q, k, v), q._base
    if is_tracing(*parts):
        return _by_pytorch(*parts, scale)
    places = [(part.shape, part.stride(), int(part.storage_offset())) for part in parts]
    joined = whole is not None and _fill(whole, parts)
    number = _scale(q, scale)
    sizes = None if joined and len({place[:2] for place in places}) > 1 else _gradient_sizes(parts, number)
    found: Any
    if sizes is not None:
        found = _Attended.apply(sizes, number, places, *([whole] if joined else parts))
        return found
    q, k, v = _Parts.apply(whole, places) if joined else parts
    return _by_pytorch(q, k, v, scale)


def _gradient_sizes(parts: Sequence[Tensor], scale: float) -> AttentionGradient | None:
    """The sizes of the kernel for gradients of q, k and v; None where PyTorch computes these."""
    q, k, _ = parts
    if q.dtype not in HALF_MODES or scale <= 0 or not kernels_take(q) or not all(map(reads_in_place, parts)):
        return None
    return attention_gradient(q.shape[3], q.shape[2], k.shape[2], HALF_MODES[q.dtype], shared_limit_of(q.device.index))


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
    """Attention by kernels, of three tensors or of three parts of one."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, sizes: AttentionGradient, scale: float, places: Sequence[_Place], *tensors: Tensor
    ) -> Tensor:
        q, k, v = _parts(tensors, places)
        log_sums = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        y = run_attention(q, k, v, scale, sizes.mode, False, log_sums)
        ctx.given = sizes, scale, places
        ctx.save_for_backward(*tensors, y, log_sums)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_second_derivative()
        *tensors, y, log_sums = ctx.saved_tensors
        sizes, scale, places = ctx.given
        gradients = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in tensors]
        sums = _sums_of_columns(gradients[0], places) if len(tensors) == 1 else None
        of_parts: Sequence[Tensor | None] = (None, None, None)
        if sums is not None:  # of each of the three parts, (parts, heads, features), which lie as its columns do
            of_parts = [
                sums.as_strided((len(sums), *shape[1::2]), (sums.stride(0), *strides[1::2]), offset) for shape, strides, offset in places
            ]
        run_attention_gradient(sizes, _parts(tensors, places), y, log_sums, dy, scale, _parts(gradients, places), of_parts)
        keep_sums(gradients[0], sums)
        return None, None, None, *gradients


def _sums_of_columns(whole: Tensor, places: Sequence[_Place]) -> Tensor | None:  # shape: (parts, features)
    """An empty tensor for sums of rows; None where the three parts are not columns of rows, an image's tokens one after the other."""
    (batch, heads, tokens, features), (of_image, of_head, of_token, _), _ = places[0]
    rows = of_token == whole.shape[-1] and of_image == tokens * of_token
    if not rows or any(offset + (heads - 1) * of_head + features > of_token for *_, offset in places):
        return None
    return torch.empty((parts_of_sums(batch, heads, whole.device.index), of_token), dtype=torch.float32, device=whole.device)


def _parts(tensors: Sequence[Tensor], places: Sequence[_Place]) -> Sequence[Tensor]:
    """The three tensors themselves, or the three parts of the one."""
    return tensors if len(tensors) > 1 else [tensors[0].as_strided(*place) for place in places]


class _Parts(torch.autograd.Function):
    """Three parts of ``whole``, which do not overlap and fill it."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, places: Sequence[_Place]) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.places, ctx.like = places, (whole.shape, whole.dtype, whole.device)
        return tuple(_parts((whole,), places))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_second_derivative()
        shape, dtype, device = ctx.like
        whole = torch.empty(shape, dtype=dtype, device=device)
        for place, gradient in zip(ctx.places, gradients, strict=True):
            copy_wide(whole.as_strided(*place), gradient)
        return whole, None


def copy_wide(to: Tensor, source: Tensor) -> None:
    """``to.copy_(source)``, for tensors of one shape and dtype, by the widest elements of which the memory of both consists.

    PyTorch copies strided tensors element by element, and few wide ones are faster than many narrow ones.
    """
    for dtype in (torch.complex128, torch.int64, torch.int32):
        each = dtype.itemsize // to.element_size()
        if each > 1 and _consists(to, each) and _consists(source, each):
            to, source = to.view(dtype), source.view(dtype)
            break
    to.copy_(source)


def _consists(tensor: Tensor, each: int) -> bool:
    """Whether the last dimension consists of groups of so many elements, which begin at multiples of their size."""
    aligned = tensor.data_ptr() % (each * tensor.element_size()) == 0 and tensor.stride(-1) == 1
    return aligned and not any(size % each for size in (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1]))
