"""What a model card says of how close the model is to the dense one: lines on its layers, its outputs, and what brought them closer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNKNOWN = "- Its fidelity is unknown, since it was not measured: `flysurgery evaluate DIR --against MODEL --data FOLDER` does\n"


def closeness(report: Mapping[str, Any]) -> str:
    """Lines on the errors of the layers and the fidelity of the whole model."""
    run = report.get("finetune") or {}
    fidelity, done = report.get("fidelity"), report.get("reconstruction")
    lines = _layers(report, reconstructed=done is not None, trained=bool(run))
    if fidelity is not None:
        data = (report.get("calibration") or {}).get("data")
        where = f"held-out samples of {data}" if data else "held-out samples"
        when = ", before any fine-tuning" if run else ""
        lines += f"- Fidelity to the dense model on {fidelity['samples']} {where}{when}: {shown(fidelity)}\n"
        if fidelity["blocks"]:
            errors = " ".join(_number(error) for _, error in fidelity["blocks"])
            lines += f"- Relative error after each block, in sequence{when}: {errors}\n"
    if done is not None:
        before, after = (_number(done[name]["relative_error"]) for name in ("before", "after"))
        lines += (
            f"- Reconstructed block by block in {done['updates']:,} updates of {done['batch']} views each, {done['seconds']:.0f} s; "
            f"update {done['kept']:,} was kept: relative error {before} before, {after} after\n"
        )
    known = run.get("fidelity_after") is not None if run else fidelity is not None
    return lines if known or run.get("scratch") else lines + UNKNOWN


def shown(fidelity: Mapping[str, Any]) -> str:
    """The numbers of a fidelity, in one line."""
    parts = [f"output cosine {_number(fidelity['output_cosine'])}"]
    if fidelity.get("token_cosine") is not None:
        parts.append(f"token cosine {_number(fidelity['token_cosine'])}")
    parts.append(f"relative error {_number(fidelity['relative_error'])}")
    if fidelity.get("agreement") is not None:
        parts.append(f"same top class {fidelity['agreement']:.2%}")
    return ", ".join(parts)


def _layers(report: Mapping[str, Any], *, reconstructed: bool, trained: bool) -> str:
    """The errors of the layers' outputs where they were measured; only without them those of the weights, which calibration raises."""
    when = ", before the reconstruction" if reconstructed else ", before any fine-tuning" if trained else ""
    calibrated = [(row["calibration"]["output_error"], row["fqn"]) for row in report["rows"] if row.get("calibration")]
    if calibrated:
        return _errors("the layers' outputs on held-out samples", when, calibrated)
    projected = [(row["relative_error"], row["fqn"]) for row in report["rows"] if row.get("relative_error") is not None]
    if not projected:
        return ""
    return _errors("the projected weights, `norm(W - W') / norm(W)`", when, projected)


def _errors(what: str, when: str, errors: list[tuple[float, str]]) -> str:
    (least, best), (most, worst) = min(errors), max(errors)
    mean = sum(error for error, _ in errors) / len(errors)
    numbers = f"mean {mean:.3f}, least {least:.3f} (`{best}`), most {most:.3f} (`{worst}`)"
    return f"- Relative error of {what}{when}: {numbers}; all are in `report.json`\n"


def _number(value: float | None) -> str:
    return "no number" if value is None else f"{value:.3f}"
