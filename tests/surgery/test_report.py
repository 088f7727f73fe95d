"""What a report says of the fidelity: known, unknown, enough, too low, and no number."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from flysurgery.fidelity import Fidelity, Reconstruction
from flysurgery.surgery import Report, fidelity_rows, measures
from flysurgery.surgery.report import ReportCalibration

GOOD = Fidelity(102, 0.971, 0.954, 0.25, None, (("blocks.0", 0.11), ("blocks.1", 0.222)))
POOR = Fidelity(102, 0.912, 0.688, 0.75, 0.5, ())
LATER = Reconstruction(POOR, GOOD, 3120, 2900, 64, 60.4, ((0, 0.75), (2900, 0.25)))
PLAIN = Report((), 10, 5, 1.0, verified=True)
CALIBRATED = replace(PLAIN, calibration=ReportCalibration("data", 512, 102, sequential=False, seconds=1.0))


def test_before_is_the_dense_model_or_the_projection() -> None:
    assert fidelity_rows(POOR) == [
        ("output cosine, 102 held-out samples", "1.000", "0.912", "-0.088"),
        ("token cosine", "1.000", "0.688", "-0.312"),
        ("relative error", "0.000", "0.750", "+0.750"),
        ("same top class", "100.00%", "50.00%", "-50.00 points"),
    ]
    assert fidelity_rows(GOOD, LATER) == [
        ("output cosine, 102 held-out samples, projected and reconstructed", "0.912", "0.971", "+0.059"),
        ("token cosine", "0.688", "0.954", "+0.266"),
        ("relative error", "0.750", "0.250", "-0.500"),
    ]
    assert measures(replace(GOOD, token_cosine=None)) == [("output cosine", "0.971"), ("relative error", "0.250")]


LOW = "its token cosine of 0.688 is below 0.9, so the model needs "
UNKNOWN = "its fidelity is unknown: no data were given; --calibrate DATA measures it (calibrate=DATA in Python)"
DONE = "reconstructed in 3120 updates of 64 views each in 60 s, and "
BLOCKS = "error after each block: 0.110 0.222"


@pytest.mark.parametrize(
    ("report", "remarks"),
    [
        (PLAIN, [UNKNOWN]),
        (replace(PLAIN, fidelity=POOR), [f"{LOW}--calibrate, --reconstruct or finetune"]),
        (replace(CALIBRATED, fidelity=POOR), [f"{LOW}--reconstruct or finetune"]),
        (
            replace(CALIBRATED, fidelity=POOR, reconstruction=replace(LATER, after=POOR, kept=0)),
            [
                f"{DONE}no update was better, so the start was kept: relative error from 0.750 to 0.750",
                f"{LOW}--reconstruct with more --minutes or finetune",
            ],
        ),
        (
            replace(CALIBRATED, fidelity=GOOD, reconstruction=LATER),
            [BLOCKS, f"{DONE}the state after update 2900 was kept: relative error from 0.750 to 0.250"],
        ),
        (
            replace(CALIBRATED, fidelity=replace(GOOD, output_cosine=math.nan, relative_error=math.inf)),
            [BLOCKS, "its fidelity is no number: one of the two models gives outputs that are not finite"],
        ),
    ],
)
def test_remarks_say_what_is_known_and_what_the_model_needs(report: Report, remarks: list[str]) -> None:
    assert list(report.remarks) == remarks
    assert all(remark in str(report) for remark in remarks)
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert (document["fidelity"] is None) == (report.fidelity is None)
    if report.fidelity is not None:
        cosine = report.fidelity.output_cosine
        assert document["fidelity"]["output_cosine"] == (cosine if math.isfinite(cosine) else None)
        assert document["fidelity"]["blocks"] == [list(each) for each in report.fidelity.blocks]
