"""How close a converted model's outputs are to the dense model's, and how to bring them closer."""

from flysurgery.fidelity.captured import Captured as Captured
from flysurgery.fidelity.copies import Copied as Copied
from flysurgery.fidelity.measure import ENOUGH as ENOUGH
from flysurgery.fidelity.measure import Fidelity as Fidelity
from flysurgery.fidelity.measure import measure_fidelity as measure_fidelity
from flysurgery.fidelity.optimizer import Muon as Muon
from flysurgery.fidelity.optimizer import parameter_groups as parameter_groups
from flysurgery.fidelity.reconstruction import Progress as Progress
from flysurgery.fidelity.reconstruction import Reconstruction as Reconstruction
from flysurgery.fidelity.reconstruction import reconstruct as reconstruct
from flysurgery.fidelity.settings import OUTPUT_WEIGHT as OUTPUT_WEIGHT
from flysurgery.fidelity.settings import REACH as REACH
from flysurgery.fidelity.settings import VIEWS as VIEWS
from flysurgery.fidelity.settings import Settings as Settings
from flysurgery.fidelity.settings import affordable as affordable
from flysurgery.fidelity.settings import moments as moments
from flysurgery.fidelity.settings import rate_for as rate_for
from flysurgery.fidelity.stream import Pull as Pull
from flysurgery.fidelity.stream import Stream as Stream
from flysurgery.fidelity.stream import relative_error as relative_error
from flysurgery.fidelity.views import views as views
