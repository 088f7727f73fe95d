"""How close a converted model's outputs are to the dense model's, and how to bring them closer."""

from flysurgery.fidelity.captured import Captured, made_ahead
from flysurgery.fidelity.measure import ENOUGH, Fidelity, measure_fidelity
from flysurgery.fidelity.optimizer import Muon, parameter_groups
from flysurgery.fidelity.reconstruction import Copied, Progress, Reconstruction, reconstruct
from flysurgery.fidelity.settings import OUTPUT_WEIGHT, REACH, VIEWS, Settings, affordable, affordable_looks, moments, rate_for
from flysurgery.fidelity.stream import Pull, Stream, relative_error
from flysurgery.fidelity.views import views

__all__ = ["Fidelity", "Reconstruction", "Settings", "measure_fidelity", "reconstruct"]
