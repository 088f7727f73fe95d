"""The settings of a training run, apart from its model and its data."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

from flysurgery.errors import OptionError, TrainingError, check_seed

MUON = "muon"
BATCH, EPOCHS, MINUTES = 64, 10, 10.0  # the defaults; minutes where there are no labels
FUSED_FROM_MINUTES, FUSED_FROM_IMAGES = 2.0, 250_000
"""The length from which a run uses fused modules. On an H200 they make 1.4 to 2.0 times the images a second, after a start of up to 42 s
more, which a converted ViT-S/16 wins back in 56 to 79 s and a ViT-B/16 in 136 (``recipes/results/finetune_h200.csv``)."""

OF_TIMM: dict[str, Any] = {"learning_rate": 3e-4, "factor_rate": "fan-in", "weight_decay": 0.05, "warm_up": 0.1, "clip": 1.0}
OF_MUON: dict[str, Any] = {"warm_up": 0.05, "clip": 0.0}
"""The defaults for an optimizer; the rate of Muon follows from the error at the start of the run."""

RANGES: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    (
        "epochs batch_size accumulation log_every save_every images_per_epoch",
        "a whole number of at least 1",
        lambda value: isinstance(value, int) and value >= 1,
    ),
    ("minutes learning_rate temperature", "a positive number", lambda value: 0 < value < math.inf),
    ("weight_decay mixup cutmix clip output_weight blocks_weight", "zero or a positive number", lambda value: 0 <= value < math.inf),
    ("warm_up smoothing flip erase", "between 0 and 1", lambda value: 0 <= value <= 1),
    ("crop", "above 0 and at most 1", lambda value: 0 < value <= 1),
)
"""Names of settings, the range of those that are given in words, and whether a value lies in it."""


@dataclass(frozen=True)
class Settings:
    """The choices of one run; the command line has an option for each. Values that are None are chosen at the start, see ``completed``.

    ``minutes`` is a budget in place of ``epochs``. ``batch_size`` counts the images of one forward of one process (None: 64, or as many as
    there are); an update takes ``accumulation`` of these from each process. ``optimizer`` is "muon" or one of timm's. ``warm_up`` is a
    share of all updates. ``factor_rate`` "fan-in" multiplies the learning rate of a factor of pattern (a, b, c, d) by in_features / c, the
    ratio of the fan-ins of the dense layer and the factor; "same" does not; it and ``weight_decay`` go with timm's optimizers. ``crop`` is
    the least share of an image's area that a random crop keeps (None: a default for the data), ``augment`` one of timm's policies by name.
    ``output_weight`` is the teacher's share in the loss of the scores, and without a head the weight of the features' error;
    ``blocks_weight`` that of the blocks' errors (None: 1 where the teacher has the same blocks, else 0). After ``densify_after`` epochs
    the factors are multiplied out, and training continues dense. ``images_per_epoch`` goes with generated images. ``precision`` None takes
    accelerate's configuration; without one it is bfloat16 on CUDA for images without labels.

    Raises OptionError for a value out of its range.
    """

    epochs: int | None = None
    minutes: float | None = None
    batch_size: int | None = None
    accumulation: int = 1
    learning_rate: float | None = None
    factor_rate: Literal["fan-in", "same"] | None = None
    optimizer: str | None = None
    weight_decay: float | None = None
    warm_up: float | None = None
    clip: float | None = None
    smoothing: float = 0.1
    mixup: float = 0.0
    cutmix: float = 0.0
    crop: float | None = None
    flip: float | None = None
    augment: str | None = None
    erase: float = 0.0
    output_weight: float | None = None
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
        for names, expected, fits in RANGES:
            for name in names.split():
                value = getattr(self, name)
                _check(value is None or (isinstance(value, int | float) and fits(value)), name, expected, value)
        check_seed(self.seed)
        if self.epochs is not None and self.minutes is not None:
            raise OptionError("epochs and minutes are two measures of the same run; give one of them")
        after, epochs = self.densify_after, self.epochs or EPOCHS
        if after is not None and self.minutes is not None:
            raise OptionError("densify_after counts epochs; give epochs in place of minutes with it")
        until = f"from 1 to {epochs - 1}, with {epochs} epochs" if epochs > 1 else "left out where there is one epoch"
        _check(after is None or 0 < after < epochs, "densify_after", until, after)
        if self.mixes and (self.batch_size or BATCH) % 2:
            raise OptionError(f"mixup and cutmix mix images two by two, so batch_size must be even, got {self.batch_size}")

    def completed(self, *, teacher: bool = False, labelled: bool = True, sharded: bool = False) -> "Settings":
        """Choose what was left open, by what the run has; OptionError for what does not go with it."""
        chosen: dict[str, Any] = {}
        if self.optimizer is None:
            chosen["optimizer"] = MUON if teacher and not sharded and self.densify_after is None else "adamw"
        is_muon = chosen.get("optimizer", self.optimizer) == MUON
        if self.epochs is None and self.minutes is None:
            chosen |= {"epochs": EPOCHS} if labelled or self.densify_after is not None else {"minutes": MINUTES}
        if is_muon:
            self._check_muon(teacher=teacher, sharded=sharded)
        if teacher and labelled and self.output_weight is not None and self.output_weight > 1:
            raise OptionError(f"output_weight is the teacher's share beside the labels, so at most 1, got {self.output_weight}")
        chosen |= {name: value for name, value in (OF_MUON if is_muon else OF_TIMM).items() if getattr(self, name) is None}
        return replace(self, **chosen)

    def _check_muon(self, *, teacher: bool, sharded: bool) -> None:
        given = [name for name in ("weight_decay", "factor_rate") if getattr(self, name) is not None]
        if given:
            raise OptionError(f"muon has no {given[0]}, which goes with timm's optimizers; leave it out, or give the optimizer adamw")
        if sharded or self.densify_after is not None:
            what = "weights shared out among processes" if sharded else "densify_after"
            raise OptionError(f"muon cannot be used with {what}; give the optimizer adamw")
        if not teacher and self.learning_rate is None:
            raise OptionError("muon takes its rate from the distance to a teacher, and there is none; give a teacher or a learning rate")

    def pays_fusing(self, samples: int) -> bool:
        """Say whether a run on so many images is long enough for ``optimize`` to pay."""
        if self.minutes is not None:
            return self.minutes >= FUSED_FROM_MINUTES
        return (self.epochs or EPOCHS) * samples >= FUSED_FROM_IMAGES

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    @property
    def distorts(self) -> bool:
        """Whether the settings ask for more than what is done to images on the device."""
        return self.crop is not None or self.flip is not None or self.augment is not None or self.erase > 0


def _check(fine: bool, name: str, expected: str, value: object) -> None:
    if not fine:
        raise OptionError(f"{name} must be {expected}, got {value}")


def check_installed(settings: Settings) -> None:
    """Check that what the run needs is installed; else TrainingError says how to install it."""
    if find_spec("accelerate") is None:
        raise TrainingError("training needs accelerate, which is not installed: pip install 'flysurgery[train]'")
    if settings.tensorboard and find_spec("tensorboard") is None and find_spec("tensorboardX") is None:
        raise TrainingError("TensorBoard logs need tensorboard, which is not installed: pip install tensorboard")
