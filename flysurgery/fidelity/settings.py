"""What a reconstruction is made of, apart from its models and its samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flysurgery.errors import OptionError

MINUTES = {"cuda": 1.0, "cpu": 20.0}
"""The budget where none is given, by the kind of device."""

VIEWS = {"cuda": 64, "cpu": 8}
"""Views of an update, by the kind of device: a CPU makes few updates, and few views make more of them."""


@dataclass(frozen=True)
class Settings:
    """The choices of one reconstruction, as they were found best on real weights; ``recipes/real_weights.py`` has the rows.

    ``batch`` counts the views of one update. ``reach`` is the share of the gradient that passes from a block to the one before it, see
    ``Pull``. ``rate`` is the highest learning rate, as a share of a parameter's size, for a start with a relative error of 1; it falls
    with that error, since a good start has more to lose. ``warm_up`` is a share of the updates, ``mixed`` that of views that are two in
    one. Held-out samples judge ``looks`` times.

    Raises:
        OptionError: a budget that is no positive number.
    """

    minutes: float
    batch: int = VIEWS["cuda"]
    reach: float = 0.5
    rate: float = 7e-3
    warm_up: float = 0.05
    mixed: float = 0.25
    looks: int = 8
    seed: int = 0

    @classmethod
    def on(cls, device: torch.device, minutes: float | None = None, seed: int = 0) -> Settings:
        """Those for a device, with its default where no minutes are given."""
        kind = device.type if device.type in MINUTES else "cpu"
        return cls(MINUTES[kind] if minutes is None else minutes, VIEWS[kind], seed=seed)

    def __post_init__(self) -> None:
        if not 0 < self.minutes < float("inf"):
            raise OptionError(f"minutes must be a positive number, got {self.minutes:g}")
