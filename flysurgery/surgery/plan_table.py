"""The text that ``print(plan)`` shows."""

from __future__ import annotations

from collections.abc import Sequence

from flysurgery.surgery.layer_plan import LayerPlan, Reason
from flysurgery.surgery.table import grouped, share, short_count, text_table

REPLACED = ("replace", "layers", "role", "out x in", "weights", "after", "share", "family", "architecture")
KEPT = ("keep dense", "layers", "role", "out x in", "reason")


def plan_table(layers: Sequence[LayerPlan], base: str | None) -> str:
    """One line for each group of layers that are alike: first those to replace, then those that stay and why."""
    replaced = [layer for layer in layers if layer.is_replaced]
    kept = [layer for layer in layers if not layer.is_replaced]
    before, after = sum(layer.weights_before for layer in replaced), sum(layer.weights_after for layer in replaced)
    flops = sum(layer.flops_before for layer in replaced), sum(layer.flops_after for layer in replaced)
    blocks = [
        f"plan for {base or 'a model without a name'}: {len(replaced)} of {len(layers)} linear layers to replace",
        _replaced_table(replaced),
        f"weights in them: {short_count(before)} -> {short_count(after)} ({share(after, before)}); "
        f"flops of one sample in them: {short_count(flops[0])} -> {short_count(flops[1])} ({share(flops[1], flops[0])})",
    ]
    if kept:
        blocks.append(kept_table([(layer.fqn, layer.role, layer.size, layer.reason) for layer in kept]))
    return "\n\n".join(blocks)


def _replaced_table(layers: Sequence[LayerPlan]) -> str:
    rows = []
    for name, members in grouped(layers, lambda each: each.fqn, lambda each: (each.role, each.size, each.architecture)):
        first, before, after = members[0], sum(each.weights_before for each in members), sum(each.weights_after for each in members)
        counts = short_count(before), short_count(after), share(after, before)
        rows.append((name, str(len(members)), first.role, first.size, *counts, first.family or "", first.architecture or ""))
    return text_table(REPLACED, rows, right=("layers", "weights", "after", "share"))


def kept_table(layers: Sequence[tuple[str, str, str, Reason | None]]) -> str:
    """One line for each group of layers that stay dense for the same reason; a layer is (fqn, role, size, reason)."""
    rows = []
    for name, members in grouped(layers, lambda each: each[0], lambda each: each[1:]):
        _, role, size, reason = members[0]
        rows.append((name, str(len(members)), role, size, f"{reason.code}: {reason.text}" if reason else ""))
    return text_table(KEPT, rows, right=("layers",))
