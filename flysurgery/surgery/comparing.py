"""The converted model beside the dense one: its fidelity, and its reconstruction."""

from __future__ import annotations

import copy

from torch import nn

from flysurgery.calibration import Samples
from flysurgery.errors import SurgeryError
from flysurgery.fidelity import Fidelity, Reconstruction, Settings, measure_fidelity, reconstruct
from flysurgery.surgery.plan import Plan
from flysurgery.surgery.projecting import Progress
from flysurgery.surgery.verify import example_of
from flysurgery.walker import find_cuts, shadow, survey


def settings_of(budget: bool | float, seed: int, model: nn.Module) -> Settings | None:
    """What ``apply``'s ``reconstruct`` asks for: minutes, True for the default of the model's device, False for none.

    Raises:
        OptionError: minutes that are no positive number.
    """
    if budget is False:
        return None
    return Settings.on(next(model.parameters()).device, None if budget is True else float(budget), seed)


class DenseReference:
    """The dense model from before the change, which the converted one is held against."""

    def __init__(self, plan: Plan, dense: nn.Module, samples: Samples, settings: Settings | None) -> None:
        """``settings`` are those of the reconstruction, None for none.

        Raises:
            SurgeryError: a reconstruction is asked for, and the plan does not say what the model takes.
        """
        self._samples, self._settings = samples, settings
        example = example_of(plan, dense)
        if example is None and settings is not None:
            raise SurgeryError("the plan describes no example input to trace the model with, which reconstruction needs; plan with tensors")
        self._cuts = () if example is None else find_cuts(survey(dense, example))
        # A reconstruction changes parameters that the two models would share otherwise.
        self._dense = shadow(dense) if settings is None else copy.deepcopy(shadow(dense))

    def run(self, model: nn.Module, progress: Progress | None) -> tuple[Fidelity, Reconstruction | None]:
        """Reconstruct the converted model, in place, if that was asked for; and its fidelity."""
        if self._settings is None:
            return measure_fidelity(model, self._dense, self._samples.held_out(), self._cuts), None
        done = reconstruct(model, self._dense, self._samples, self._cuts, self._settings, progress=progress)
        return done.after, done
