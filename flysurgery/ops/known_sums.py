"""Sums of a gradient's rows that its kernel has found, kept with the gradient until the operation before it asks for them."""

from torch import Tensor

from flysurgery.gpu.kernel import current_stream

_NAME = "_flysurgery_sums"


def keep_sums(
    gradient: Tensor,  # shape: (batch..., features)
    sums: Tensor | None,  # shape: (parts, features), float32 or wider, to be added up; None where they are not known
) -> None:
    """Note the sums of a gradient's rows on the tensor itself, with what it is now.

    So a copy, a sum of gradients and what a hook gives in its place know nothing of them.
    """
    if sums is not None:
        setattr(gradient, _NAME, (sums, *_present(gradient)))


def known_sums(gradient: Tensor) -> Tensor | None:  # shape: (parts, features)
    """The sums of this gradient's rows; None where they are not known, it has been written to, or another stream is the current one.

    Writes are those that PyTorch counts, as it does for tensors that it saves: those through ``.data`` are not.
    """
    sums, *kept = getattr(gradient, _NAME, (None,))
    return sums if kept == [*_present(gradient)] else None


def _present(gradient: Tensor) -> tuple[int, int | None]:
    """How often it has been written to, and the current stream."""
    return gradient._version, current_stream(gradient.device.index) if gradient.is_cuda else None
