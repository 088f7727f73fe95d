"""An activated gate times a value in one launch."""

import torch
from torch import Tensor

from flysurgery.gpu.fused_linear import readable, strides_of
from flysurgery.gpu.kernel import current_stream, rows_kernel
from flysurgery.gpu.modes import DTYPE_NUMBERS
from flysurgery.gpu.recording import fresh

_THREADS = 256
_VECTOR_BYTES = 16


def gated_obstacle(features: int, dtype: torch.dtype) -> str | None:
    """Why the kernel does not take rows of this many features; None where it does."""
    if dtype not in DTYPE_NUMBERS:
        return f"the gate's kernel takes float16, bfloat16 and float32, not {dtype}"
    if features % (_VECTOR_BYTES // dtype.itemsize):
        return f"the gate's kernel takes rows of whole vectors of 16 bytes, got {features} features of {dtype}"
    return None


def run_gated(
    gate: Tensor,  # shape: (rows, features)
    value: Tensor,  # shape: (rows, features)
    activation: str,
) -> Tensor:  # shape: (rows, features)
    """``activation(gate) * value``, in float32, rounded once; on the current stream. Both are read once."""
    y, device_index = fresh(gate.shape, gate.dtype, gate.device), gate.device.index
    if y.numel():
        gate, value = readable(gate), readable(value)
        rows, features = y.shape
        rows_kernel("gated", features, y.dtype, device_index, activation).launch(
            (-(-y.nbytes // (_VECTOR_BYTES * _THREADS)), 1, 1),
            (_THREADS, 1, 1),
            0,
            current_stream(device_index),
            *(gate, value, y, rows, *strides_of(gate, value)),
        )
    return y
