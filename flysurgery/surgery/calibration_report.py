"""What calibration says of itself, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flysurgery.surgery.table import grouped, text_table

CALIBRATED = ("calibrated", "layers", "role", "output error", "of plain projection", "ratio", "fit error", "sweeps", "shrinkage", "note")


@dataclass(frozen=True)
class RowCalibration:
    """What calibration did for one layer.

    Errors are relative ones of the layer's output, ``sqrt(E|y' - y|² / E|W x|²)``. ``output_error`` and ``plain_output_error``, that of the
    plain projection, are measured on held-out samples; ``fit_error`` on those that the factors were fitted to. ``rows`` counts
    the rows of x that were fitted to, ``sweeps`` those of the part that took most, and ``shrinkage`` is the identity's share in their
    covariance. ``permuted`` says whether features of the layer are in a new order. ``note`` says why the factors are those of
    the plain projection, None where they are not.
    """

    output_error: float
    plain_output_error: float
    fit_error: float
    sweeps: int
    shrinkage: float
    rows: int
    permuted: bool = False
    note: str | None = None

    @property
    def ratio(self) -> float:
        """The output error as a share of the plain projection's; 1 where both are zero."""
        return self.output_error / self.plain_output_error if self.plain_output_error else 1.0


@dataclass(frozen=True)
class ReportCalibration:
    """What the layers were calibrated with. ``seconds`` were spent on forwards and sums; ``skipped`` could not be read."""

    data: str
    samples: int
    held_out: int
    sequential: bool
    seconds: float
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"calibrated with {self.samples} samples of {self.data}, of which {self.held_out} were held out to measure the output errors"
        if self.sequential:
            text += "; each block was given the inputs that the converted blocks before it make"
        return text + (f"; {len(self.skipped)} could not be read: {', '.join(self.skipped[:5])}" if self.skipped else "")


def calibrated_table(layers: Sequence[tuple[str, str, RowCalibration | None]]) -> str:
    """One line for each group of layers that are alike, with the worst of their errors; a layer is (fqn, role, what calibration did)."""
    known = [(fqn, role, found) for fqn, role, found in layers if found is not None]
    lines = []
    for name, members in grouped(known, lambda each: each[0], lambda each: (each[1], each[2].permuted, each[2].note)):
        _, role, first = members[0]
        worst = max((found for _, _, found in members), key=lambda found: found.output_error)
        numbers = (worst.output_error, worst.plain_output_error, worst.ratio, worst.fit_error)
        remark = first.note or ("features in a new order" if first.permuted else "")
        lines.append((name, str(len(members)), role, *(f"{n:.3f}" for n in numbers), str(worst.sweeps), f"{worst.shrinkage:.1e}", remark))
    return text_table(CALIBRATED, lines, right=("layers", *CALIBRATED[3:9]))
