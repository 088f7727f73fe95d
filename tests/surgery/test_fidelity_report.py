"""What a report says of the fidelity: known, unknown, enough, too low, and no number."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import timm
import torch
from torch import nn

from flysurgery.fidelity import Fidelity, Reconstruction
from flysurgery.surgery import Report, convert, fidelity_rows, measures

GOOD = Fidelity(102, 0.971, 0.954, 0.25, None, (("blocks.0", 0.11), ("blocks.1", 0.222)))
POOR = Fidelity(102, 0.912, 0.688, 0.75, 0.5, ())
LATER = Reconstruction(POOR, GOOD, 3120, 2900, 64, 60.4, ((0, 0.75), (2900, 0.25)))


def model() -> nn.Module:
    torch.manual_seed(0)
    arguments = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 7}
    return timm.create_model("vit_tiny_patch16_224", **arguments).eval()


@pytest.fixture(scope="module")
def plain() -> Report:
    return convert(model())


@pytest.fixture(scope="module")
def calibrated() -> Report:
    return convert(model(), calibrate=torch.randn(12, 3, 16, 16, generator=torch.Generator().manual_seed(1)))


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


def test_a_conversion_without_data_says_that_its_fidelity_is_unknown(plain: Report) -> None:
    sentence = "its fidelity is unknown: no data were given; --calibrate DATA measures it (calibrate=DATA in Python)"
    assert plain.remarks == (sentence,) and sentence in str(plain)
    assert plain.to_json()["fidelity"] is None and plain.to_json()["reconstruction"] is None


def test_a_calibrated_conversion_measures_its_fidelity(calibrated: Report) -> None:
    found = calibrated.fidelity
    assert found is not None and found.samples == 2 and [name for name, _ in found.blocks] == ["blocks.0", "blocks.1"]
    document = json.loads(json.dumps(calibrated.to_json(), allow_nan=False))
    assert document["fidelity"]["output_cosine"] == found.output_cosine
    assert document["fidelity"]["blocks"] == [list(each) for each in found.blocks]
    text = str(calibrated)
    row = next(line for line in text.splitlines() if line.startswith("output cosine, 2 held-out samples"))
    assert row.split()[5:7] == ["1.000", f"{found.output_cosine:.3f}"]
    assert "error after each block: " + " ".join(f"{error:.3f}" for _, error in found.blocks) in text
    assert "unknown" not in text


def test_a_low_cosine_names_what_was_not_used_yet(plain: Report, calibrated: Report) -> None:
    low = "its token cosine of 0.688 is below 0.9, so the model needs "
    assert replace(plain, fidelity=POOR).remarks == (f"{low}--calibrate, --reconstruct or finetune",)
    assert replace(calibrated, fidelity=POOR).remarks == (f"{low}--reconstruct or finetune",)
    kept = replace(LATER, after=POOR, kept=0)
    remarks = replace(calibrated, fidelity=POOR, reconstruction=kept).remarks
    assert remarks[-1] == f"{low}--reconstruct with more --minutes or finetune"
    assert "no update was better, so the start was kept: relative error from 0.750 to 0.750" in remarks[0]


def test_a_reconstruction_says_what_it_did_and_cost(calibrated: Report) -> None:
    report = replace(calibrated, fidelity=GOOD, reconstruction=LATER)
    assert report.remarks == (
        "error after each block: 0.110 0.222",
        "reconstructed in 3120 updates of 64 views each in 60 s, and the state after update 2900 was kept: "
        "relative error from 0.750 to 0.250",
    )
    assert all(remark in str(report) for remark in report.remarks)
    assert json.loads(json.dumps(report.to_json()))["reconstruction"]["before"]["token_cosine"] == 0.688


def test_numbers_that_are_not_finite_have_a_sentence_and_are_null_in_json(calibrated: Report) -> None:
    broken = replace(calibrated, fidelity=replace(GOOD, output_cosine=math.nan, relative_error=math.inf))
    assert broken.remarks[-1] == "its fidelity is no number: one of the two models gives outputs that are not finite"
    document = json.loads(json.dumps(broken.to_json(), allow_nan=False))
    assert document["fidelity"]["output_cosine"] is None and document["fidelity"]["relative_error"] is None
    assert document["fidelity"]["token_cosine"] == GOOD.token_cosine
