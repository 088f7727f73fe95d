"""Put the hidden units of feed-forward blocks in an order that suits both of their layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from flysurgery.projection import Side, choose_hidden_order, metric_of
from flysurgery.surgery.build import Dense
from flysurgery.surgery.fitting import Inputs
from flysurgery.surgery.layer_plan import LayerPlan
from flysurgery.walker import Target


def permuted_pairs(
    layers: Sequence[LayerPlan],
    targets: Sequence[Target],
    dense: Mapping[str, Dense],
    inputs: Mapping[str, Inputs],
) -> tuple[dict[str, nn.Linear], dict[str, Inputs]]:
    """The linears and inputs of those blocks whose hidden units are better off in another order, in that order; aside from the model.

    Only blocks of which the walk proves that nothing but element-wise functions stands between their two linears, and both of whose
    linears become products of two factors. The two linears in the new order compute what they did before.
    """
    known = {layer.fqn: layer for layer in layers}
    linears: dict[str, nn.Linear] = {}
    seen: dict[str, Inputs] = {}
    for target in targets:
        first, second = known.get(target.fqn), known.get(target.pair or "")
        if first is None or second is None or not (_is_pair_of_factors(first) and _is_pair_of_factors(second)):
            continue
        up, down = dense[first.fqn], dense[second.fqn]
        if not (isinstance(up, nn.Linear) and isinstance(down, nn.Linear)):
            continue
        found = choose_hidden_order(_side(first, up, inputs[first.fqn]), _side(second, down, inputs[second.fqn]))
        if found.error_after < found.error_before:
            order = found.order
            linears[first.fqn] = _reordered(up, rows=order)
            linears[second.fqn] = _reordered(down, columns=order)
            before, hidden = inputs[first.fqn], inputs[second.fqn]
            seen[first.fqn] = Inputs(before.fit, before.held_out, permuted=True)
            seen[second.fqn] = Inputs(hidden.fit.permuted(order), hidden.held_out.permuted(order), permuted=True)
    return linears, seen


def _is_pair_of_factors(layer: LayerPlan) -> bool:
    return len(layer.parts) == 1 and layer.parts[0].architecture is not None and len(layer.parts[0].architecture) == 2


def _side(layer: LayerPlan, linear: nn.Linear, inputs: Inputs) -> Side:
    metric = metric_of(inputs.fit, bias=linear.bias is not None)
    architecture = layer.parts[0].architecture
    assert architecture is not None  # of a layer that is a pair of factors
    return Side(linear.weight.detach().to(metric.gram), architecture, metric.gram)


def _reordered(linear: nn.Linear, *, rows: Tensor | None = None, columns: Tensor | None = None) -> nn.Linear:
    """A copy with its rows and bias, or its columns, in another order."""
    new = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    for name, parameter in linear.named_parameters():
        value = parameter.detach()
        if rows is not None:
            value = value[rows.to(value.device)]
        elif columns is not None and name == "weight":
            value = value[:, columns.to(value.device)]
        setattr(new, name, nn.Parameter(value.clone(), requires_grad=parameter.requires_grad))
    return new.train(linear.training)
