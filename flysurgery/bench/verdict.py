"""From the rows of a model to an answer: which layers should stay dense, and the table that ``convert --latency`` reads."""

from __future__ import annotations

from collections.abc import Sequence

from flysurgery.bench.model import DENSE, OPTIMIZED, PLANNED, WHERE_FASTER, WHOLE, Group
from flysurgery.bench.rows import Record

LatencyRow = dict[str, str | float]


def ratio_of(records: Sequence[Record], layer: str, candidate: str) -> float | None:
    """Time over dense of one candidate for one kind of layer; None where it has no time."""
    for record in records:
        if record["layer"] == layer and record["candidate"] == candidate and record["ratio_to_dense"]:
            return float(record["ratio_to_dense"])
    return None


def slower_layers(records: Sequence[Record], groups: Sequence[Group]) -> dict[str, str]:
    """The layers, by name, that are slower converted than dense or could not be timed, each with the reason."""
    found: dict[str, str] = {}
    for group in groups:
        ratio = ratio_of(records, group.name, PLANNED)
        if ratio is None or ratio >= 1:
            reason = "converted it could not be timed" if ratio is None else f"converted it takes {ratio:.2f} of the dense time"
            found |= dict.fromkeys(group.fqns, reason)
    return found


def latency_table(records: Sequence[Record], groups: Sequence[Group]) -> list[LatencyRow]:
    """One row for each layer and architecture: milliseconds of the layer in one forward, all its calls and parts together."""
    rows: list[LatencyRow] = []
    for group in groups:
        planned = _own_architecture(group)
        times: dict[str, float] = {}
        for record in records:
            if record["layer"] != group.name or not record["median_ms"]:
                continue
            name = planned if record["candidate"] == PLANNED else record["candidate"]
            if name is not None and (name == DENSE or name.startswith("(")):
                times.setdefault(name, float(record["median_ms"]) * group.layer.calls)
        rows += [{"fqn": fqn, "architecture": name, "ms": ms} for fqn in group.fqns for name, ms in times.items()]
    return rows


def _own_architecture(group: Group) -> str | None:
    """The planned architecture, where every part has the same."""
    found = {str(part.architecture) for part in group.layer.parts}
    return found.pop() if len(found) == 1 else None


def sentence(records: Sequence[Record], groups: Sequence[Group]) -> str:
    """The answer in words: of the optimized model where it was timed, beside optimized dense, which needs no conversion."""
    noisy = any(record["layer"] == WHOLE and record["status"].startswith("noisy") for record in records)
    start = "this machine is too noisy to say; by these numbers " if noisy else ""
    whole, fused, fused_dense = (ratio_of(records, WHOLE, name) for name in (PLANNED, PLANNED + OPTIMIZED, DENSE + OPTIMIZED))
    if fused is not None and fused_dense is not None:
        kind, verdict = OPTIMIZED, _verdict(fused < min(1, fused_dense))
        times = f"converted and optimized the model takes {fused:.2f} of the dense time, optimized without conversion {fused_dense:.2f}"
    elif whole is not None:
        kind, verdict, times = "", _verdict(whole < 1), f"the converted model takes {whole:.2f} of the dense time"
    else:
        return "the whole model could not be timed converted; its row says why"
    words = f"{start}conversion is {verdict}: {times}"
    slower = [group.name for group in groups if (ratio := ratio_of(records, group.name, PLANNED)) is None or ratio >= 1]
    shaky = {record["layer"] for record in records if record["status"].startswith("noisy")}
    alone = "by itself " if kind else ""
    if not slower:
        return f"{words}; every replaced layer is {alone}faster than dense"
    if len(slower) == len(groups):
        return f"{words}; every replaced layer is {alone}faster dense"
    partly = ratio_of(records, WHOLE, WHERE_FASTER + kind)
    rest = "" if partly is None else f", and without converting them the model takes {partly:.2f}"
    named = ", ".join(name + (" (noisy)" if name in shaky else "") for name in slower)
    return f"{words}; {alone}faster dense: {named}{rest}"


def _verdict(faster: bool) -> str:
    return "worth it here" if faster else "not worth it here"
