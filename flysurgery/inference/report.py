"""What ``optimize`` did, group by group; ``print(report)`` is a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from flysurgery.inference.standin import restore
from flysurgery.surgery import Reason, grouped, text_table

HEADER = ("group", "n", "kind", "status", "own modules ms", "fused ms", "why not, or the launches")


@dataclass(frozen=True)
class OptimizeRow:
    """One group, by the name of its last linear or convolution, of the attention module, or of the norm. Patches with the method behind
    them have the name of the patch embedding.

    ``group`` is "qkv", "attention", "attn_out", "ffn", "norm" or "patches"; ``status`` "fused" or "left". The milliseconds are those
    of one call, None where nothing was measured. ``launches`` says what the launches of the fused group compute; it is empty where that
    is not known.
    """

    fqn: str
    group: str
    status: str
    reason: Reason | None
    plain_ms: float | None
    fused_ms: float | None
    launches: tuple[str, ...] = ()


@dataclass(frozen=True)
class OptimizeReport:
    """All groups that were found. ``device`` and ``dtype`` are those of the measurement.

    ``whole_ms`` are the milliseconds of one forward, with the model's own modules and with the fused ones; None where it was not timed.
    """

    rows: tuple[OptimizeRow, ...]
    device: str
    dtype: str
    seconds: float
    model: nn.Module = field(repr=False, compare=False)
    whole_ms: tuple[float, float] | None = None

    @property
    def fused(self) -> tuple[OptimizeRow, ...]:
        """The rows of the fused groups."""
        return tuple(row for row in self.rows if row.status == "fused")

    def restore(self) -> int:
        """Put the model's own modules back; gives the number of modules."""
        return restore(self.model)

    def to_json(self) -> dict[str, Any]:
        """The rows as JSON values, with the device and dtype of the measurement."""
        head = {"device": self.device, "dtype": self.dtype, "seconds": self.seconds, "whole_ms": self.whole_ms}
        return head | {"rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        head = f"fused {len(self.fused)} of {len(self.rows)} groups for {self.device} in {self.dtype}, in {self.seconds:.1f} s"
        if self.whole_ms is not None:
            head += f"; one forward took {self.whole_ms[0]:.3g} ms before and takes {self.whole_ms[1]:.3g} ms now"
        groups = grouped(self.rows, lambda row: row.fqn, lambda row: (row.group, row.status, row.reason, row.launches))
        lines = [_line(name, members) for name, members in groups]
        return "\n\n".join([head, text_table(HEADER, lines, right=("n", "own modules ms", "fused ms"))] if lines else [head])


def _line(name: str, rows: Sequence[OptimizeRow]) -> tuple[str, ...]:
    first = rows[0]
    times = ["" if value is None else f"{value:.3g}" for value in (first.plain_ms, first.fused_ms)]
    why = " | ".join(first.launches) if first.reason is None else f"{first.reason.code}: {first.reason.text}"
    return (name, str(len(rows)), first.group, first.status, *times, why)
