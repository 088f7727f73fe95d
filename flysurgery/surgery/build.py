"""The modules that take the place of one dense layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from flysurgery.layers import ButterflyConv, ButterflyLinear, SplitLinear
from flysurgery.surgery.layer_plan import LayerPlan, Part

Fill = Callable[[Part], Sequence[Tensor]]
Dense: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
"""What can be replaced: linears, and convolutions with a kernel of one."""


def build(layer: LayerPlan, dense: Dense, weights: Fill) -> nn.Module:
    """The module for ``layer``, with the device, dtype, mode and ``requires_grad`` of ``dense``.

    ``weights(part)`` gives the factors of a part, or its one dense weight where it has no architecture. Bias entries are
    copied. No random numbers are drawn.
    """
    modules = [_part(part, dense, weights(part)) for part in layer.parts]
    names = [part.name for part in layer.parts if part.name is not None]
    new = SplitLinear(dict(zip(names, modules, strict=True))) if names else modules[0]
    return new.train(dense.training)


def empty_weights(dense: Dense) -> Fill:
    """Weights of the right shapes that hold nothing yet, for ``build``."""

    def weights(part: Part) -> list[Tensor]:
        shapes = (
            [each.factor_shape for each in part.architecture] if part.architecture else [(part.stop - part.start, dense.weight.shape[1])]
        )
        return [torch.empty(shape, dtype=dense.weight.dtype, device=dense.weight.device) for shape in shapes]

    return weights


def _part(part: Part, dense: Dense, weights: Sequence[Tensor]) -> ButterflyLinear | nn.Linear:
    parameters = [nn.Parameter(weight, requires_grad=dense.weight.requires_grad) for weight in weights]
    has_bias = dense.bias is not None
    new: ButterflyLinear | nn.Linear
    if part.architecture is None:  # of a convolution, all rows are one part
        new = nn.Linear(dense.weight.shape[1], part.stop - part.start, bias=has_bias, device="meta")
        new.weight = parameters[0]
    else:
        if isinstance(dense, nn.Linear):
            new = ButterflyLinear(part.architecture, bias=has_bias, device="meta")
        else:
            new = ButterflyConv(part.architecture, bias=has_bias, axes=len(dense.kernel_size), device="meta")
        new.factors = nn.ParameterList(parameters)
    if dense.bias is not None:
        new.bias = nn.Parameter(dense.bias.detach()[part.start : part.stop].clone(), requires_grad=dense.bias.requires_grad)
    return new
