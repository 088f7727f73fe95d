"""From factors back to dense layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flysurgery.errors import SurgeryError
from flysurgery.factors import factors_to_dense
from flysurgery.layers import ButterflyConv, ButterflyLinear, SplitLinear
from flysurgery.surgery.attached_plan import SWITCHES_BEFORE, converted_layers, refuse_optimized
from flysurgery.surgery.transaction import Change


def densify(model: nn.Module) -> int:
    """Replace every converted layer of ``model``, in place, by an ``nn.Linear`` (or 1x1 convolution) with the product of its factors.

    Dtype, device, mode and ``requires_grad`` stay. A split layer becomes one matrix again, parents' switches are set back,
    and the model no longer has a plan, so it can be converted again. Products are summed in float64 and
    rounded once to the factors' dtype. Returns the number of layers; a shared one counts once.

    Raises:
        SurgeryError: the model has no converted layer, is itself one, which cannot be replaced in place, or is optimized.
    """
    refuse_optimized(model)
    layers = converted_layers(model)
    if not layers:
        raise SurgeryError("the model has no converted layer, so there is nothing to densify")
    if "" in layers:
        raise SurgeryError(f"the model is itself a {type(model).__name__} and cannot be replaced in place; put it into a parent module")
    dense = {layer: _dense_layer(layer) for layer in dict.fromkeys(layers.values())}
    with Change(model) as change:
        for fqn, layer in layers.items():
            change.swap((fqn,), dense[layer])
        change.switch(getattr(model, SWITCHES_BEFORE, ()))
        change.unmark()
    return len(dense)


def _dense_layer(layer: ButterflyLinear | SplitLinear) -> nn.Module:
    parts = (
        [part for part in layer.children() if isinstance(part, ButterflyLinear | nn.Linear)] if isinstance(layer, SplitLinear) else [layer]
    )
    biases = [part.bias for part in parts if part.bias is not None]
    axes = layer.axes if isinstance(layer, ButterflyConv) else 0
    kind, kernel = (nn.Linear, ()) if axes == 0 else ((nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1], (1,))
    new = kind(layer.in_features, layer.out_features, *kernel, bias=bool(biases), device="meta")
    trains = any(parameter.requires_grad for part in parts for parameter in _weight_parameters(part))
    new.weight = nn.Parameter(torch.cat([_weight(part) for part in parts])[(..., *(None,) * axes)], requires_grad=trains)
    if biases:
        rows = [biases[0].new_zeros(part.out_features) if part.bias is None else part.bias.detach() for part in parts]
        new.bias = nn.Parameter(torch.cat(rows), requires_grad=any(bias.requires_grad for bias in biases))
    return new.train(layer.training)


def _weight(part: nn.Module) -> Tensor:
    if isinstance(part, nn.Linear):
        return part.weight.detach()
    factors = [factor.detach() for factor in _weight_parameters(part)]
    wide = torch.float32 if factors[0].device.type == "mps" else torch.float64
    return factors_to_dense([factor.to(wide) for factor in factors]).to(factors[0].dtype)


def _weight_parameters(part: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in part.named_parameters() if name != "bias"]
