"""The accuracy of a model before and after a change to it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flysurgery.evaluation.evaluate import Accuracy


@dataclass(frozen=True)
class Comparison:
    """Two measurements on the same ``data``, its name or folder."""

    data: str
    before: Accuracy
    after: Accuracy

    def to_json(self) -> dict[str, Any]:
        """The measurements as JSON values."""
        return asdict(self)
