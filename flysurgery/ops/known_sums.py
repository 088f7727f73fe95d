"""Sums of a gradient's rows that its kernel has found, kept with the gradient until the operation before it asks for them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flysurgery.gpu.kernel import current_stream

_NAME = "_flysurgery_sums"


class _Kept(NamedTuple):
    """Sums, and what the gradient was when they were kept."""

    sums: Tensor
    version: int
    stream: int | None


def keep_sums(
    gradient: Tensor,  # shape: (batch..., features)
    sums: Tensor | None,  # shape: (parts, features), float32 or wider, to be added up; None where they are not known
) -> None:
    """Note the sums of a gradient's rows on the tensor itself.

    So a copy, a sum of gradients and what a hook gives in its place know nothing of them.
    """
    if sums is not None:
        setattr(gradient, _NAME, _Kept(sums, gradient._version, _stream(gradient)))


def known_sums(gradient: Tensor) -> Tensor | None:  # shape: (parts, features)
    """The sums of this gradient's rows; None where they are not known, it has been written to, or another stream is the current one.

    Writes are those that PyTorch counts, as it does for tensors that it saves: those through ``.data`` are not.
    """
    kept: _Kept | None = getattr(gradient, _NAME, None)
    return kept.sums if kept is not None and kept[1:] == (gradient._version, _stream(gradient)) else None


def _stream(tensor: Tensor) -> int | None:
    return current_stream(tensor.device.index) if tensor.is_cuda else None
