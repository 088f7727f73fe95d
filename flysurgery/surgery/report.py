"""What surgery did, layer by layer; ``print(report)`` is a table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from flysurgery import tables
from flysurgery.errors import Reason
from flysurgery.fidelity import ENOUGH, Fidelity, Reconstruction
from flysurgery.surgery.choices import Measurement, Tradeoff
from flysurgery.surgery.plan import LayerPlan
from flysurgery.surgery.serial import as_json

TOP_CLASS = "same top class"

MEASURES = {
    "output cosine": ("output_cosine", 1.0),
    "token cosine": ("token_cosine", 1.0),
    "relative error": ("relative_error", 0.0),
    TOP_CLASS: ("agreement", 1.0),
}
"""By what each measure of a fidelity is called: its attribute, and the dense model's value."""

MOVED = ("in a new order", "role", "layers", "fit error before", "after")
STAYED = ("in their own order", "n", "what", "why")


@dataclass(frozen=True)
class RowCalibration:
    """What calibration did for one layer.

    Errors are relative ones of the layer's output, ``sqrt(E|y' - y|² / E|W x|²)``, on held-out samples; ``plain_output_error`` is that of
    the plain projection. ``note`` says why the factors are those of the plain projection, None where they are not.
    """

    output_error: float
    plain_output_error: float
    note: str | None


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


@dataclass(frozen=True)
class PermutedLayer:
    """A layer's relative errors ``sqrt(tr(D G Dᵀ) / tr(W G Wᵀ))`` in the old order and in the new one.

    G is the metric that it was fitted in; of several parts the root of the mean square.
    """

    fqn: str
    role: str
    before: float
    after: float


@dataclass(frozen=True)
class Permutation:
    """One attention's heads, or one block's hidden units (``what``), which the ``linears`` share.

    ``moved``: a new order was better than their own and was taken; it is in the weights, and the model computes the same but for the
    projection. ``layers`` are those for which the order counts, with the errors of the two orders. ``tied`` says why heads, entries of
    query and key, or entries of value keep their order.
    """

    what: str
    linears: tuple[str, ...]
    layers: tuple[PermutedLayer, ...] = ()
    moved: bool = False
    tied: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One linear layer of the model. Parameters with the bias; flops of one forward of one sample, without the bias.

    ``relative_error`` is ``norm(W - W') / norm(W)``, and ``seconds`` is what the projection took; both are None where the layer stays
    dense. ``reason`` says why it does. ``calibration`` is None where there was none.
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
    relative_error: float | None = None
    seconds: float | None = None
    calibration: RowCalibration | None = None

    @classmethod
    def of(cls, layer: LayerPlan, **found: Any) -> "Row":
        """The row of a layer, with the results of its projection; a layer that stays dense has none."""
        planned = [each.name for each in fields(cls) if each.default is MISSING]
        return cls(**{name: getattr(layer, name) for name in planned}, **found)


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
            "replaced_params_before": tables.total(self.replaced, "params_before"),
            "replaced_params_after": tables.total(self.replaced, "params_after"),
            "linear_flops_before": tables.total(self.rows, "flops_before"),
            "linear_flops_after": tables.total(self.rows, "flops_after"),
            "model_params_before": self.model_params_before,
            "model_params_after": self.model_params_after,
            "seconds": self.seconds,
        }

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences on the fidelity: the errors in sequence, the reconstruction, and what the model needs."""
        errors = None if self.fidelity is None else block_errors(self.fidelity)
        done = None if self.reconstruction is None else _reconstruction_sentence(self.reconstruction)
        needs = _verdict(self.fidelity, reconstructed=self.reconstruction is not None)
        return tuple(each for each in (errors, done, needs) if each is not None)

    def to_json(self) -> dict[str, Any]:
        """Rows and totals as JSON values."""
        seen = ("verified", "calibration", "fidelity", "reconstruction", "permutations", "tradeoff", "measurement")
        return as_json({"rows": self.rows, "totals": self.totals} | {name: getattr(self, name) for name in seen})

    def __str__(self) -> str:
        head = f"replaced {len(self.replaced)} of {len(self.rows)} linear layers in {self.seconds:.1f} s"
        head += ", and one forward called each" if self.verified else ", not verified by a forward"
        changes = [
            tables.count_row("parameters of the model", self.model_params_before, self.model_params_after),
            *tables.layer_totals(self.rows),
        ]
        if self.fidelity is not None:
            done = self.reconstruction
            changes += fidelity_rows(self.fidelity, done and done.before, ", projected and reconstructed" if done else "")
        noted = [row for row in self.replaced if row.calibration is not None and row.calibration.note is not None]
        return tables.blocks_of_text(
            head,
            tables.replaced_table("replaced", self.rows, RESULTS if self.calibration is None else OUTPUT_RESULTS),
            tables.kept_table(self.rows),
            tables.changes_table("total", changes),
            *self.remarks,
            self.calibration,
            tables.layer_table("as projected", noted, lambda row: (row.role, row.calibration.note), NOTE),
            _permutation_tables(self.permutations),
            self.tradeoff,
            self.measurement,
        )


RESULTS: tables.Columns = {"worst error": lambda rows: f"{max(row.relative_error for row in rows):.3f}"}
OUTPUT_RESULTS: tables.Columns = {
    "output error": lambda rows: f"{max(row.calibration.output_error for row in rows):.3f}",
    "plain error": lambda rows: f"{max(row.calibration.plain_output_error for row in rows):.3f}",
}
"""Those of calibrated layers: the error of their outputs, beside that of the plain projection."""
NOTE: tables.Columns = {"role": lambda rows: rows[0].role, "why": lambda rows: rows[0].calibration.note}


def _permutation_tables(permutations: Sequence[Permutation]) -> str:
    """The mean errors of each role before and after, and the features that kept their order, with the reasons."""
    by_role: dict[tuple[str, str], list[tuple[bool, PermutedLayer]]] = {}
    for each in permutations:
        for layer in each.layers:
            by_role.setdefault((each.what, layer.role), []).append((each.moved, layer))
    moved = []
    for (what, role), found in by_role.items():
        before, after = (sum(getattr(layer, name) for _, layer in found) / len(found) for name in ("before", "after"))
        moved.append((what, role, f"{sum(is_moved for is_moved, _ in found)} of {len(found)}", f"{before:.4f}", f"{after:.4f}"))
    tied = [(each.linears[0], what, why) for each in permutations for what, why in each.tied.items()]
    alike = tables.grouped(tied, lambda each: each[0], lambda each: each[1:])
    stayed = [(name, str(len(members)), *members[0][1:]) for name, members in alike]
    return tables.blocks_of_text(
        moved and tables.text_table(MOVED, moved, right=MOVED[2:]),
        stayed and tables.text_table(STAYED, stayed, right=("n",)),
    )


def measures(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The names and values of all measures that a fidelity has; it may be read from JSON, which has no NaN."""
    always = ("output_cosine", "relative_error")
    return [(what, _shown(what, found[name])) for what, (name, _) in MEASURES.items() if name in always or found.get(name) is not None]


def fidelity_rows(after: Fidelity, before: Fidelity | None = None, how: str = "") -> list[tuple[str, ...]]:
    """Rows for ``changes_table``. Before is the dense model where there is nothing else; ``how`` says what was done."""
    rows = []
    for what, (name, dense) in MEASURES.items():
        old, value = dense if before is None else getattr(before, name), getattr(after, name)
        if old is not None and value is not None:
            change = f"{100 * (value - old):+.2f} points" if what == TOP_CLASS else f"{value - old:+.3f}"
            rows.append((what, _shown(what, old), _shown(what, value), change))
    return [(f"{rows[0][0]}, {after.samples} held-out samples{how}", *rows[0][1:]), *rows[1:]]


def block_errors(found: Fidelity) -> str | None:
    """One line with the error after each block, None where no blocks were compared."""
    return f"error after each block: {' '.join(f'{error:.3f}' for _, error in found.blocks)}" if found.blocks else None


def _reconstruction_sentence(done: Reconstruction) -> str:
    kept = f"the state after update {done.kept} was kept" if done.kept else "no update was better, so the start was kept"
    return (
        f"reconstructed in {done.updates} updates of {done.batch} views each in {done.seconds:.0f} s, and {kept}: "
        f"relative error from {done.before.relative_error:.3f} to {done.after.relative_error:.3f}"
    )


def _verdict(found: Fidelity | None, *, reconstructed: bool) -> str | None:
    """Says that the fidelity is unknown, or too low and what raises it; None where it is high enough."""
    if found is None:
        return "its fidelity is unknown: no data were given; --calibrate DATA measures it (calibrate=DATA in Python)"
    cosines = {"output": found.output_cosine} | ({} if found.token_cosine is None else {"token": found.token_cosine})
    if not all(map(math.isfinite, (*cosines.values(), found.relative_error))):
        return "its fidelity is no number: one of the two models gives outputs that are not finite"
    if found.is_enough:
        return None
    name, lowest = min(cosines.items(), key=lambda each: each[1])
    more = "--reconstruct with more --minutes" if reconstructed else "--reconstruct"
    return f"its {name} cosine of {lowest:.3f} is below {ENOUGH:g}, so the model needs {more} or finetune"


def _shown(what: str, value: float | None) -> str:
    return "no number" if value is None else f"{value:.2%}" if what == TOP_CLASS else f"{value:.3f}"
