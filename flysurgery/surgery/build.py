"""The modules that take the place of one dense layer, and the dense layer that takes theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from flysurgery.factors import factors_to_dense
from flysurgery.layers import ButterflyConv, ButterflyLinear, SplitLinear
from flysurgery.surgery.plan import LayerPlan, Part

Fill = Callable[[Part], Sequence[Tensor]]
Dense: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
"""What can be replaced: linears, and convolutions with a kernel of one."""


def matrix_of(dense: Dense, part: Part) -> Tensor:
    """The rows of the weight that are one part; shape (rows, in_features), without a copy."""
    return dense.weight.detach()[part.start : part.stop].flatten(1)


def build(layer: LayerPlan, dense: Dense, weights: Fill) -> nn.Module:
    """The module for ``layer``, with the device, dtype, mode and ``requires_grad`` of ``dense``.

    ``weights(part)`` gives the factors of a part, or its one dense weight where it has no architecture. Bias entries are
    copied. No random numbers are drawn.
    """
    modules = {part.name: _part(part, dense, weights(part)) for part in layer.parts}
    new = modules[None] if None in modules else SplitLinear({name: module for name, module in modules.items() if name is not None})
    return new.train(dense.training)


def build_empty(layer: LayerPlan, dense: Dense) -> nn.Module:
    """The module for ``layer`` with weights of the right shapes that hold nothing yet."""

    def weights(part: Part) -> list[Tensor]:
        shapes = [each.factor_shape for each in part.architecture] if part.architecture else [matrix_of(dense, part).shape]
        return [torch.empty(shape, dtype=dense.weight.dtype, device=dense.weight.device) for shape in shapes]

    return build(layer, dense, weights)


def dense_layer(layer: ButterflyLinear | SplitLinear) -> nn.Module:
    """The ``nn.Linear`` or 1x1 convolution with the product of the factors, summed in float64 and rounded once to their dtype.

    Device, mode and ``requires_grad`` stay; the parts of a split layer become one matrix again.
    """
    parts: list[ButterflyLinear | nn.Linear] = list(layer.children()) if isinstance(layer, SplitLinear) else [layer]  # pyright: ignore
    biases = [part.bias for part in parts if part.bias is not None]
    axes = layer.axes if isinstance(layer, ButterflyConv) else 0
    kind, kernel = (nn.Linear, ()) if axes == 0 else ((nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1], (1,))
    new = kind(layer.in_features, layer.out_features, *kernel, bias=bool(biases), device="meta")
    trains = any(parameter.requires_grad for part in parts for name, parameter in part.named_parameters() if name != "bias")
    new.weight = nn.Parameter(torch.cat([_product(part) for part in parts])[(..., *(None,) * axes)], requires_grad=trains)
    if biases:
        rows = [biases[0].new_zeros(part.out_features) if part.bias is None else part.bias.detach() for part in parts]
        new.bias = nn.Parameter(torch.cat(rows), requires_grad=any(bias.requires_grad for bias in biases))
    return new.train(layer.training)


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


def _product(part: ButterflyLinear | nn.Linear) -> Tensor:
    if isinstance(part, nn.Linear):
        return part.weight.detach()
    factors = [factor.detach() for factor in part.factors]
    wide = torch.float32 if factors[0].device.type == "mps" else torch.float64
    return factors_to_dense([factor.to(wide) for factor in factors]).to(factors[0].dtype)
