"""What surgery did, layer by layer; ``print(report)`` is a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flysurgery.fidelity import Fidelity, Reconstruction
from flysurgery.surgery.calibration_report import ReportCalibration, RowCalibration, calibrated_table
from flysurgery.surgery.fidelity_report import FIDELITY, block_errors, fidelity_rows, finite, reconstruction_sentence, verdict
from flysurgery.surgery.layer_plan import LayerPlan, Reason
from flysurgery.surgery.measured_choices import Measurement
from flysurgery.surgery.permutation_report import Permutation, permutation_tables
from flysurgery.surgery.plan_table import kept_table
from flysurgery.surgery.table import grouped, share, short_count, text_table
from flysurgery.surgery.tradeoff import Tradeoff

REPLACED = (
    "replaced",
    "layers",
    "role",
    "out x in",
    "params",
    "after",
    "share",
    "relative error",
    "energy kept",
    "seconds",
    "family",
    "architecture",
)


@dataclass(frozen=True)
class PartRow:
    """One part of a replaced layer. ``relative_error`` is ``norm(W - W') / norm(W)``, ``energy_kept`` its square under 1."""

    name: str | None
    architecture: str
    relative_error: float
    energy_kept: float


@dataclass(frozen=True)
class Row:
    """One linear layer of the model. Parameters with the bias; flops of one forward of one sample, without the bias.

    ``relative_error`` and ``energy_kept`` are those of the whole matrix, ``seconds`` what its projection took; all
    three are None where the layer stays dense. ``reason`` says why it does. ``calibration`` is None where there was none.
    """

    fqn: str
    role: str
    status: str
    reason: Reason | None
    size: str
    family: str | None
    architecture: str | None
    params_before: int
    params_after: int
    flops_before: int
    flops_after: int
    relative_error: float | None
    energy_kept: float | None
    seconds: float | None
    parts: tuple[PartRow, ...] = ()
    calibration: RowCalibration | None = None


@dataclass(frozen=True)
class Report:
    """All rows in the model's order, the whole model's parameters, and the seconds of the whole operation.

    ``verified`` says whether a forward showed that every replaced module runs. ``fidelity`` is that of the model at the end, on samples
    held out; None where no data were given.
    """

    rows: tuple[Row, ...]
    model_params_before: int
    model_params_after: int
    seconds: float
    verified: bool
    calibration: ReportCalibration | None = None
    permutations: tuple[Permutation, ...] = ()
    tradeoff: Tradeoff | None = None
    measurement: Measurement | None = None
    fidelity: Fidelity | None = None
    reconstruction: Reconstruction | None = None

    @property
    def replaced(self) -> tuple[Row, ...]:
        """The rows of the replaced layers."""
        return tuple(row for row in self.rows if row.status == "replace")

    @property
    def totals(self) -> dict[str, Any]:
        """Sums over the replaced layers and the linear layers, and the whole model's parameters."""
        return {
            "layers": len(self.rows),
            "replaced": len(self.replaced),
            "replaced_params_before": sum(row.params_before for row in self.replaced),
            "replaced_params_after": sum(row.params_after for row in self.replaced),
            "linear_flops_before": sum(row.flops_before for row in self.rows),
            "linear_flops_after": sum(row.flops_after for row in self.rows),
            "model_params_before": self.model_params_before,
            "model_params_after": self.model_params_after,
            "seconds": self.seconds,
        }

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences on the fidelity: the errors in sequence, the reconstruction, and what the model needs."""
        errors = None if self.fidelity is None else block_errors(self.fidelity)
        done = None if self.reconstruction is None else reconstruction_sentence(self.reconstruction)
        needs = verdict(self.fidelity, calibrated=self.calibration is not None, reconstructed=self.reconstruction is not None)
        return tuple(each for each in (errors, done, needs) if each is not None)

    def to_json(self) -> dict[str, Any]:
        """Rows and totals as JSON values."""
        rows = [asdict(row) | {"parts": [asdict(part) for part in row.parts]} for row in self.rows]
        calibration = None if self.calibration is None else asdict(self.calibration)
        permutations = [asdict(each) for each in self.permutations]
        tradeoff = None if self.tradeoff is None else self.tradeoff.to_json()
        measurement = None if self.measurement is None else self.measurement.to_json()
        chosen = {"permutations": permutations, "tradeoff": tradeoff, "measurement": measurement}
        fidelity = None if self.fidelity is None else finite(self.fidelity.to_json())
        reconstruction = None if self.reconstruction is None else finite(self.reconstruction.to_json())
        seen = {"calibration": calibration, "fidelity": fidelity, "reconstruction": reconstruction}
        return {"rows": rows, "totals": self.totals, "verified": self.verified, **seen, **chosen}

    def __str__(self) -> str:
        totals = self.totals
        pairs = (
            ("replaced layers' parameters", totals["replaced_params_before"], totals["replaced_params_after"]),
            ("model's parameters", self.model_params_before, self.model_params_after),
            ("linear layers' flops of one sample", totals["linear_flops_before"], totals["linear_flops_after"]),
        )
        sums = [f"{what}: {short_count(before)} -> {short_count(after)} ({share(after, before)})" for what, before, after in pairs]
        head = f"replaced {totals['replaced']} of {totals['layers']} linear layers in {self.seconds:.1f} s"
        head += ", and one forward called each" if self.verified else ", not verified by a forward"
        kept = [(row.fqn, row.role, row.size, row.reason) for row in self.rows if row.status == "keep"]
        blocks = [head, _replaced_table(self.replaced), "\n".join(sums)]
        if self.calibration is not None:
            blocks += [str(self.calibration), calibrated_table([(row.fqn, row.role, row.calibration) for row in self.rows])]
        if self.fidelity is not None:
            blocks.append(text_table(FIDELITY, fidelity_rows(self.fidelity, self.reconstruction), right=FIDELITY[1:]))
        blocks += self.remarks
        if self.permutations:
            blocks.append(permutation_tables(self.permutations))
        blocks += [str(each) for each in (self.tradeoff, self.measurement) if each is not None]
        return "\n\n".join([*blocks, *([kept_table(kept)] if kept else [])])


def row_of(
    layer: LayerPlan,
    parts: Sequence[PartRow],
    relative_error: float | None,
    seconds: float | None,
    calibration: RowCalibration | None = None,
) -> Row:
    """The row of a layer that was replaced, or kept (no parts, None and None)."""
    return Row(
        fqn=layer.fqn,
        role=layer.role,
        status=layer.status,
        reason=layer.reason,
        size=layer.size,
        family=layer.family,
        architecture=layer.architecture,
        params_before=layer.params_before,
        params_after=layer.params_after,
        flops_before=layer.flops_before,
        flops_after=layer.flops_after,
        relative_error=relative_error,
        energy_kept=None if relative_error is None else 1 - relative_error**2,
        seconds=seconds,
        parts=tuple(parts),
        calibration=calibration,
    )


def _replaced_table(rows: Sequence[Row]) -> str:
    lines = []
    for name, members in grouped(rows, lambda each: each.fqn, lambda each: (each.role, each.size, each.architecture)):
        before, after = sum(each.params_before for each in members), sum(each.params_after for each in members)
        errors = [each.relative_error for each in members if each.relative_error is not None]
        kept = [each.energy_kept for each in members if each.energy_kept is not None]
        lines.append(
            (
                name,
                str(len(members)),
                members[0].role,
                members[0].size,
                short_count(before),
                short_count(after),
                share(after, before),
                _span(errors),
                _span(kept),
                f"{sum(each.seconds or 0 for each in members):.2f}",
                members[0].family or "",
                members[0].architecture or "",
            )
        )
    return text_table(REPLACED, lines, right=("layers", *REPLACED[4:10]))


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3f}", f"{max(values):.3f}"
    return low if low == high else f"{low} to {high}"
