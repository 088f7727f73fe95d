"""A product of two factors with its epilogue in the same launch, with its registered operator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.factors import architecture_of
from flysurgery.gpu.fused import ACTIVATIONS, FusedLinear
from flysurgery.gpu.modes import dtype_of
from flysurgery.gpu.obstacles import fused_obstacle, shared_limit_of
from flysurgery.gpu.registered import Operator, rows_like
from flysurgery.gpu.run_product import product_for
from flysurgery.gpu.weight_cache import derived_for_launch
from flysurgery.patterns import Architecture


def epilogue_obstacle(architecture: Architecture, mode: str, activation: str, device_index: int) -> str | None:
    """Why the fused kernel has no epilogue for this product; None where it has one."""
    if activation not in ACTIVATIONS:
        return f"the fused kernel has the activations {', '.join(ACTIVATIONS)}, not '{activation}'"
    return fused_obstacle(architecture, mode, 1, shared_limit_of(device_index))


def run_epilogue(
    x: Tensor,  # shape: (rows, in_features)
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left and right
    bias: Tensor | None,  # shape: (out_features,)
    activation: str,
    residual: Tensor | None,  # shape: (rows, out_features)
    scale: Tensor | None,  # shape: (out_features,)
    mode: str,
) -> Tensor:  # shape: (rows, out_features)
    """``residual + activation(scale * (x @ W.T + bias))`` in one launch on the current stream.

    Raises:
        BackendError: no fused kernel runs these factors; ``epilogue_obstacle`` tells beforehand.
    """
    device_index = x.device.index
    kernels = product_for(tuple(factors), 1, mode, device_index, x.shape[0], False).kernels
    if not isinstance(kernels, FusedLinear):
        raise BackendError(f"factors {architecture_of(factors)} have no fused kernel in mode '{mode}', which could have an epilogue")
    left, right = factors
    sources = tuple([part for part in (left, right, bias, scale) if part is not None])

    def make() -> tuple[Tensor, ...]:
        image, columns = kernels.pack([(left.detach(), right.detach())]), [part for part in (bias, scale) if part is not None]
        if scale is not None and bias is None:
            columns.insert(0, torch.zeros_like(scale))
        return (image, torch.cat([part.detach().to(dtype_of(mode)) for part in columns])) if columns else (image,)

    packed, early = derived_for_launch(("epilogue", kernels, bias is None, scale is None), sources, make)
    return kernels.run(x, packed[0], packed[1] if len(packed) > 1 else None, residual, activation, scaled=scale is not None, early=early)


ks_linear_epilogue_operator = Operator(
    "ks_linear_epilogue(Tensor x, Tensor[] factors, Tensor? bias, str activation, Tensor? residual, Tensor? scale, str mode) -> Tensor",
    run_epilogue,
    lambda x, given: rows_like(x, architecture_of(given.factors).out_features),
)
