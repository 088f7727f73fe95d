"""Sums over rows: of a gradient, for a bias; of what is left of it before an activation, in the same launch; and those found already."""

import torch
from torch import Tensor
from torch.nn import functional

from flysurgery.gpu.device import kernels_take, multiprocessors_of
from flysurgery.gpu.fused_linear import packed
from flysurgery.gpu.gated import gated_obstacle
from flysurgery.gpu.kernel import current_stream, rows_kernel

_KEPT = "_flysurgery_sums"
_STRIP_BYTES = 256
"""Of a row, in a block."""
_WARPS = 32
"""Of a multiprocessor, which all run at once. Sums alone have them in one block, as more blocks would leave more parts."""


def sum_of_rows(
    dy: Tensor,  # shape: (rows, features)
    dtype: torch.dtype,
) -> Tensor:  # shape: (features,)
    """The sum of rows in ``dtype``, float32 or wider."""
    if not _has_kernel(dy) or dtype != torch.float32:
        return dy.sum(0, dtype=dtype)
    sums = _launch(None, packed(dy), "none")
    while len(sums) > 1:
        sums = _launch(None, sums, "none")
    return sums[0]


def activation_gradient(
    u: Tensor,  # shape: (rows, features)
    gradient: Tensor,  # of activation(u), of the same shape
    activation: str,
) -> Tensor:  # shape: (parts, features), float32 or wider
    """Put ``activation(u)`` in the place of u, and u's gradient in that of its own; give sums of parts of the latter's rows.

    Both lie in memory row by row.

    Raises:
        KeyError: there is no such activation; ``gelu``, ``gelu_tanh`` and ``silu`` are.
    """
    if _has_kernel(u):
        return _launch(u, gradient, activation)
    if activation == "silu":
        found, of_u = functional.silu(u), torch.ops.aten.silu_backward(gradient, u)
    else:
        approximate = {"gelu": "none", "gelu_tanh": "tanh"}[activation]
        found, of_u = functional.gelu(u, approximate=approximate), torch.ops.aten.gelu_backward(gradient, u, approximate=approximate)
    u.copy_(found)
    return gradient.copy_(of_u).sum(0, keepdim=True, dtype=torch.promote_types(u.dtype, torch.float32))


def _has_kernel(x: Tensor) -> bool:
    return kernels_take(x) and gated_obstacle(x.shape[-1], x.dtype) is None


def _launch(u: Tensor | None, gradient: Tensor, activation: str) -> Tensor:  # shape: (parts, features), float32
    (rows, features), index = gradient.shape, gradient.device.index
    warps, together = (_WARPS, 8) if u is None else (8, 2)
    strips = -(-features * gradient.element_size() // _STRIP_BYTES)
    blocks = _WARPS // warps * multiprocessors_of(index)
    parts = max(1, min(blocks // strips, -(-rows // (2 * warps * together))))
    sums = torch.empty((parts, features), dtype=torch.float32, device=gradient.device)
    rows_kernel("row_sums", features, gradient.dtype, index, activation, warps=warps, together=together).launch(
        (strips, parts, 1), (32 * warps, 1, 1), 0, current_stream(index), u, gradient, sums, rows, early=True
    )
    return sums


def keep_sums(
    gradient: Tensor,  # shape: (batch..., features)
    sums: Tensor | None,  # shape: (parts, features), float32 or wider, to be added up; None where they are not known
) -> None:
    """Note the sums of a gradient's rows on the tensor itself, with what it is now.

    So a copy, a sum of gradients and what a hook gives in its place know nothing of them.
    """
    if sums is not None:
        setattr(gradient, _KEPT, (sums, *_state_of(gradient)))


def known_sums(gradient: Tensor) -> Tensor | None:  # shape: (parts, features)
    """The sums of this gradient's rows; None where they are not known, it has been written to, or another stream is the current one.

    Writes are those that PyTorch counts, as it does for tensors that it saves: those through ``.data`` are not.
    """
    kept = getattr(gradient, _KEPT, None)
    return kept[0] if kept is not None and kept[1:] == _state_of(gradient) else None


def _state_of(gradient: Tensor) -> tuple[int, int | None]:
    """How often it has been written to, and the current stream."""
    return gradient._version, current_stream(gradient.device.index) if gradient.is_cuda else None
