"""What a training run came to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from flysurgery.evaluation import Accuracy


@dataclass(frozen=True)
class Outcome:
    """The trained model, with numbers of the whole run, pauses between its parts left out.

    ``before`` and ``after`` are None without held-out data; ``loss`` is the last one logged; ``images_per_second`` counts the
    training alone. On all processes but the main one ``is_main`` is false and the model must not be saved.
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
    is_main: bool

    def to_json(self) -> dict[str, Any]:
        """The numbers as JSON values."""
        numbers = ("updates", "images", "seconds", "images_per_second", "processes", "loss")
        measured = {name: None if value is None else asdict(value) for name, value in (("before", self.before), ("after", self.after))}
        return {name: getattr(self, name) for name in numbers} | measured
