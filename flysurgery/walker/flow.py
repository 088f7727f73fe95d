"""Where a value comes from, and what it met on the way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch.fx import Node


class Via(NamedTuple):
    """What a value met since its origin: a nonlinearity or gate; a sum or mean over entries."""

    nonlinear: bool = False
    reduced: bool = False


# An origin is a node: a linear, the output of attention, a sum of branches (a residual stream), an input, an operator not understood.
Flow = dict[Node, Via]


def joined(flows: Iterable[Flow]) -> Flow:
    """All origins of all flows; on several ways to one origin, a nonlinearity on any of them counts, a sum only if it is on all."""
    result: Flow = {}
    for flow in flows:
        for origin, via in flow.items():
            met = result.get(origin, via)
            result[origin] = Via(met.nonlinear or via.nonlinear, met.reduced and via.reduced)
    return result


def without_statistics(flows: list[Flow]) -> list[Flow]:
    """Drop the operands that are means or norms, as in normalization, unless all are."""
    return [flow for flow in flows if not all(via.reduced for via in flow.values())] or flows
