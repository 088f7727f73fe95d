"""What a training run is made of, apart from its model and its data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from flysurgery.errors import OptionError

FREE = frozenset({"learning_rate", "save_every", "log_every", "workers", "tensorboard"})
"""Settings that may change when a run is taken up again; with the others it would be another run."""

SHARES = ("warm_up", "smoothing", "flip", "erase", "logits_weight")


@dataclass(frozen=True)
class Settings:
    """The choices of one run; the command line has an option for each.

    ``batch_size`` counts the images of one forward of one process; an update takes ``accumulation`` of these from each
    process. ``warm_up`` is a share of all updates. ``factor_rate`` "fan-in" multiplies the learning rate of a factor of pattern
    (a, b, c, d) by in_features / c, the ratio of the fan-ins of the dense layer and the factor; "same" does not. ``crop`` is the least
    share of an image's area that a random crop keeps (None: what suits the data), ``augment`` one of timm's policies by
    name, such as "rand-m9-mstd0.5-inc1". ``logits_weight`` is the teacher's share in the loss of the scores,
    ``blocks_weight`` the weight of the blocks' outputs (None: 1 where the teacher has the same blocks, else 0).
    ``densify_after`` epochs the factors are multiplied out, and training goes on dense. ``images_per_epoch`` goes with
    generated images. ``precision`` None leaves the choice to accelerate's configuration.

    Raises:
        OptionError: a value out of its range.
    """

    epochs: int = 10
    batch_size: int = 64
    accumulation: int = 1
    learning_rate: float = 3e-4
    factor_rate: Literal["fan-in", "same"] = "fan-in"
    optimizer: str = "adamw"
    weight_decay: float = 0.05
    warm_up: float = 0.1
    clip: float = 1.0
    smoothing: float = 0.1
    mixup: float = 0.0
    cutmix: float = 0.0
    crop: float | None = None
    flip: float | None = None
    augment: str | None = None
    erase: float = 0.0
    logits_weight: float = 0.5
    blocks_weight: float | None = None
    temperature: float = 2.0
    densify_after: int | None = None
    images_per_epoch: int | None = None
    precision: Literal["no", "fp16", "bf16"] | None = None
    workers: int | None = None
    seed: int = 0
    save_every: int | None = None
    log_every: int = 10
    tensorboard: bool = False
    cpu: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulation", "log_every"):
            _check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("save_every", "images_per_epoch"):
            value = getattr(self, name)
            _check(value is None or value >= 1, name, "at least 1", value)
        for name in ("learning_rate", "temperature"):
            _check(0 < getattr(self, name) < float("inf"), name, "a positive number", getattr(self, name))
        for name in ("weight_decay", "mixup", "cutmix", "clip"):
            _check(0 <= getattr(self, name) < float("inf"), name, "zero or a positive number", getattr(self, name))
        for name in SHARES:
            value = getattr(self, name)
            _check(value is None or 0 <= value <= 1, name, "between 0 and 1", value)
        _check(self.crop is None or 0 < self.crop <= 1, "crop", "above 0 and at most 1", self.crop)
        _check(
            self.blocks_weight is None or 0 <= self.blocks_weight < float("inf"), "blocks_weight", "zero or positive", self.blocks_weight
        )
        after = self.densify_after
        until = f"from 1 to {self.epochs - 1}, with {self.epochs} epochs" if self.epochs > 1 else "left out where there is one epoch"
        _check(after is None or 0 < after < self.epochs, "densify_after", until, after)
        if self.mixes and self.batch_size % 2:
            raise OptionError(f"mixup and cutmix mix images two by two, so batch_size must be even, got {self.batch_size}")

    @property
    def mixes(self) -> bool:
        """Whether images are mixed, and classes with them."""
        return self.mixup > 0 or self.cutmix > 0

    @property
    def fixed(self) -> dict[str, Any]:
        """The settings that a run keeps when it is taken up again."""
        return {name: value for name, value in asdict(self).items() if name not in FREE}


def _check(fine: bool, name: str, expected: str, value: object) -> None:
    if not fine:
        raise OptionError(f"{name} must be {expected}, got {value}")
