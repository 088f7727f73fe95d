"""Linears on some hundred rows with an epilogue in one launch, factors multiplied out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from flysurgery.gpu.device import multiprocessors_of, shared_limit_of
from flysurgery.gpu.few_rows import Weights, form_of, lies_in_place, outputs_of, pack_vectors, pack_weights, tensors_of
from flysurgery.gpu.fused import readable
from flysurgery.gpu.kernel import Kernel, current_stream, load_kernel
from flysurgery.gpu.replay.recording import fresh
from flysurgery.gpu.some_rows_tiling import SomeRowsTiling, most_rows, some_rows_tiling
from flysurgery.gpu.weight_cache import derived_for_launch

_WEIGHT_EXPONENT = 11
_WEIGHT_SHIFT = 13  # kWeightShift of the kernel


@lru_cache(maxsize=1024)
def most_some_rows(in_features: int, out_features: int, factors: bool, mode: str, device_index: int) -> int:
    """The most rows for which the kernel is the fastest for a layer, of ``factors`` or dense; 0 where it does not take the layer."""
    limits = multiprocessors_of(device_index), shared_limit_of(device_index)
    return most_rows(in_features, out_features, factors, mode, *limits)


@lru_cache(maxsize=1024)
def _tiling(rows: int, in_features: int, out_features: int, mode: str, device_index: int) -> SomeRowsTiling:
    limits = multiprocessors_of(device_index), shared_limit_of(device_index)
    return some_rows_tiling(rows, in_features, out_features, mode, *limits)


def run_some_rows(
    x: Tensor,  # shape: (rows, in_features)
    linears: Sequence[Weights],
    biases: Sequence[Tensor | None],  # shapes: (out_features,), one a linear
    activation: str,
    residual: Tensor | None,  # shape: (rows, sum of all out_features)
    scale: Tensor | None,  # shape: (sum of all out_features,)
    mode: str,
) -> Tensor:  # shape: (rows, sum of all out_features)
    """``residual + activation(scale * linears(x))``, the linears' outputs side by side, in one launch on the current stream.

    Factors are multiplied out when they are packed, in float64, and rounded once, into the memory of a dense layer. Sums and epilogue
    are float32. Parameters may be wider than x.

    Raises:
        BackendError: there is no tiling for the layer, or the kernel does not compile or launch.
    """
    device_index = x.device.index
    (rows, in_features), sizes = x.shape, [*map(outputs_of, linears)]
    y = fresh((rows, sum(sizes)), x.dtype, x.device)
    if rows == 0:
        return y
    tile = _tiling(rows, in_features, sum(sizes), mode, device_index)
    sources = tuple([part for part in (*tensors_of(linears), *biases, scale) if part is not None])
    in_place = x.element_size() == 2 and lies_in_place(linears, x.dtype)

    def make() -> tuple[Tensor, ...]:
        _, columns = pack_vectors(sources[0], (None, None), biases, scale, in_features, sizes)
        if in_place:
            return (columns,)
        dense = pack_weights(linears)
        return (columns, dense.to(x.dtype)) if x.element_size() == 2 else pack_floats(dense, columns, mode)

    token = ("some rows", mode, in_place, form_of(linears), tuple([part is not None for part in (*biases, scale)]))
    (columns, *packed), early = derived_for_launch(token, sources, make)
    x, residual = readable(x), None if residual is None else readable(residual)
    strides = [0 if part is None else part.stride(0) * part.element_size() for part in (x, residual)]
    _kernel(tile, activation, residual is not None, device_index).launch(
        tile.grid(rows),
        (32 * tile.warps, 1, 1),
        tile.shared_bytes,
        current_stream(device_index),
        *(x, packed[0] if packed else sources[0], columns, residual, y, rows, *strides),
        early=early,
    )
    return y


def pack_floats(
    dense: Tensor,  # shape: (out_features, in_features), float64
    columns: Tensor,  # shape: (2, out_features), float32
    mode: str,
) -> tuple[Tensor, Tensor]:  # shapes: (2, out_features) float32, (out_features, images, in_features) float16
    """The factors and summands of the sums; and the weights as images of fp16, each output with its own scale."""
    wide = dense.float()
    largest = torch.where(wide.isfinite(), wide.abs(), 0.0).amax(dim=1, keepdim=True)
    exponent = (_WEIGHT_EXPONENT + 1 - torch.frexp(largest).exponent).clamp(-114, 123)  # brings it to [2^11, 2^12), or near
    # 16 inputs are (lane, half, 2) in x and (half, lane, 2) here
    turned = torch.ldexp(wide, exponent).unflatten(1, (-1, 4, 2, 2)).transpose(2, 3).flatten(1)
    high = turned.half()
    images = [high] if mode == "tf32" else [high, (turned - high.float()).half()]
    factor = torch.ldexp(columns[0], _WEIGHT_SHIFT - exponent[:, 0])
    return torch.stack((factor, columns[1])), torch.stack(images, dim=1)


@lru_cache(maxsize=256)
def _kernel(tile: SomeRowsTiling, activation: str, residual: bool, device_index: int) -> Kernel:
    return load_kernel("some_rows.cu", tile.defines(activation, residual), name="some_rows", device_index=device_index)
