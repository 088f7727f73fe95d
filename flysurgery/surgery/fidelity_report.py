"""What a report says of the fidelity and of the reconstruction: rows of a table, and sentences."""

from __future__ import annotations

import math
from typing import Any

from flysurgery.fidelity import ENOUGH, Fidelity, Reconstruction

UNKNOWN = "its fidelity is unknown: no data were given; --calibrate DATA measures it (calibrate=DATA in Python)"

TOP_CLASS = "same top class"

FIDELITY = ("fidelity", "before", "after", "change")


def measures(found: Fidelity) -> list[tuple[str, str]]:
    """What was compared, and what came of it."""
    return [(what, _shown(what, value)) for what, (_, value) in _values(found).items() if value is not None]


def fidelity_rows(found: Fidelity, reconstruction: Reconstruction | None = None) -> list[tuple[str, str, str, str]]:
    """What was compared, before, after, and the change: before is the dense model, or the projection where there is a reconstruction."""
    start = None if reconstruction is None else _values(reconstruction.before)
    rows = []
    for what, (dense, after) in _values(found).items():
        before = dense if start is None else start[what][1]
        if before is not None and after is not None:
            change = f"{100 * (after - before):+.2f} points" if what == TOP_CLASS else f"{after - before:+.3f}"
            rows.append((what, _shown(what, before), _shown(what, after), change))
    first = f"{rows[0][0]}, {found.samples} held-out samples" + ("" if start is None else ", projected and reconstructed")
    return [(first, *rows[0][1:]), *rows[1:]]


def block_errors(found: Fidelity) -> str | None:
    """One line with the error after each block, None where no blocks were compared."""
    return f"error after each block: {' '.join(f'{error:.3f}' for _, error in found.blocks)}" if found.blocks else None


def reconstruction_sentence(done: Reconstruction) -> str:
    """What a reconstruction did, and what it cost."""
    kept = f"the state after update {done.kept} was kept" if done.kept else "no update was better, so the start was kept"
    return (
        f"reconstructed in {done.updates} updates of {done.batch} views each in {done.seconds:.0f} s, and {kept}: "
        f"relative error from {done.before.relative_error:.3f} to {done.after.relative_error:.3f}"
    )


def verdict(found: Fidelity | None, *, calibrated: bool, reconstructed: bool) -> str | None:
    """What the user is to know of the fidelity: that it is unknown, or too low and what raises it. None where it is enough."""
    if found is None:
        return None if calibrated else UNKNOWN
    cosines = {"output": found.output_cosine} | ({} if found.token_cosine is None else {"token": found.token_cosine})
    if not all(map(math.isfinite, (*cosines.values(), found.relative_error))):
        return "its fidelity is no number: one of the two models gives outputs that are not finite"
    if found.is_enough:
        return None
    name, lowest = min(cosines.items(), key=lambda each: each[1])
    unused = [] if calibrated else ["--calibrate"]
    unused.append("--reconstruct with more --minutes" if reconstructed else "--reconstruct")
    return f"its {name} cosine of {lowest:.3f} is below {ENOUGH:g}, so the model needs {', '.join(unused)} or finetune"


def finite(value: Any) -> Any:
    """The value with tuples as lists, and None for what is no finite number, which JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _values(found: Fidelity) -> dict[str, tuple[float, float | None]]:
    """By name: the dense model's value, and the one that was found."""
    return {
        "output cosine": (1.0, found.output_cosine),
        "token cosine": (1.0, found.token_cosine),
        "relative error": (0.0, found.relative_error),
        TOP_CLASS: (1.0, found.agreement),
    }


def _shown(what: str, value: float) -> str:
    return f"{value:.2%}" if what == TOP_CLASS else f"{value:.3f}"
