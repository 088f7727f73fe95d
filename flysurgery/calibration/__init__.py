"""Calibration: the samples, the inputs that they give to the layers of a model, and how much the output depends on each layer."""

from flysurgery.calibration.forwards import Inputs, collect, inputs_of, main_output, run, sensitivities, unchanged_state, watched
from flysurgery.calibration.samples import ASPECT, DEFAULT_SAMPLES, SIDES, Data, Pictures, Samples, samples_of

__all__ = ["Data", "Samples", "samples_of"]
