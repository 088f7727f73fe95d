"""Compares a whole model with and without its fused modules, and takes back groups that make it slower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flysurgery.inference import clock
from flysurgery.inference.candidate import Candidate
from flysurgery.inference.replacement import Replacement
from flysurgery.inference.restoring import Fused
from flysurgery.inference.standin import view
from flysurgery.surgery import Reason

MOST_COPIES = 64
"""The most inputs of one sample. A model's weights fill the cache anyway, and capturing hundreds of forwards takes long."""

Times = tuple[float, float]
"""Milliseconds of one forward, with the model's own modules and with the fused ones."""


def not_slower(model: nn.Module, replacements: Sequence[Replacement], example: tuple[Any, ...]) -> tuple[Fused, Times | None]:
    """The fused modules with which ``model`` is not slower than without, and both times.

    While the model is slower, the kind of group that gained the least is left as it was. The times are None where nothing was measured:
    if no group is fused, on the meta device, and if the example contains anything other than tensors.
    """
    while any(fused := _fused(replacements)):
        times = _times(model, fused, example)
        if times is None or times[1] <= times[0]:
            return fused, times
        _leave_least(replacements, times)
    return Fused({}, {}), None


def _fused(replacements: Sequence[Replacement]) -> Fused:
    fused = Fused({}, {})
    for replacement in replacements:
        if any(candidate.reason is None for candidate in replacement.candidates):
            fused.modules.update(replacement.put(fused.modules))
            fused.methods.update(replacement.methods(fused.modules))
    return fused


def _times(model: nn.Module, fused: Fused, example: tuple[Any, ...]) -> Times | None:
    if not all(isinstance(each, Tensor) and not each.is_meta for each in example):
        return None
    with torch.no_grad():
        plain_ms, fused_ms = clock.medians_ms((model, view(model, *fused)), example, most_copies=MOST_COPIES)
    return plain_ms, fused_ms


def _leave_least(replacements: Sequence[Replacement], times: Times) -> None:
    fused = [candidate for replacement in replacements for candidate in replacement.candidates if candidate.reason is None]
    least = _kind(min(fused, key=_gain))
    text = f"with it fused the whole model takes {times[1]:.3g} ms here, without fused modules {times[0]:.3g} ms"
    for candidate in fused:
        if _kind(candidate) == least:
            candidate.reason = Reason("slower-model", text)
            candidate.step.enabled = False


def _gain(candidate: Candidate) -> float:
    assert candidate.plain_ms is not None and candidate.fused_ms is not None  # on a device every fused group has been measured
    return candidate.plain_ms - candidate.fused_ms


def _kind(candidate: Candidate) -> object:
    return (candidate.group, candidate.plain_ms, candidate.fused_ms)
