"""Calibration: the samples, the inputs that they give to the layers of a model, and how much the output depends on each layer."""

from flysurgery.calibration.forwards import Inputs as Inputs
from flysurgery.calibration.forwards import collect as collect
from flysurgery.calibration.forwards import inputs_of as inputs_of
from flysurgery.calibration.forwards import main_output as main_output
from flysurgery.calibration.forwards import run as run
from flysurgery.calibration.forwards import sensitivities as sensitivities
from flysurgery.calibration.forwards import unchanged_state as unchanged_state
from flysurgery.calibration.forwards import watched as watched
from flysurgery.calibration.samples import ASPECT as ASPECT
from flysurgery.calibration.samples import DEFAULT_SAMPLES as DEFAULT_SAMPLES
from flysurgery.calibration.samples import SIDES as SIDES
from flysurgery.calibration.samples import Data as Data
from flysurgery.calibration.samples import Pictures as Pictures
from flysurgery.calibration.samples import Samples as Samples
from flysurgery.calibration.samples import samples_of as samples_of
