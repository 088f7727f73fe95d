"""A product of two factors added to a residual in the same launch, with its registered operator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.factors import architecture_of
from flysurgery.ops.cuda.fused import FusedLinear, aligned
from flysurgery.ops.cuda.modes import dtype_of
from flysurgery.ops.cuda.multiply import product_for
from flysurgery.ops.cuda.obstacles import fused_obstacle, shared_limit_of
from flysurgery.ops.derived import derived
from flysurgery.patterns import Architecture


def linear_residual_obstacle(architecture: Architecture, mode: str, scaled: bool, device_index: int) -> str | None:
    """Why the fused kernel cannot add a residual to this product; None where it can."""
    if scaled and mode == "fp16":
        return "a layer scale is folded into the weights, and a small one would vanish there in float16"
    return fused_obstacle(architecture, mode, 1, shared_limit_of(device_index))


def run_linear_residual(
    x: Tensor,  # shape: (rows, in_features)
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left and right
    bias: Tensor | None,  # shape: (out_features,)
    residual: Tensor,  # shape: (rows, out_features)
    scale: Tensor | None,  # shape: (out_features,)
    mode: str,
) -> Tensor:  # shape: (rows, out_features)
    """``residual + scale * (x @ W.T + bias)`` in one launch on the current stream.

    Raises:
        BackendError: no fused kernel runs these factors; ``linear_residual_obstacle`` tells beforehand.
    """
    device_index = x.device.index
    if device_index != torch.cuda.current_device():
        with torch.cuda.device(device_index):
            return run_linear_residual(x, factors, bias, residual, scale, mode)
    kernels = product_for(tuple(factors), 1, mode, device_index, x.shape[0], False).kernels
    if not isinstance(kernels, FusedLinear):
        raise BackendError(f"factors {architecture_of(factors)} have no fused kernel in mode '{mode}', which could add a residual")
    left, right = factors
    sources = tuple(part for part in (left, right, bias, scale) if part is not None)

    def make() -> tuple[Tensor, ...]:
        a, b, _, d = left.shape
        scaled = left.detach() if scale is None else left.detach() * scale.detach().view(a, b, 1, d)
        image = kernels.pack([(scaled, right.detach())])
        if bias is None:
            return (image,)
        return (image, (bias.detach() if scale is None else bias.detach() * scale.detach()).to(dtype_of(mode)))

    packed = derived(("linear residual", kernels, bias is None, scale is None), sources, make)
    return kernels.run(_readable(x), packed[0], None if bias is None else packed[1], _readable(residual))


def _readable(tensor: Tensor) -> Tensor:
    return tensor if aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _fake_linear_residual(
    x: Tensor, factors: Sequence[Tensor], bias: Tensor | None, residual: Tensor, scale: Tensor | None, mode: str
) -> Tensor:
    return residual.new_empty(residual.shape)


_library = torch.library.Library("flysurgery", "FRAGMENT")
_library.define("linear_residual(Tensor x, Tensor[] factors, Tensor? bias, Tensor residual, Tensor? scale, str mode) -> Tensor")
_library.impl("linear_residual", run_linear_residual, "CUDA")
torch.library.register_fake("flysurgery::linear_residual", _fake_linear_residual, lib=_library)
