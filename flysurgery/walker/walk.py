"""Find the linear maps of a model, with their roles and the obstacles to replacing them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from flysurgery.errors import WalkError
from flysurgery.walker.attention import separating
from flysurgery.walker.dataflow import Dataflow
from flysurgery.walker.example import Example, example_input, positional
from flysurgery.walker.layout import split_of
from flysurgery.walker.linears import CONVOLUTIONS, Call, Owners, find_calls, read_elsewhere, set_switches
from flysurgery.walker.roles import verdicts
from flysurgery.walker.target import OBSTACLES, ROLES, Obstacle, Role, Slice, Switch, Target, module_obstacles
from flysurgery.walker.trace import Trace, device_of, on_device, shadow, trace


@dataclass(frozen=True)
class Survey:
    """A traced model: its graph, who owns what in it, its multiplications by a weight, and the role of each.

    ``double`` is the stand-in that was traced, with the model's tensors and ``switches`` set; ``example`` are the inputs, on its device.
    ``switches`` has the linears' names as keys, ``verdicts`` the nodes of ``calls``: a role, or an obstacle's code.
    """

    double: nn.Module
    example: tuple[Any, ...]
    trace: Trace
    owners: Owners
    calls: list[Call]
    verdicts: dict[Node, str]
    dataflow: Dataflow
    switches: dict[str, Switch]

    @property
    def roles(self) -> dict[Node, Role]:
        """The role of each of ``calls``, by its node."""
        return {node: verdict if verdict in ROLES else "other" for node, verdict in self.verdicts.items()}


def survey(model: nn.Module, example: Example | None = None, *, prepare: Callable[[nn.Module], None] | None = None) -> Survey:
    """Trace ``model`` in eval mode on fake tensors, and find its linear maps and their roles. The model stays as it is.

    ``prepare`` may change modules of the stand-in before it is traced. Raises WalkError as ``walk``.
    """
    if not isinstance(model, nn.Module):
        raise WalkError(f"expected a torch.nn.Module to walk, got {type(model).__name__}")
    double = shadow(model)
    inputs = on_device(positional(model, example_input(model) if example is None else example), device_of(double))
    if any(isinstance(each, Tensor) and each.numel() == 0 for each in inputs):
        raise WalkError(f"the example of {type(model).__name__} is empty; give one with at least one sample")
    if prepare is not None:
        prepare(double)
    switches = set_switches(double)
    traced, owners = trace(double, inputs), Owners(double)
    calls = find_calls(traced, owners)
    first = next((each for each in inputs if isinstance(each, Tensor)), None)
    samples = len(first) if first is not None and first.ndim > 1 else 0
    if first is not None and first.ndim == 2 and first.is_floating_point() and all(call.rows <= samples for call in calls):
        samples = 0  # rows are tokens of one sample, for all that shows
    dataflow = Dataflow(traced, calls)
    return Survey(double, inputs, traced, owners, calls, verdicts(traced, dataflow, samples), dataflow, switches)


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
    # factors do not take the nested tensors that an nn.TransformerEncoder may give its layers
    named = model.named_modules()
    nested = [fqn for fqn, each in named if isinstance(each, nn.TransformerEncoder) and getattr(each, "use_nested_tensor", False)]
    grouped: dict[str, list[Call]] = {}
    for call in calls:
        grouped.setdefault(call.fqn, []).append(call)

    targets = []
    for fqn, group in grouped.items():
        call = min(group, key=lambda call: ROLES.index(roles[call.node]))
        role, verdict = roles[call.node], seen.verdicts[call.node]
        found = [OBSTACLES[verdict]] if verdict in OBSTACLES else []
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
                    *(Switch(each, "use_nested_tensor", False) for each in nested if not each or fqn.startswith(f"{each}.")),
                ),
            )
        )
    return (*targets, *_idle(model, owners, grouped))


def _weight_obstacles(modules: Mapping[str, nn.Module], owners: Owners, call: Call, is_read: bool) -> list[Obstacle]:
    if call.kind == "raw":
        return [OBSTACLES["raw-weight"]]
    module = modules[call.fqn]
    assert isinstance(module, (nn.Linear, *CONVOLUTIONS))  # what is no raw weight belongs to one of these
    found = [OBSTACLES["conv1x1"]] if call.kind == "conv" else []
    found += module_obstacles(module)
    if owners.is_tied(call.fqn):
        found.append(OBSTACLES["tied"])
    if is_read:
        found.append(OBSTACLES["weight-read"])
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
            obstacles=(OBSTACLES["not-called"], *module_obstacles(module)),
            aliases=owners.further_names(fqn),
        )
        for fqn, module in model.named_modules()
        if isinstance(module, nn.Linear) and fqn not in used
    ]
