"""What flows through a model: inputs of its layers, seen in one pass over some samples, and what its output makes of their errors."""

from flysurgery.calibration.collect import collect as collect
from flysurgery.calibration.collect import watched as watched
from flysurgery.calibration.pictures import ASPECT as ASPECT
from flysurgery.calibration.pictures import SIDES as SIDES
from flysurgery.calibration.pictures import Pictures as Pictures
from flysurgery.calibration.samples import DEFAULT_SAMPLES as DEFAULT_SAMPLES
from flysurgery.calibration.samples import Data as Data
from flysurgery.calibration.samples import Samples as Samples
from flysurgery.calibration.samples import samples_of as samples_of
from flysurgery.calibration.sensitivity import sensitivities as sensitivities
from flysurgery.calibration.unchanged import unchanged_state as unchanged_state
