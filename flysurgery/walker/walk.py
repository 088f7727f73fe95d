"""Find the linear maps of a model, with their roles and the obstacles to replacing them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from flysurgery.walker.attention import nested_switches, separating
from flysurgery.walker.dataflow import Dataflow
from flysurgery.walker.example import Example
from flysurgery.walker.layout import split_of
from flysurgery.walker.linears import Call, read_elsewhere
from flysurgery.walker.owners import CONVOLUTIONS, Owners
from flysurgery.walker.survey import Survey, survey
from flysurgery.walker.target import CODES, ROLES, Obstacle, Slice, Target, module_obstacles, obstacle


def walk(model: nn.Module, example: Example | None = None) -> tuple[Target, ...]:
    """Find every linear map of ``model``, in the order of execution, and those that it never runs, at the end.

    The forward pass is traced to a graph of operators on fake tensors, in eval mode: nothing is computed, no weight is copied, and
    the model, its mode and the random state stay as they are. A model with its weights on the meta device will do. Roles follow from
    the graph alone, in which each ``nn.MultiheadAttention`` is a ``SeparateAttention``: a linear whose output reaches the query, key or
    value of attention is ``qkv``, the one after attention is ``attn_out``, one linear, a nonlinearity or gate, and another linear are
    ``ffn_in`` and ``ffn_out``. A linear that gives the result is the ``head``; everything else is ``other``, with an obstacle that says
    what it is. Targets with obstacles are in the result: whoever replaces layers must leave those alone that are ``blocked``.

    Costs one trace: about a second for a ViT of any size.

    Args:
        model: any module; timm's and vit-pytorch's Vision Transformers need no example.
        example: the input, a tuple of all positional inputs, or a mapping of inputs by name. Only shapes and dtypes count, and the device
            is the model's. None: ``example_input(model)``. ``Target.rows`` is for these shapes.

    Raises:
        WalkError: no example is known for the model, or its forward pass cannot be traced; the message holds the exporter's reason.
    """
    return targets_of(model, survey(model, example, prepare=separating(model)))


def targets_of(model: nn.Module, seen: Survey) -> tuple[Target, ...]:
    """The targets of a model that was surveyed already, as ``walk`` gives them."""
    calls, owners, roles = seen.calls, seen.owners, seen.roles
    read = read_elsewhere(seen.trace, owners, calls)
    modules = owners.modules | dict(model.named_modules())  # the model's own have their hooks
    nested = nested_switches(model)
    grouped: dict[str, list[Call]] = {}
    for call in calls:
        grouped.setdefault(call.fqn, []).append(call)

    targets = []
    for fqn, group in grouped.items():
        call = min(group, key=lambda call: ROLES.index(roles[call.node]))
        role, verdict = roles[call.node], seen.verdicts[call.node]
        found = [obstacle(verdict)] if verdict in CODES else []
        found += _weight_obstacles(modules, owners, call, fqn in read)
        targets.append(
            Target(
                fqn=fqn,
                role=role,
                in_features=call.in_features,
                out_features=call.out_features,
                bias=call.bias if call.kind == "raw" else modules[fqn]._parameters.get("bias") is not None,
                calls=len(group),
                rows=sum(member.rows for member in group),
                obstacles=tuple(found),
                split=_common_split(group, calls, seen.dataflow) if role == "qkv" else None,
                aliases=() if call.kind == "raw" else owners.further_names(fqn),
                switches=(
                    *((seen.switches[fqn],) if fqn in seen.switches and fqn not in read else ()),
                    *(switch for encoder, switch in nested.items() if not encoder or fqn.startswith(f"{encoder}.")),
                ),
            )
        )
    return (*targets, *_idle(model, owners, grouped))


def _weight_obstacles(modules: Mapping[str, nn.Module], owners: Owners, call: Call, is_read: bool) -> list[Obstacle]:
    if call.kind == "raw":
        return [obstacle("raw-weight")]
    module = modules[call.fqn]
    assert isinstance(module, (nn.Linear, *CONVOLUTIONS))  # what is no raw weight belongs to one of these
    found = [obstacle("conv1x1")] if call.kind == "conv" else []
    found += module_obstacles(module)
    if owners.is_tied(call.fqn):
        found.append(obstacle("tied"))
    if is_read:
        found.append(obstacle("weight-read"))
    return found


def _common_split(group: list[Call], calls: list[Call], dataflow: Dataflow) -> tuple[Slice, ...] | None:
    """The split on which all calls of a module agree."""
    splits = set()
    for call in group:
        flows = [(other.source, dataflow.flows[other.source].get(call.node)) for other in calls]
        splits.add(split_of(call, dataflow, [source for source, via in flows if via is not None and via.nonlinear]))
    return splits.pop() if len(splits) == 1 else None


def _idle(model: nn.Module, owners: Owners, used: Collection[str]) -> list[Target]:
    """The nn.Linear modules that the forward pass does not use."""
    return [
        Target(
            fqn=fqn,
            role="other",
            in_features=module.in_features,
            out_features=module.out_features,
            bias=module._parameters.get("bias") is not None,
            calls=0,
            rows=0,
            obstacles=(obstacle("not-called"), *module_obstacles(module)),
            aliases=owners.further_names(fqn),
        )
        for fqn, module in model.named_modules()
        if isinstance(module, nn.Linear) and fqn not in used
    ]
