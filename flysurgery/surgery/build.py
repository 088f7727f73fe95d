"""The modules that take the place of one dense layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.surgery.layer_plan import LayerPlan, Part

Fill = Callable[[Part], Sequence[Tensor]]


def build(layer: LayerPlan, dense: nn.Linear, weights: Fill) -> nn.Module:
    """The module for ``layer``, with the device, dtype, mode and ``requires_grad`` of ``dense``.

    ``weights(part)`` gives the factors of a part, or its one dense weight where it has no architecture. Bias entries are
    copied. No random numbers are drawn.
    """
    modules = [_part(part, dense, weights(part)) for part in layer.parts]
    names = [part.name for part in layer.parts if part.name is not None]
    new = SplitLinear(dict(zip(names, modules, strict=True))) if names else modules[0]
    return new.train(dense.training)


def empty_weights(dense: nn.Linear) -> Fill:
    """Weights of the right shapes that hold nothing yet, for ``build``."""

    def weights(part: Part) -> list[Tensor]:
        shapes = [each.factor_shape for each in part.architecture] if part.architecture else [(part.stop - part.start, dense.in_features)]
        return [torch.empty(shape, dtype=dense.weight.dtype, device=dense.weight.device) for shape in shapes]

    return weights


def _part(part: Part, dense: nn.Linear, weights: Sequence[Tensor]) -> ButterflyLinear | nn.Linear:
    parameters = [nn.Parameter(weight, requires_grad=dense.weight.requires_grad) for weight in weights]
    has_bias = dense.bias is not None
    new: ButterflyLinear | nn.Linear
    if part.architecture is None:
        new = nn.Linear(dense.in_features, part.stop - part.start, bias=has_bias, device="meta")
        new.weight = parameters[0]
    else:
        new = ButterflyLinear(part.architecture, bias=has_bias, device="meta")
        new.factors = nn.ParameterList(parameters)
    if has_bias:
        new.bias = nn.Parameter(dense.bias.detach()[part.start : part.stop].clone(), requires_grad=dense.bias.requires_grad)
    return new
