"""What a training run came to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from flysurgery.evaluation import Accuracy
from flysurgery.fidelity import Fidelity
from flysurgery.finetune.settings import Settings


@dataclass(frozen=True)
class Outcome:
    """The trained model, with numbers of the whole run, pauses between its parts left out.

    ``before`` and ``after`` are None without held-out data, or without classes; ``fidelity_before`` and ``fidelity_after`` without a
    teacher. ``kept`` is the update whose state the model has: the last, or without labels the one that was closest to the teacher on
    held-out images, 0 for the start. ``settings`` are complete, with the rate that was found. ``loss`` is the last one logged;
    ``images_per_second`` counts the training alone. On all processes but the main one ``is_main`` is false and the model must not be saved.
    """

    model: nn.Module
    updates: int
    images: int
    seconds: float
    images_per_second: float
    processes: int
    loss: float
    before: Accuracy | None
    after: Accuracy | None
    fidelity_before: Fidelity | None
    fidelity_after: Fidelity | None
    kept: int
    labelled: bool
    settings: Settings
    is_main: bool

    def to_json(self) -> dict[str, Any]:
        """The numbers as JSON values."""
        numbers = ("updates", "images", "seconds", "images_per_second", "processes", "loss", "kept", "labelled")
        measured = {name: None if value is None else asdict(value) for name, value in (("before", self.before), ("after", self.after))}
        close = {name: None if value is None else value.to_json() for name, value in self._fidelities()}
        return {name: getattr(self, name) for name in numbers} | measured | close

    def _fidelities(self) -> tuple[tuple[str, Fidelity | None], ...]:
        return ("fidelity_before", self.fidelity_before), ("fidelity_after", self.fidelity_after)
