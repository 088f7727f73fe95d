"""The traced graph of a model with all that one pass over it tells; what a walk and the fusion of layers start from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from flysurgery.errors import WalkError
from flysurgery.walker.dataflow import Dataflow
from flysurgery.walker.example import Example, example_input, positional
from flysurgery.walker.linears import Call, find_calls
from flysurgery.walker.owners import Owners, set_switches
from flysurgery.walker.roles import verdicts
from flysurgery.walker.target import ROLES, Role, Switch
from flysurgery.walker.trace import Trace, device_of, first_tensor, on_device, shadow, trace


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
    first = first_tensor(inputs)
    if first is not None and first.ndim == 2 and first.is_floating_point() and all(call.rows <= len(first) for call in calls):
        traced = replace(traced, batch=None)  # rows are tokens of one sample, for all that shows
    dataflow = Dataflow(traced, calls)
    return Survey(double, inputs, traced, owners, calls, verdicts(traced, calls, dataflow), dataflow, switches)
