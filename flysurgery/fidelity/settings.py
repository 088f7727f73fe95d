"""The settings of a fit to the dense model, apart from models and samples, and its length. Fine-tuning with a teacher uses the same."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from flysurgery.errors import OptionError

MINUTES = {"cuda": 1.0, "cpu": 20.0}  # the budget of a reconstruction where none is given, by the kind of device
FUSED_FROM_MINUTES, FUSING_SHARE = 1.0, 0.25
"""A reconstruction on CUDA uses fused modules from this budget on, and fuses no further model after this share of it. Measuring takes some
8 seconds for both models, and more where kernels are compiled."""
VIEWS = {"cuda": 64, "cpu": 8}  # views of an update, by the kind of device. A CPU makes few updates; with few views each it makes more
REACH = 0.5  # the share of the gradient that passes from a block to the one before it, see ``Pull``; in the trials better than 0 and 1
TAUGHT = 0.2
"""The share of entries between blocks that are the teacher's when a reconstruction begins; it falls in a line to none, see ``Pull``. In
trials of 75 seconds on Monarch 4 with a dense v the class token and the patch tokens gain .005."""
OUTPUT_WEIGHT = 0.2  # the weight of the error of what the model returns, beside the blocks' and the tokens' own. No other was tried
HIGHEST_RATE, LEAST_RATE = 7e-3, 0.5e-3  # of a start that has all or next to nothing to learn, as shares of a parameter's size
TIMED = 5  # updates that measure the time of one, where that takes no more than the share ``SPARED`` of the budget
LOOKED = 0.2  # the largest share of a budget that looks at held-out samples may take
SPARED = 0.03  # the share of what is left of a budget that the updates leave for everything else


@dataclass(frozen=True)
class Settings:
    """The choices of one reconstruction. ``batch`` counts the views of one update; ``rate`` is that of a start with an error of 1.

    The trials behind the defaults are in ``recipes/results/real_weights_trials_h200.csv``. Raises OptionError for a budget that is no
    positive number.
    """

    minutes: float
    batch: int = VIEWS["cuda"]
    rate: float = HIGHEST_RATE
    seed: int = 0

    @classmethod
    def on(cls, device: torch.device, minutes: float | None = None, seed: int = 0) -> "Settings":
        """Choose the settings for a device, with its default budget where no minutes are given."""
        kind = device.type if device.type in MINUTES else "cpu"
        return cls(MINUTES[kind] if minutes is None else minutes, VIEWS[kind], seed=seed)

    @property
    def fusing_seconds(self) -> float:
        """The seconds from the start after which no further model is fused; 0 for short runs."""
        return 60 * self.minutes * FUSING_SHARE if self.minutes >= FUSED_FROM_MINUTES else 0.0

    def __post_init__(self) -> None:
        if not 0 < self.minutes < float("inf"):
            raise OptionError(f"minutes must be a positive number, got {self.minutes:g}")


def rate_for(relative_error: float, highest: float = HIGHEST_RATE) -> float:
    """Give the highest rate of a run that starts with this error. A good start needs a lower rate."""
    return max(LEAST_RATE, highest * min(1.0, relative_error))


def moments(updates: int, looks: int) -> frozenset[int]:
    """Choose the updates after which held-out samples judge: the last one, and more towards the end, as the rate falls."""
    return frozenset(max(1, round((1 - (1 - look / looks) ** 2) * updates)) for look in range(1, looks + 1))


def affordable_looks(most: int, budget: float, each: float) -> int:
    """Choose how often held-out samples judge a run of so many seconds, at most ``most`` times, where one look takes ``each`` seconds."""
    return max(1, min(most, int(LOOKED * budget / max(each, 1e-9))))


def affordable(update: Callable[[], Tensor], seconds: float, agreed: Callable[[float], float]) -> int:
    """Measure how many updates fit into ``seconds``, from now on; at least one. ``update`` makes one, at a rate of zero.

    ``agreed`` gives one number to all processes. Updates exchange gradients, so all must make equally many here: each number that their
    count follows from is agreed on, the seconds too.
    """
    started, seconds = perf_counter(), agreed(seconds)

    def timed(updates: int) -> float:
        begun = perf_counter()
        for _ in range(updates):
            update().tolist()  # reads from the device, so that it waits for it
        return agreed((perf_counter() - begun) / updates)

    each = timed(1)
    more = min(TIMED, int(SPARED * seconds / each))
    each = timed(more) if more > 0 else each
    return max(1, int(agreed((seconds - (perf_counter() - started)) * (1 - SPARED) / each)))
